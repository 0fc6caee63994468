"""Steps: a model's step function, jitted with the cache in place."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcache.device.donation import Donating, abstract, is_dead
from jaxcache.device.movers import Mover
from jaxcache.device.pools import update_tables
from jaxcache.device.proof import StepReport
from jaxcache.device.state import CacheState
from jaxcache.device.step_inputs import begin_step
from jaxcache.inputs.buckets import Bucket
from jaxcache.inputs.packing import PackedInputs
from jaxcache.layouts.arguments import check_name, integer


class Step:
    """A jitted step; made by `jit_step`.

    Called as `state, out = step(params, state, packed, *extra)`. The first call with a
    bucket compiles and proves it; a later one costs a few microseconds more than the
    compiled function itself.
    """

    def __init__(self, fn: Callable[..., Any], state_argnum: int, name: str) -> None:
        self._at = state_argnum
        self._donating = Donating(_stepping(fn, state_argnum), name)
        self._update = Mover(update_tables, "update_tables")
        # The program that a bucket ran last; whether the other arguments still fit is
        # checked by the program itself.
        self._latest: dict[Bucket, jax.stages.Compiled] = {}

    @property
    def name(self) -> str:
        """Name in reports and errors."""
        return self._donating.name

    @property
    def reports(self) -> tuple[StepReport, ...]:
        """One report for each compilation, that of a refused step included."""
        return tuple(self._donating.reports)

    @property
    def compilations(self) -> int:
        """How many programs of the step were compiled."""
        return self._donating.compilations

    @property
    def update_compilations(self) -> int:
        """How many programs were compiled for bursts of table updates."""
        return self._update.compilations

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling and proving, table updates included."""
        return self._donating.compile_seconds + self._update.compile_seconds

    def __call__(self, *args: Any) -> tuple[CacheState, Any]:
        """Runs a step.

        Args:
            *args: Those of the step function, `PackedInputs` in place of `StepInputs`.
                The state is donated.

        Returns:
            The updated state, in the memory of the one passed, and the step's output.

        Raises:
            PoolCopied: if the step would copy a pool; nothing was run.
            RuntimeError: if the state was donated before. A step that fails as it runs
                raises its own error, and its state is lost.
            ValueError: if an argument does not fit; nothing was run.
        """
        at = self._at
        try:
            state, packed = args[at], args[at + 1]
            compiled = self._latest.get(packed.bucket)
            burst = packed.extra_updates is not None
            dead = is_dead(state)
        except (AttributeError, IndexError):
            _check_arguments(args, at, self.name)
            raise
        if compiled is not None and not burst and not dead:
            try:
                result: tuple[CacheState, Any] = compiled(
                    state, packed, *args[:at], *args[at + 2 :]
                )
                return result
            except (TypeError, ValueError, RuntimeError):
                # The step failed as it ran, or was refused before: another signature.
                if is_dead(state) or self._prepare(args)[0] is compiled:
                    raise
        return self._run_prepared(args)

    def compile(self, *args: Any) -> StepReport:
        """Compiles and proves a step without running it, to warm up.

        Args:
            *args: Those of a call, concrete or abstract; a `Bucket` may stand for the
                packed inputs.

        Returns:
            The report on the program.
        """
        return self._prepare(_with_packed(args, self._at, self.name))[1]

    def _prepare(self, args: tuple[Any, ...]) -> tuple[jax.stages.Compiled, StepReport]:
        _check_arguments(args, self._at, self.name)
        return self._donating.prepare(*_ordered(args, self._at))

    def _run_prepared(self, args: tuple[Any, ...]) -> tuple[CacheState, Any]:
        _check_arguments(args, self._at, self.name)
        state, packed, *others = _ordered(args, self._at)
        self._donating.refuse_dead(state)
        # A burst of updates goes first and on its own, so that its size does not add to
        # the shapes of a step; only after the step itself is known to be good.
        plain = PackedInputs(
            packed=packed.packed,
            extra_updates=None,
            bucket=packed.bucket,
            size=packed.size,
        )
        compiled, _ = self._donating.prepare(state, plain, *others)
        if packed.extra_updates is not None:
            state = self._update(state, packed.extra_updates)
        self._latest[packed.bucket] = compiled
        result: tuple[CacheState, Any] = compiled(state, plain, *others)
        return result


