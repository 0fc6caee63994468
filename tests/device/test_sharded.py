"""Tensor parallelism: each device keeps its units in place and none moves a pool."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jaxcache.device.donation import Donating
from jaxcache.device.movers import move
from jaxcache.device.pools import update_tables
from jaxcache.device.state import CacheState, init_cache
from jaxcache.device.step import explain_step, jit_step
from jaxcache.device.step_inputs import begin_step
from jaxcache.inputs.packing import PackedInputs, Packer
from jaxcache.layouts import CacheLayout, Order
from tests.device.caches import BUCKETS, MIXED, bits, cache, canonical, hybrid, work
from tests.device.proofs import TARGETS, check, large_cache, mesh, prove
from tests.device.steps import unrolled

PARAMS = np.arange(100, dtype=np.float32)
COLLECTIVE = re.compile(
    r"= (.*?) (?:all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)


def collective_elements(text: str) -> list[int]:
    """Elements of the largest array that each collective of a program gives."""
    return [
        max(math.prod(map(int, dims.split(","))) if dims else 1 for dims in arrays)
        for result in COLLECTIVE.findall(text)
        if (arrays := re.findall(r"\[([\d,]*)\]", result))
    ]


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("order", "count"), [("units", 2), ("units", 4), ("buffers", 4)]
)
def test_sharded_step_works_in_place(order: Order, count: int, target: str) -> None:
    state = large_cache(hybrid(order, count), mesh(target, count))
    report = prove(unrolled(state.layout), i32(100), state, MIXED, target=target)
    whole = sum(state.size.pool_bytes(state.layout))
    pools = report.leaves[: len(state.pools)]
    assert sum(leaf.num_bytes for leaf in pools) * count == whole


# What `Movers` runs, and the mover of a step with many updates.
MOVERS: dict[str, tuple[Any, jax.ShapeDtypeStruct]] = {
    "copy_pages": (move("copy_pages", 0), i32(2, 8)),
    "copy_rows": (move("copy_rows"), i32(2, 8)),
    "clear_pages": (move("clear_pages", 1), i32(1, 8)),
    "clear_rows": (move("clear_rows"), i32(1, 8)),
    "update_tables": (update_tables, i32(4, 64)),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MOVERS)
def test_sharded_mover_works_in_place(name: str, target: str) -> None:
    fn, ids = MOVERS[name]
    state = large_cache(hybrid("units", 4), mesh(target, 4))
    prove(fn, state, ids, target=target, state_argnum=0, name=name)
    text = Donating(fn, name).build(state, ids)[0].as_text()
    assert collective_elements(text or "") == []


def gathers_a_pool(state: CacheState, ids: Any) -> tuple[CacheState, Any]:
    return state, state.pools[0].reshape(-1)[ids]


@pytest.mark.parametrize("target", TARGETS)
def test_collectives_carry_activations_only(target: str) -> None:
    """Tokens and states of a step may cross devices, a pool or a layer of it never."""
    layout = hybrid("units", 4)
    state = large_cache(layout, mesh(target, 4))
    step = unrolled(layout)

    def whole(state: CacheState, packed: PackedInputs) -> Any:
        state, inputs = begin_step(state, packed)
        return step(jnp.asarray(PARAMS), state, inputs)

    packed = PackedInputs(
        packed=i32(MIXED.num_packed), extra_updates=None, bucket=MIXED, size=state.size
    )
    compiled, _ = Donating(whole, "whole").build(state, packed)
    moved = collective_elements(compiled.as_text() or "")
    assert max(moved, default=0) <= 4096
    # The same count on a step that does gather a pool, so that the test can fail.
    text = Donating(gathers_a_pool, "x").build(state, i32(8))[0].as_text() or ""
    assert max(collective_elements(text), default=0) > 4096


@functools.cache
def steps_of(layout: CacheLayout, mesh: Mesh | None) -> tuple[CacheState, list[Any]]:
    """A few steps with reuse of rows and pages, on a mesh."""
    state = cache(layout, mesh)
    packer = Packer(layout, state.size, BUCKETS)
    step = jit_step(unrolled(layout))
    works = [
        work(
            prefill_seats=[0, 1],
            prefill_starts=[0, 0],
            prefill_lens=[5, 3],
            prefill_tokens=[1, 2, 3, 4, 5, 6, 7, 8],
            snapshot_entries=[0],
            snapshot_positions=[4],
            snapshot_slots=[9],
            updates=[
                *[
                    (g, s, c, 3 + 4 * s + c)
                    for g in (0, 1)
                    for s in (0, 1)
                    for c in (0, 1)
                ],
                *[(2, s, 1, 3 + s) for s in (0, 1)],
            ],
        ),
        work(
            decode_seats=[1, 0],
            decode_positions=[3, 5],
            decode_tokens=[9, 10],
            updates=[(2, 0, 0, 3), (2, 1, 0, 9)],
        ),
    ]
    outs = []
    for todo in works:
        state, out = step(PARAMS, state, packer.pack(todo))
        outs.append(np.asarray(out))
    return state, outs


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((2,), AxisType.Auto),
        ((2, 2), AxisType.Auto),
        ((2,), AxisType.Explicit),
    ],
    ids=["two", "data-and-tensor", "explicit"],
)
def test_sharded_steps_write_the_same_bits(
    shape: tuple[int, ...], kind: AxisType
) -> None:
    names = ("data", "tensor")[-len(shape) :]
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    sharded = Mesh(devices, names, axis_types=(kind,) * len(shape))
    one, outs = steps_of(hybrid(), None)
    two, came = steps_of(hybrid("units", 2), sharded)
    for spec, other, a, b in zip(
        one.layout.pools, two.layout.pools, canonical(one), canonical(two), strict=True
    ):
        repeated = np.repeat(a, other.units // spec.units, axis=2)
        np.testing.assert_array_equal(bits(b), bits(repeated))
    np.testing.assert_array_equal(one.page_table, two.page_table)
    # Sums over repeated units count them twice; only the layers without them compare.
    for a, b in zip(outs, came, strict=True):
        np.testing.assert_allclose(b[[0, 2]], a[[0, 2]], rtol=1e-5)


def test_a_mesh_of_one_device_is_a_mesh() -> None:
    mesh_of_one = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    state, _ = steps_of(hybrid(), mesh_of_one)
    alone, _ = steps_of(hybrid(), None)
    for a, b in zip(state.pools, alone.pools, strict=True):
        np.testing.assert_array_equal(a, b)


def test_pools_that_would_be_gathered_are_refused() -> None:
    state = init_cache(
        hybrid("units", 4), 16, 12, mesh("cpu", 4), max_seqs=4, max_tokens=16
    )
    report = explain_step(gathers_a_pool, state, i32(8), state_argnum=0)
    assert not report.in_place, report
    check(
        explain_step(lambda s: s, large_cache(state.layout, state.mesh), state_argnum=0)
    )
