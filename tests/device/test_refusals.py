"""Steps that copy a pool are refused by its name; a tiny cache refuses no other."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcache.device.donation import abstract
from jaxcache.device.pools import after_read
from jaxcache.device.proof import PoolCopied, StepReport, explain_compiled
from jaxcache.device.state import CacheState, abstract_cache, init_cache
from jaxcache.device.step import explain_step, jit_step
from jaxcache.device.step_inputs import StepInputs
from jaxcache.inputs.packing import Packer
from jaxcache.layouts import (
    CacheLayout,
    CacheSize,
    FullAttention,
    Layer,
    Mamba2,
    ModelLayout,
)
from tests.device import steps
from tests.device.caches import BUCKETS, MIXED, work
from tests.device.proofs import TARGETS, check, devices, large_cache, prove

ATTENTION = FullAttention(kv_heads=2, head_dim=64, dtype="float32")
MAMBA = Mamba2(num_heads=2, head_dim=8, num_groups=1, state_dim=8, conv_kernel=4)
LAYOUT = CacheLayout(
    ModelLayout("toy", (Layer(0, ATTENTION), Layer(1, MAMBA), Layer(2, ATTENTION))),
    tokens_per_page=4,
)
POOL = "attention0.key+value"
SIZE = CacheSize.create(LAYOUT, 24, 8, max_seqs=4, max_tokens=64)


@functools.cache
def small() -> CacheState:
    return abstract_cache(LAYOUT, SIZE)


@functools.cache
def explained(fn: Callable[..., Any], large: bool, target: str) -> StepReport:
    state = large_cache(LAYOUT) if large else small()
    (device,) = devices(target)
    return explain_step(fn, state, MIXED, state_argnum=0, device=device)


# What is copied depends on the target, and in neither direction does one stand for the
# other; what a target may do with a step of another list is not asserted.
ON_BOTH = [steps.bitcasts_the_pool, steps.scans_pools_of_layers]
ON_CPU = [
    steps.reads_then_overwrites,
    steps.gathers_before_it_scatters,
    steps.kernel_then_update,
]
ON_H200 = [steps.scatters_into_a_reshape]
COPYING = [
    *((fn, "cpu") for fn in ON_BOTH + ON_CPU),
    *(pytest.param(fn, "h200", marks=pytest.mark.h200) for fn in ON_BOTH + ON_H200),
]


@pytest.mark.parametrize(("fn", "target"), COPYING)
@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_step_that_copies_a_pool_is_found(
    fn: Callable[..., Any], target: str, large: bool
) -> None:
    report = explained(fn, large, target)
    copied = [leaf.name for leaf in report.leaves if not leaf.in_place]
    assert copied == [POOL], report
    # Alias alone would have passed it.
    assert report.alias_bytes == report.state_bytes
    assert f"{POOL}  float32" in str(report)
    assert "COPIED" in str(report)


@pytest.mark.parametrize("target", TARGETS)
def test_after_read_cures_a_kernel(target: str) -> None:
    state = large_cache(LAYOUT)
    prove(steps.kernel_then_ordered_update, state, MIXED, target=target, state_argnum=0)


@pytest.mark.parametrize(
    "fn",
    [
        steps.reads_then_overwrites,
        steps.scans_pools_of_layers,
        steps.bitcasts_the_pool,
    ],
    ids=["read", "scan", "bitcast"],
)
def test_refused_step_has_run_nothing(fn: Callable[..., Any]) -> None:
    state = init_cache(LAYOUT, 24, 8, max_seqs=4, max_tokens=64)
    packed = Packer(LAYOUT, state.size, BUCKETS).pack(
        work(
            decode_seats=[0],
            decode_positions=[0],
            decode_tokens=[1],
            prefill_seats=[1],
            prefill_starts=[0],
            prefill_lens=[1],
            prefill_tokens=[1],
        )
    )
    step = jit_step(fn, state_argnum=0)
    with pytest.raises(PoolCopied, match=r"would copy pool 'attention0\.key") as caught:
        step(state, packed)
    assert caught.value.pools == (POOL,)
    assert caught.value.report is step.reports[0]
    assert "after_read" in str(caught.value)
    assert step.compilations == 1
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.h200
def test_scatter_into_a_reshape_is_refused_for_the_h200() -> None:
    (device,) = devices("h200")
    step = jit_step(steps.scatters_into_a_reshape, state_argnum=0)
    with pytest.raises(PoolCopied, match=r"would copy pool 'attention0\.key") as caught:
        step.compile(abstract(small(), device), MIXED)
    assert caught.value.pools == (POOL,)
    assert caught.value.report is step.reports[0]


def test_step_must_return_arrays_as_it_got_them() -> None:
    def grows(state: CacheState, inputs: StepInputs) -> tuple[CacheState, Any]:
        pool = jnp.concatenate((state.pools[1], state.pools[1]))
        return steps.with_pool(state, 1, pool), None

    with pytest.raises(ValueError, match=r"arrays as it got them, bfloat16\[\d+, 2"):
        explained(grows, False, "cpu")


def shaped_like_the_pool(
    state: CacheState, inputs: StepInputs
) -> tuple[CacheState, Any]:
    """Activations of exactly the pool's shape, which no larger cache makes larger."""
    shape = small().pools[0].shape
    x = jnp.arange(np.prod(shape), dtype=jnp.float32) + inputs.token_ids.sum().astype(
        jnp.float32
    )
    y = jnp.sort(x.reshape(shape), axis=-1)
    return state, jnp.cumsum(jnp.flip(y, axis=0), axis=0)[inputs.seat]


