"""The chunk table cuts a step exactly where the recurrences must stop."""

from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np

from jaxcache.device.step_inputs import StepInputs
from jaxcache.models.chunk_scan import scan_chunks
from jaxcache.models.chunks import (
    BLOCK_CHUNKS,
    build_chunk_table,
    max_chunks,
    unchunk_tokens,
)
from jaxcache.models.step_context import last_tokens
from tests.models.segments import (
    CHUNK_SIZE,
    MAX_ENTRIES,
    MAX_SNAPSHOTS,
    NUM_TOKENS,
    Segments,
    check_emissions,
    pad_entries,
    pad_tokens,
    segments,
)

build = jax.jit(lambda inputs: build_chunk_table(inputs, CHUNK_SIZE))


def expected_chunks(drawn: Segments) -> list[tuple[int, int, int]]:
    """(entry, first position, length) of each chunk, by walking over the tokens."""
    chunks: list[tuple[int, int, int]] = []
    for entry, (start, length) in enumerate(
        zip(drawn.starts, drawn.lengths, strict=True)
    ):
        for position in range(start, start + length):
            opens = position == start or position % CHUNK_SIZE == 0
            if opens or (entry, position) in drawn.snapshots:
                chunks.append((entry, position, 0))
            entry_, first, count = chunks[-1]
            chunks[-1] = (entry_, first, count + 1)
    return chunks


@hypothesis.given(segments())
def test_chunks_start_at_entries_grid_and_emissions_only(drawn: Segments) -> None:
    table = jax.tree.map(np.asarray, build(drawn.inputs()))
    length = table.valid.sum(axis=1)
    count = int((length > 0).sum())
    actual = list(
        zip(
            table.entry[:count].tolist(),
            table.positions[:count, 0].tolist(),
            length[:count].tolist(),
            strict=True,
        )
    )
    assert actual == expected_chunks(drawn)
    assert not length[count:].any()
    assert table.num_blocks == -(-count // BLOCK_CHUNKS)
    opens = [position == drawn.starts[entry] for entry, position, _ in actual]
    assert table.opens_entry.tolist() == opens + [False] * (len(length) - count)
    places = [
        position if place < count else -1
        for (_, first, count) in actual
        for place, position in enumerate(range(first, first + CHUNK_SIZE))
    ]
    assert table.positions[:count].reshape(-1).tolist() == places
    tokens = table.tokens[table.valid].tolist()
    assert tokens == list(range(sum(drawn.lengths)))


@hypothesis.given(segments())
def test_the_last_token_of_each_entry_is_found(drawn: Segments) -> None:
    inputs = drawn.inputs()
    last = np.asarray(last_tokens(inputs))
    ends = [part.stop - 1 for part in drawn.slices]
    assert last[: len(ends)].tolist() == ends
    assert ((last >= 0) & (last < NUM_TOKENS)).all()


@hypothesis.given(segments())
def test_every_token_comes_back_from_its_chunk_and_padding_as_zero(
    drawn: Segments,
) -> None:
    table = build(drawn.inputs())
    values = pad_tokens(np.arange(1.0, sum(drawn.lengths) + 1))
    chunked = np.where(table.valid, values[np.asarray(table.tokens)], np.nan)
    back = np.asarray(unchunk_tokens(table, jnp.asarray(chunked, jnp.float32)))
    np.testing.assert_array_equal(back, np.nan_to_num(values))


@jax.jit
def running_sums(inputs: StepInputs, values: jax.Array, initial: jax.Array) -> Any:
    """Each token's sum of values so far, as a recurrence in chunks."""
    return scan_chunks(
        build_chunk_table(inputs, CHUNK_SIZE),
        (values,),
        initial,
        (),
        lambda values: jnp.cumsum(values, axis=1),
        lambda state, sums: (state + sums[-1], state + sums),
    )


@hypothesis.given(segments())
def test_a_running_sum_is_carried_and_kept_where_it_is_asked_for(
    drawn: Segments,
) -> None:
    rng = np.random.default_rng(sum(drawn.lengths))
    values = rng.integers(1, 9, sum(drawn.lengths)).astype(float)
    initial = 1000.0 * np.arange(len(drawn.lengths))
    sums, kept = running_sums(drawn.inputs(), pad_tokens(values), pad_entries(initial))
    expected = [
        np.concatenate([[first], first + np.cumsum(values[part])])
        for first, part in zip(initial, drawn.slices, strict=True)
    ]
    check_emissions(drawn, np.asarray(kept), expected, tolerance=0)
    want = np.concatenate([after[1:] for after in expected])
    np.testing.assert_array_equal(sums[: len(want)], want)
    assert not np.asarray(sums[len(want) :]).any()


def test_the_bound_on_chunks_is_reached() -> None:
    # One long entry and two that each cross the grid once, cut at six more places.
    start = CHUNK_SIZE - 1
    cuts = tuple((0, p) for p in (9, 18, 20, 22, 26, 28))
    worst = Segments((start,) * 3, (NUM_TOKENS - 4, 2, 2), cuts)
    bound = max_chunks(NUM_TOKENS, MAX_ENTRIES, MAX_SNAPSHOTS, CHUNK_SIZE)
    assert len(expected_chunks(worst)) == bound
    # There is never more than one chunk a token.
    assert max_chunks(3, 2, 4, CHUNK_SIZE) == 3
    assert max_chunks(5, 2, 0, 1) == 5
