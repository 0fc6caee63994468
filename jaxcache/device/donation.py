"""Donation: functions of a state, compiled once a signature and proven in place."""

import dataclasses
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxcache.device.proof import (
    PoolCopied,
    StepReport,
    confirmed,
    explain_compiled,
    layer_bytes,
)
from jaxcache.device.state import CacheState, abstract_cache, constrain
from jaxcache.inputs.packing import PackedInputs

# A cache this large makes a copy of any pool outgrow the noise of a memory plan, and
# one of this many times all memory beside the state outgrows an activation that is dead
# by then, whose memory the copy takes.
_PROOF_SLOTS = 4096
_PROOF_ROOM = 8
# Ids of slots are 32-bit integers.
_MOST_SLOTS = 2**30

_DEAD = """\
The state passed to {name} has been donated already: its memory now belongs to the
state that an earlier call returned. This goes wrong:

    {name}(..., state, ...)
    {name}(..., state, ...)

This is right (a mover returns the state alone):

    state, out = {name}(..., state, ...)

If an old state is needed, copy it first, which takes as much memory as the cache:
jax.tree.map(jnp.copy, state).\
"""


class Donating:
    """A pure function of a state, made to update it in place.

    Each signature is compiled once, ahead of time, with the state donated; the program
    is then proven to work in place, or refused with `PoolCopied`. The state is argument
    0, and the result is a state or a tuple that starts with one.

    Attributes:
        name: Name in reports and errors.
        reports: One report for each compilation.
    """

    def __init__(self, fn: Callable[..., Any], name: str) -> None:
        self._fn = _keeping(fn, name)
        self._programs: dict[Hashable, tuple[jax.stages.Compiled, StepReport]] = {}
        self.name = name
        self.reports: list[StepReport] = []

    @property
    def compilations(self) -> int:
        """How many signatures were compiled."""
        return len(self.reports)

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on tracing, lowering and compiling, proofs included."""
        return sum(report.compile_seconds for report in self.reports)

    def prepare(self, *args: Any) -> tuple[jax.stages.Compiled, StepReport]:
        """Returns the program for these arguments, maybe abstract, and its report.

        Raises:
            PoolCopied: if it would not work in place. Nothing was donated.
        """
        key = _signature(args)
        program = self._programs.get(key)
        if program is None:
            program = self.build(*args)
            report = program[1]
            self.reports.append(report)
            if not report.in_place:
                raise PoolCopied(report)
            self._programs[key] = program
        return program

    def build(self, *args: Any) -> tuple[jax.stages.Compiled, StepReport]:
        """Returns a new program for these arguments and what it does."""
        start = time.perf_counter()
        compiled = self._compile(args)
        state: CacheState = args[0]
        report = explain_compiled(
            compiled, state, name=self.name, platform=_platform(state)
        )
        if any(leaf.copies for leaf in report.leaves):
            report = self._confirmed(args, report)
        seconds = time.perf_counter() - start
        return compiled, dataclasses.replace(report, compile_seconds=seconds)

    def _compile(self, args: tuple[Any, ...]) -> jax.stages.Compiled:
        # The only donation in the package: always argument 0, always the state.
        return jax.jit(self._fn, donate_argnums=0).lower(*args).compile()

    def _confirmed(self, args: tuple[Any, ...], report: StepReport) -> StepReport:
        """Compiles for a larger cache and drops what that does not confirm."""
        state: CacheState = args[0]
        layers = layer_bytes(report, state)
        groups = [group.group_id for group in state.layout.groups]
        slots = [state.size.group_slots(group) for group in groups]
        least = max(2, -(-_PROOF_SLOTS // min(slots)))
        room = -(-_PROOF_ROOM * report.room_bytes // min(layers.values()))
        for factor in (max(least, min(room, _MOST_SLOTS // max(slots))), least):
            try:
                size = dataclasses.replace(
                    state.size,
                    num_pages=tuple(factor * pages for pages in state.size.num_pages),
                    num_rows=factor * state.size.num_rows,
                )
                resized = _resized(args, size)
                compiled = self._compile(resized)
                break
            except (TypeError, ValueError, OverflowError, jax.errors.JaxRuntimeError):
                # An index of its own may be too small for that many slots.
                continue
        else:
            # The function fits no other size of cache.
            return report
        larger = explain_compiled(compiled, resized[0])
        grown = min(
            larger.leaves[index].num_bytes // state.layout.pools[index].num_buffers
            - num_bytes
            for index, num_bytes in layers.items()
        )
        growth = (larger.room_bytes - report.room_bytes) / grown
        return confirmed(report, larger, growth)

    def refuse_dead(self, state: CacheState) -> None:
        """Raises the error of a state that was used twice, if it was."""
        if is_dead(state):
            raise RuntimeError(_DEAD.format(name=self.name)) from None


def is_dead(state: CacheState) -> bool:
    """Says whether an array of a state has been donated, or deleted."""
    # At every step, so without a generator, which costs as much as all the questions.
    for leaf in (*state.pools, state.page_table, state.row_index):
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            return True
    return False


def _keeping(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Returns the function, made to give back a state like the one it got."""

    def run(state: CacheState, *args: Any) -> Any:
        result = fn(state, *args)
        if isinstance(result, CacheState):
            return _same_state(name, state, result)
        if not isinstance(result, tuple) or not result:
            raise ValueError(
                f"{name} must return the updated state first, got {type(result)}"
            )
        return (_same_state(name, state, result[0]), *result[1:])

    run.__name__ = run.__qualname__ = name
    return run


