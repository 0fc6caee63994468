"""Movers: ids are checked on the host, padded to few sizes, and moved in place."""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from jaxcache.device.movers import Movers, jit_mover
from jaxcache.device.pools import clear_rows
from jaxcache.device.proof import PoolCopied
from jaxcache.device.state import CacheState
from tests.device.caches import bits, cache, canonical, hybrid, poisoned
from tests.device.oracle import Oracle
from tests.device.steps import with_pool

FIRST, PAGES, ROWS = 3, 19, 15


def numbered(state: CacheState) -> CacheState:
    """The state with another number in every slot."""
    for index, pool in enumerate(state.pools):
        number = np.arange(pool.shape[0]).reshape(-1, *[1] * (pool.ndim - 1))
        filled = np.broadcast_to(number, pool.shape).astype(pool.dtype)
        state = with_pool(state, index, jax.numpy.array(filled))
    return state


def assert_equal(state: CacheState, oracle: Oracle) -> None:
    for pool, expected in zip(canonical(state), oracle.pools, strict=True):
        np.testing.assert_array_equal(bits(pool), bits(expected))


def test_movers_move_what_they_are_told_and_nothing_else() -> None:
    state = numbered(cache(hybrid()))
    movers, oracle = Movers(), Oracle(state)
    state = movers.copy_pages(state, 0, [3, 4, 0], [4, 5, 6])
    oracle.copy(0, [3, 4, 0], [4, 5, 6])
    state = movers.copy_pages(state, 1, [2], [3])
    oracle.copy(1, [2], [3])
    state = movers.copy_rows(state, [3], [14])
    oracle.copy(2, [3], [14])
    state = movers.clear_pages(state, 1, [7, 8])
    oracle.clear(1, [7, 8])
    state = movers.clear_rows(state, np.array([5]))
    oracle.clear(2, [5])
    state = movers.copy_rows(state, [], [])
    assert_equal(state, oracle)


def test_a_swap_reads_before_it_writes() -> None:
    state = numbered(cache(hybrid()))
    oracle = Oracle(state)
    oracle.copy(2, [3, 4], [4, 3])
    assert_equal(Movers().copy_rows(state, [3, 4], [4, 3]), oracle)


def test_moves_carry_every_bit_of_a_nan() -> None:
    state = poisoned(cache(hybrid()))
    oracle = Oracle(state)
    state = Movers().copy_rows(state, [3], [4])
    assert_equal(state, oracle)


def test_movers_compile_once_for_each_power_of_two() -> None:
    state = cache(hybrid())
    movers = Movers()
    places = [pool.unsafe_buffer_pointer() for pool in state.pools]
    for count in (1, 2, 3, 4, 5, 6, 7, 8, 3, 1):
        ids = list(range(FIRST, FIRST + count))
        state = movers.copy_rows(state, ids, ids)
    assert movers.compilations == 3
    assert [report.in_place for report in movers.reports] == [True] * 3
    assert [pool.unsafe_buffer_pointer() for pool in state.pools] == places


Call = Callable[[Movers, CacheState], CacheState]
REFUSED: list[tuple[Call, str]] = [
    (lambda m, s: m.copy_pages(s, 0, [19], [3]), "source must be from 0 to below 19"),
    (lambda m, s: m.copy_pages(s, 0, [-1], [3]), "source must be from 0 to below 19"),
    (lambda m, s: m.copy_pages(s, 0, [3], [2]), "destination must be from 3 to below"),
    (lambda m, s: m.copy_pages(s, 0, [3], [19]), "destination must be from 3 to below"),
    (lambda m, s: m.copy_pages(s, 0, [3, 4], [3]), "as many ids as source, 2, got 1"),
    (lambda m, s: m.copy_pages(s, 0, [3, 4], [5, 5]), "must not name a slot twice"),
    (lambda m, s: m.copy_pages(s, 2, [3], [4]), "group_id must be below 2"),
    (lambda m, s: m.copy_rows(s, [15], [3]), "source must be from 0 to below 15"),
    (lambda m, s: m.clear_pages(s, 0, [0]), "pages must be from 3 to below 19"),
    (lambda m, s: m.clear_rows(s, [1]), "rows must be from 3 to below 15, got [1]"),
    (
        lambda m, s: m.clear_rows(s, np.array([0.5])),
        "rows must be a vector of integers, got",
    ),
    (
        lambda m, s: m.clear_rows(s, np.array([[3]])),
        "rows must be a vector of integers, got",
    ),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_bad_ids_are_refused_before_anything_is_donated(
    call: Call, message: str
) -> None:
    state = cache(hybrid())
    with pytest.raises(ValueError, match=re.escape(message)):
        call(Movers(), state)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_moved_state_is_dead() -> None:
    state = cache(hybrid())
    movers = Movers()
    movers.clear_rows(state, [3])
    with pytest.raises(RuntimeError, match="has been donated already"):
        movers.clear_rows(state, [3])


def test_own_mover_is_proven_too() -> None:
    def doubles(state: CacheState, ids: Any) -> CacheState:
        whole = state.pools[0].view(np.uint16)
        pool = whole.at[ids].set(whole[ids] + np.uint16(1)).view(state.pools[0].dtype)
        return with_pool(state, 0, pool)

    ids = np.array([3, 4], np.int32)
    state = jit_mover(clear_rows)(cache(hybrid()), ids)
    with pytest.raises(PoolCopied, match="doubles would copy pool 'attention0"):
        jit_mover(doubles)(state, ids)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
