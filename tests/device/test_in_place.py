"""Every pure function and mover keeps a cache of 1 GiB in place, on CPU and H200.

Caches are abstract: nothing is allocated, and the H200 is compiled for, not run.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxcache.device.movers import move
from jaxcache.device.pools import (
    after_read,
    clear_pages,
    clear_rows,
    copy_pages,
    copy_rows,
    emit_snapshots,
    read_pages,
    read_rows,
    update_tables,
    write_rows,
    write_tokens,
)
from jaxcache.device.state import CacheState
from jaxcache.device.step_inputs import StepInputs, begin_step
from jaxcache.inputs.buckets import Bucket, Buckets
from jaxcache.inputs.packing import PackedInputs
from jaxcache.layouts import (
    CacheLayout,
    FullAttention,
    GatedDeltaNet,
    Layer,
    LayerKind,
    Mamba2,
    ModelLayout,
    Order,
    SlidingWindowAttention,
)
from tests.device.caches import ORDERS
from tests.device.proofs import TARGETS, large_cache, prove
from tests.device.steps import scanned, unrolled

FULL = FullAttention(kv_heads=2, head_dim=64)
WINDOW = SlidingWindowAttention(kv_heads=2, head_dim=32, window=128)
MAMBA = Mamba2(num_heads=8, head_dim=64, num_groups=2, state_dim=64, conv_kernel=4)
DELTA = GatedDeltaNet(2, 4, 64, 64, 4)

BUCKETS = Buckets((32,), (256,), max_prefill_seqs=4, max_snapshots=4, max_copies=4)
DECODE, PREFILL, MIXED = (BUCKETS.shapes[key] for key in ((32, 0), (0, 256), (32, 256)))


def hybrid(order: Order) -> CacheLayout:
    kinds: tuple[LayerKind, ...] = (FULL, MAMBA, WINDOW, MAMBA, FULL, MAMBA)
    layers = tuple(Layer(i, kind) for i, kind in enumerate(kinds))
    return CacheLayout(ModelLayout("hybrid", layers), order=order)


def parallel(order: Order) -> CacheLayout:
    """Every layer has an attention and a recurrence, so that a scan may run them."""
    kinds: tuple[LayerKind, ...] = (FULL, DELTA)
    layers = tuple(Layer(i, kind) for i in range(4) for kind in kinds)
    return CacheLayout(ModelLayout("parallel", layers), order=order)


def i32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def packed(state: CacheState, bucket: Bucket) -> PackedInputs:
    return PackedInputs(
        packed=i32(bucket.num_packed),
        extra_updates=i32(4, 256),
        bucket=bucket,
        size=state.size,
    )


def step_inputs(state: CacheState, bucket: Bucket) -> StepInputs:
    inputs: StepInputs = jax.eval_shape(begin_step, state, packed(state, bucket))[1]
    return inputs


def values(layout: CacheLayout, layer: int, count: int, roles: Any, skip: int) -> Any:
    """Abstract values of a layer's roles: `[count, units, *unit_shape[skip:]]`."""
    specs = {role: layout.buffer_spec(layer, role) for role in roles}
    return {
        role: jax.ShapeDtypeStruct(
            (count, spec.units, *spec.unit_shape[skip:]), jnp.float32
        )
        for role, spec in specs.items()
    }


def read_then_write_pages(
    state: CacheState, inputs: StepInputs, ids: jax.Array, new: Any
) -> tuple[CacheState, Any]:
    pages = read_pages(state, 0, "key", ids)
    state, pages = after_read(state, pages)
    return write_tokens(state, inputs, 0, new), pages


Case = tuple[Callable[..., Any], tuple[Any, ...]]


def pure_functions(state: CacheState) -> dict[str, Case]:
    layout, inputs = state.layout, step_inputs(state, MIXED)
    tokens, rows = MIXED.num_tokens, MIXED.num_entries
    kv = values(layout, 0, tokens, ("key", "value"), 1)
    row = values(layout, 1, rows, layout.row_roles(1), 0)
    emitted = values(layout, 1, MIXED.snapshots, layout.row_roles(1), 0)
    ids = i32(64)

    def on(fn: Callable[..., Any], *static: Any) -> Callable[..., Any]:
        return lambda state, *args: fn(state, *static, *args)

    return {
        "write_tokens": (
            lambda state, inputs, kv: write_tokens(state, inputs, 0, kv),
            (inputs, kv),
        ),
        "read_pages": (
            lambda state, ids: (state, read_pages(state, 0, "key", ids)),
            (i32(8, 16),),
        ),
        "read_then_write_pages": (read_then_write_pages, (inputs, i32(8, 16), kv)),
        "read_rows": (on(read_rows, 1), (i32(rows),)),
        "write_rows": (on(write_rows, 1), (i32(rows), row)),
        "emit_snapshots": (
            lambda state, inputs, row: emit_snapshots(state, inputs, 1, row),
            (inputs, emitted),
        ),
        "copy_pages": (on(copy_pages, 0), (ids, ids)),
        "copy_rows": (copy_rows, (i32(16), i32(16))),
        "clear_pages": (on(clear_pages, 1), (ids,)),
        "clear_rows": (clear_rows, (ids,)),
        "update_tables": (update_tables, (i32(4, 1024),)),
        # A step that does nothing is `begin_step` alone.
        "begin_step": (
            lambda state, inputs: (state, inputs),
            (packed(state, MIXED),),
        ),
    }


NAMES = tuple(pure_functions(large_cache(hybrid("units"))))


@functools.cache
def state_of(layout: Callable[[Order], CacheLayout], order: Order) -> CacheState:
    return large_cache(layout(order))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_pure_function_works_in_place(name: str, order: Order, target: str) -> None:
    state = state_of(hybrid, order)
    fn, args = pure_functions(state)[name]
    prove(fn, state, *args, target=target, state_argnum=0, name=name)


MOVES = {
    "copy_pages": (move("copy_pages", 1), i32(2, 64)),
    "copy_rows": (move("copy_rows"), i32(2, 16)),
    "clear_pages": (move("clear_pages", 0), i32(1, 64)),
    "clear_rows": (move("clear_rows"), i32(1, 64)),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", MOVES)
def test_mover_works_in_place(name: str, order: Order, target: str) -> None:
    fn, ids = MOVES[name]
    state = state_of(hybrid, order)
    prove(fn, state, ids, target=target, state_argnum=0, name=name)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "bucket", [DECODE, PREFILL, MIXED], ids=["decode", "prefill", "mixed"]
)
def test_model_step_works_in_place(bucket: Bucket, order: Order, target: str) -> None:
    state = state_of(hybrid, order)
    params = jax.ShapeDtypeStruct((1000,), jnp.float32)
    prove(unrolled(state.layout), params, state, bucket, target=target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("order", ORDERS)
def test_scan_over_layers_works_in_place(order: Order, target: str) -> None:
    state = state_of(parallel, order)
    params = jax.ShapeDtypeStruct((1000,), jnp.float32)
    prove(scanned, params, state, MIXED, target=target)