@pytest.mark.parametrize("target", TARGETS)
def test_activation_shaped_like_a_pool_is_not_a_copy(target: str) -> None:
    report = explained(shaped_like_the_pool, False, target)
    assert report.in_place, report
    # It was suspected, and cleared by compiling for a larger cache.
    assert report.temp_growth is not None
    assert report.temp_growth < 0.5


def copied(report: StepReport) -> list[str]:
    return [leaf.name for leaf in report.leaves if leaf.copies]


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_copy_that_is_given_out_is_found(large: bool) -> None:
    """The copy is in the results, and no temporary holds it."""

    def gives_one(state: CacheState, inputs: StepInputs) -> tuple[CacheState, Any]:
        return state, state.pools[0]

    def gives_all(state: CacheState, inputs: StepInputs) -> tuple[CacheState, Any]:
        return state, tuple(pool + 0 for pool in state.pools)

    report = explained(gives_one, large, "cpu")
    assert copied(report) == [POOL], report
    assert report.output_bytes >= report.leaves[0].num_bytes
    report = explained(gives_all, large, "cpu")
    assert copied(report) == [spec.name for spec in LAYOUT.pools], report


def activation(inputs: StepInputs) -> Any:
    """A number that takes far more memory than the small cache."""
    first = inputs.token_ids[0].astype(jnp.float32)
    x = jnp.arange(2**22, dtype=jnp.float32).reshape(2048, 2048) + first
    return jnp.sort(jnp.sort(x, axis=0), axis=1)[0].sum()


def test_copy_in_the_memory_of_a_dead_activation_is_found() -> None:
    def rolls(state: CacheState, inputs: StepInputs) -> tuple[CacheState, Any]:
        total = activation(inputs)
        state, total = after_read(state, total)
        return steps.with_pool(state, 0, jnp.roll(state.pools[0], 1, axis=0)), total

    report = explained(rolls, False, "cpu")
    assert report.temp_bytes > 4 * report.state_bytes
    assert copied(report) == [POOL], report


def test_pools_are_cleared_one_by_one() -> None:
    """An activation is shaped like one pool, and another pool is copied."""

    def both(state: CacheState, inputs: StepInputs) -> tuple[CacheState, Any]:
        state, out = shaped_like_the_pool(state, inputs)
        state, out = after_read(state, out)
        return steps.with_pool(state, 1, jnp.roll(state.pools[1], 1, axis=0)), out

    report = explained(both, False, "cpu")
    assert copied(report) == [LAYOUT.pools[1].name], report


def slices(pool: Any) -> Any:
    return pool[1:]


def flips(pool: Any) -> Any:
    return jnp.flip(pool[1:], axis=0)


def gathers(pool: Any) -> Any:
    # Ids that the compiler does not know.
    ids = jnp.arange(1, pool.shape[0]) - pool[0, 0, 0, 0, 0].astype(jnp.int32)
    return pool.at[ids].get(mode="promise_in_bounds")


@pytest.mark.parametrize("take", [slices, flips, gathers])
def test_copy_of_all_slots_but_one_is_found(take: Callable[[Any], Any]) -> None:
    def step(state: CacheState, inputs: StepInputs) -> tuple[CacheState, Any]:
        state, taken = after_read(state, take(state.pools[0]))
        pool = state.pools[0].at[1:].set(taken * 2)
        return steps.with_pool(state, 0, pool), None

    report = explained(step, True, "cpu")
    assert copied(report) == [POOL], report


def test_gather_of_a_large_batch_is_not_a_copy() -> None:
    """It takes as many slots as the cache has, but no more from a larger cache."""
    slots = large_cache(LAYOUT).pools[0].shape[0]

    def step(state: CacheState, inputs: StepInputs) -> tuple[CacheState, Any]:
        ids = (jnp.arange(slots) + inputs.seat[0]) % state.pools[0].shape[0]
        taken = state.pools[0].at[ids].get(mode="promise_in_bounds")
        return state, jnp.sort(taken, axis=0)[0]

    report = explained(step, True, "cpu")
    assert report.in_place, report
    assert report.temp_growth is not None
    assert report.temp_bytes >= report.leaves[0].num_bytes


@pytest.mark.parametrize("target", TARGETS)
def test_step_of_a_tiny_cache_is_not_refused(target: str) -> None:
    """Temporaries outgrow the pools here, so their size alone proves nothing."""
    params = jax.ShapeDtypeStruct((100,), jnp.float32)
    report = explain_step(
        steps.unrolled(LAYOUT), params, small(), MIXED, device=devices(target)[0]
    )
    assert report.in_place, report
    smallest = min(leaf.num_bytes for leaf in report.leaves[: len(LAYOUT.pools)])
    assert report.temp_bytes > smallest


def test_any_compiled_function_can_be_explained() -> None:
    state = large_cache(LAYOUT)

    def good(scale: Any, state: CacheState) -> CacheState:
        return state

    def bad(state: CacheState, ids: jax.Array) -> tuple[CacheState, jax.Array]:
        rows = state.pools[0][ids]
        written = state.pools[0].at[ids].set(0.0)
        return steps.with_pool(state, 0, written), rows

    compiled = jax.jit(good, donate_argnums=1).lower(2.0, state).compile()
    check(explain_compiled(compiled, state))
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    compiled = jax.jit(bad, donate_argnums=0).lower(state, ids).compile()
    report = explain_compiled(compiled, state, name="bad")
    assert [leaf.name for leaf in report.leaves if leaf.copies] == [POOL]


def test_function_without_donation_is_not_in_place() -> None:
    state = large_cache(LAYOUT)
    compiled = jax.jit(lambda state: state).lower(state).compile()
    report = explain_compiled(compiled, state)
    assert not report.in_place
    assert not any(leaf.aliased for leaf in report.leaves)
    assert report.alias_bytes == 0