def jit_step(
    fn: Callable[..., Any], *, state_argnum: int = 1, name: str | None = None
) -> Step:
    """Jits a step function with the cache donated, and proves that no pool is copied.

    Args:
        fn: `fn(params, state, inputs: StepInputs, *extra) -> (state, out)`, pure.
        state_argnum: Position of the state in `fn`; the inputs follow it. Arguments
            before and after are passed on and not donated.
        name: Name in reports; `None` is that of `fn`.

    Returns:
        The step. It takes `PackedInputs` where `fn` takes `StepInputs`.
    """
    _check_step(fn, state_argnum, name)
    return Step(fn, state_argnum, name or _name(fn))


def explain_step(
    fn: Callable[..., Any],
    *args: Any,
    state_argnum: int = 1,
    device: jax.Device | None = None,
    name: str | None = None,
) -> StepReport:
    """Compiles a step, or a mover, and reports what it does with the pools.

    Nothing is run, and no memory is needed: all arguments may be abstract
    (`abstract_cache`, `jax.ShapeDtypeStruct`), also for a device that is not attached.

    Args:
        fn: A step function as for `jit_step`, or any pure function that takes a state
            and returns one, alone or first in a tuple.
        *args: Its arguments. A step has `PackedInputs` or a `Bucket` after the state.
        state_argnum: Position of the state.
        device: Device to compile for; `None` is where the arguments are.
        name: Name in the report; `None` is that of `fn`.

    Returns:
        The report; `print` shows it as a table.
    """
    _check_step(fn, state_argnum, name)
    name = name or _name(fn)
    _check_argument(args, state_argnum, CacheState, name)
    after = args[state_argnum + 1 : state_argnum + 2]
    if after and isinstance(after[0], (PackedInputs, Bucket)):
        args = _ordered(_with_packed(args, state_argnum, name), state_argnum)
        fn = _stepping(fn, state_argnum)
    elif state_argnum:
        fn = _state_first(fn, state_argnum)
        args = (args[state_argnum], *args[:state_argnum], *args[state_argnum + 1 :])
    if device is not None:
        args = abstract(args, device)
    return Donating(fn, name).build(*args)[1]


def _name(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _stepping(fn: Callable[..., Any], at: int) -> Callable[..., Any]:
    """Returns the step with the state first and the inputs still packed."""

    def run(state: CacheState, packed: PackedInputs, *others: Any) -> Any:
        state, inputs = begin_step(state, packed)
        result = fn(*others[:at], state, inputs, *others[at:])
        if not isinstance(result, tuple) or len(result) != 2:
            raise ValueError(
                f"{_name(fn)} must return (state, out), got {type(result)}"
            )
        return result

    return run


def _state_first(fn: Callable[..., Any], at: int) -> Callable[..., Any]:
    return lambda state, *others: fn(*others[:at], state, *others[at:])


def _ordered(args: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    return (args[at], args[at + 1], *args[:at], *args[at + 2 :])


def _with_packed(args: tuple[Any, ...], at: int, name: str) -> tuple[Any, ...]:
    """Returns the arguments with a bucket made into abstract packed inputs."""
    if len(args) > at + 1 and isinstance(args[at + 1], Bucket):
        state, bucket = args[at], args[at + 1]
        packed = PackedInputs(
            packed=jax.ShapeDtypeStruct((bucket.num_packed,), jnp.int32),
            extra_updates=None,
            bucket=bucket,
            size=state.size,
        )
        args = (*args[: at + 1], packed, *args[at + 2 :])
    _check_arguments(args, at, name)
    return args


def _check_step(fn: Any, at: Any, name: Any) -> None:
    if not callable(fn):
        raise ValueError(f"fn must be a function, got {type(fn).__name__}")
    integer("state_argnum", at, 0)
    if name is not None:
        check_name("name", name)


def _check_arguments(args: tuple[Any, ...], at: int, name: str) -> None:
    _check_argument(args, at, CacheState, name)
    _check_argument(args, at + 1, PackedInputs, name)


def _check_argument(args: tuple[Any, ...], index: int, kind: type, name: str) -> None:
    if len(args) <= index:
        raise ValueError(
            f"{name} must get a {kind.__name__} as argument {index}, "
            f"got {len(args)} arguments"
        )
    if not isinstance(args[index], kind):
        raise ValueError(
            f"{name} must get a {kind.__name__} as argument {index}, "
            f"got {type(args[index]).__name__}"
        )
