"""Paged attention equals plain attention, whatever lies around the tokens."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxcache.models.attention import attend_pages, rotate
from tests.models.oracle import Array, attention_rows

UNITS, HEADS, DIM, VALUE_DIM, PAGE = 2, 3, 4, 6, 16
MAX_PAGES = 21


def _attend(
    queries: Any, positions: Any, keys: Any, values: Any, table: Any, rows: Any
) -> Any:
    return attend_pages(
        queries,
        positions,
        rows,
        read_pages=lambda pages: (keys[pages], values[pages]),
        page_table=table,
        tokens_per_page=PAGE,
        value_dim=VALUE_DIM,
    )


attend = jax.jit(_attend)


class Sequences:
    """Sequences scattered over the pages of a pool that is NaN elsewhere."""

    def __init__(self, lengths: list[int], seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        pages = rng.permutation(np.arange(1, len(lengths) * MAX_PAGES + 1))
        self.table = pages.reshape(len(lengths), MAX_PAGES).astype(np.int32)
        self.lengths = lengths
        shape = (len(pages) + 1, UNITS, PAGE)
        self.keys = np.full((*shape, DIM), np.nan, np.float32)
        self.values = np.full((*shape, VALUE_DIM), np.nan, np.float32)
        self.history = []
        for row, length in enumerate(lengths):
            keys = rng.normal(size=(length, UNITS, DIM)).astype(np.float32)
            values = rng.normal(size=(length, UNITS, VALUE_DIM)).astype(np.float32)
            for position in range(length):
                at = self.table[row, position // PAGE], slice(None), position % PAGE
                self.keys[at], self.values[at] = keys[position], values[position]
            self.history.append((keys, values))

    def run(self, queries: Array, positions: Array, rows: list[int]) -> Array:
        return np.asarray(
            attend(
                queries,
                positions.astype(np.int32),
                self.keys,
                self.values,
                self.table,
                np.array(rows, np.int32),
            )
        )


@pytest.mark.parametrize("lengths", [[1, 16, 17, 40], [300, 2, 128, 129]])
def test_rows_of_queries_equal_plain_attention(lengths: list[int]) -> None:
    sequences = Sequences(lengths)
    rng = np.random.default_rng(1)
    rows = [2, 0, 3, 1, 3]
    queries = rng.normal(size=(5, 8, UNITS, HEADS, DIM)).astype(np.float32)
    positions = np.full((5, 8), -1)
    for i, row in enumerate(rows):
        count = min(8, lengths[row])
        first = 0 if i == 4 else lengths[row] - count
        positions[i, :count] = np.arange(first, first + count)
    actual = sequences.run(queries, positions, rows)
    assert not actual[positions < 0].any()
    for i, row in enumerate(rows):
        count = (positions[i] >= 0).sum()
        expected = attention_rows(
            queries[i, :count], *sequences.history[row], positions[i, :count]
        )
        np.testing.assert_allclose(actual[i, :count], expected, rtol=0, atol=2e-6)


def test_a_rows_result_does_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(2)
    queries = rng.normal(size=(4, 1, UNITS, HEADS, DIM)).astype(np.float32)
    alone = Sequences([100, 1, 1, 1])
    among = Sequences([100, 300, 7, 260])
    # The same sequence in the other pages: what differs is the rest of the batch.
    for position in range(100):
        at = position // PAGE, slice(None), position % PAGE
        for name in ("keys", "values"):
            source = getattr(alone, name)[alone.table[0, at[0]]][:, at[2]]
            getattr(among, name)[among.table[0, at[0]], :, at[2]] = source
    results = [
        sequences.run(queries, np.array(sequences.lengths)[:, None] - 1, [0, 1, 2, 3])
        for sequences in (alone, among)
    ]
    np.testing.assert_array_equal(results[0][0], results[1][0])


def test_no_query_at_all_gives_zeros() -> None:
    sequences = Sequences([3, 3])
    queries = np.ones((2, 1, UNITS, HEADS, DIM), np.float32)
    result = sequences.run(queries, np.full((2, 1), -1), [0, 1])
    np.testing.assert_array_equal(result, np.zeros_like(result))


def test_rotation_keeps_the_rest_of_a_head_and_depends_on_distance_only() -> None:
    rng = np.random.default_rng(3)
    query, key = rng.normal(size=(2, 1, 1, 10)).astype(np.float32)
    at = jax.jit(lambda x, position: rotate(x, position, 10000.0, 6))

    def score(i: int, j: int) -> float:
        rotated = [
            np.asarray(at(x, np.array([p], np.int32)), np.float64)
            for x, p in ((query, i), (key, j))
        ]
        return float((rotated[0] * rotated[1]).sum())

    np.testing.assert_array_equal(
        at(key, np.array([7], np.int32))[..., 6:], key[..., 6:]
    )
    np.testing.assert_allclose(score(105, 100), score(5, 0), rtol=1e-5)
    assert abs(score(105, 100) - score(106, 100)) > 1e-3