def _same_state(name: str, before: CacheState, after: Any) -> CacheState:
    """Checks that structure, shapes and dtypes are kept, and fixes the shardings."""
    wanted, came = jax.tree.structure(before), jax.tree.structure(after)
    if not isinstance(after, CacheState) or (came,) != (wanted,):
        raise ValueError(
            f"{name} must return a state of structure {wanted}, got {came}"
        )
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise ValueError(
                f"{name} must return a state with arrays as it got them, "
                f"{old.dtype}{list(old.shape)}, got {new.dtype}{list(new.shape)}"
            )
    if before.mesh is None:
        return after
    return dataclasses.replace(
        after,
        pools=tuple(
            constrain(pool, after.pool_sharding(index))
            for index, pool in enumerate(after.pools)
        ),
        page_table=constrain(after.page_table, after.replicated),
        row_index=constrain(after.row_index, after.replicated),
    )


def _signature(args: tuple[Any, ...]) -> Hashable:
    leaves, structure = jax.tree.flatten(args)
    return (structure, tuple(_leaf_signature(leaf) for leaf in leaves))


def _leaf_signature(leaf: Any) -> Hashable:
    """Returns what a compilation depends on; an array elsewhere has another program."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, SingleDeviceSharding):
        (device,) = sharding.device_set
        sharding = None if device == jax.devices()[0] else sharding
    if isinstance(leaf, (np.ndarray, np.generic, jax.Array, jax.ShapeDtypeStruct)):
        weak = getattr(leaf, "weak_type", False)
        return (tuple(leaf.shape), np.dtype(leaf.dtype), weak, sharding)
    return type(leaf).__name__


def abstract(args: Any, device: jax.Device | None = None) -> Any:
    """Returns the shapes of a pytree of arguments, for another device if one is given.

    Args:
        args: The arguments. Arrays on a mesh stay on their mesh.
        device: The device, also one that is not attached.
    """

    def shape(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        if device is not None:
            sharding = SingleDeviceSharding(device)
        elif isinstance(leaf, jax.Array) and len(leaf.devices()) == 1:
            sharding = None
        aval = jax.typeof(leaf) if not isinstance(leaf, jax.ShapeDtypeStruct) else leaf
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)

    return jax.tree.map(shape, args)


def _resized(args: tuple[Any, ...], size: Any) -> tuple[Any, ...]:
    """Returns the shapes of the arguments for a cache of another size."""
    state: CacheState = args[0]
    resized = abstract_cache(
        state.layout, size, state.mesh, tensor_axis=state.tensor_axis
    )
    if state.mesh is None:
        (device,) = _devices(state)
        resized = abstract(resized, device)
    rest = [
        dataclasses.replace(arg, size=size) if isinstance(arg, PackedInputs) else arg
        for arg in abstract(args[1:])
    ]
    return (resized, *rest)


def _devices(state: CacheState) -> set[jax.Device]:
    sharding = state.pools[0].sharding
    return set(jax.devices()[:1]) if sharding is None else set(sharding.device_set)


def _platform(state: CacheState) -> str:
    device = next(iter(_devices(state)))
    kind = device.device_kind
    return device.platform if kind == device.platform else f"{device.platform} ({kind})"
