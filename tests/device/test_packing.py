"""Packing: any step survives the round trip, and every bad one is refused by name."""

import dataclasses
import functools
import re
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from jaxcache.device.state import CacheState
from jaxcache.device.step_inputs import StepInputs, begin_step, fill_next_tokens
from jaxcache.inputs.buckets import Bucket, Buckets
from jaxcache.inputs.packing import (
    NEXT_TOKEN,
    PackedInputs,
    Packer,
    StepWork,
    index_bucket,
)
from jaxcache.layouts import CacheLayout, CacheSize
from tests.device.caches import BUCKETS, FULL, cache, hybrid, ints, model, work

LAYOUT = hybrid()
SIZE = cache(LAYOUT).size


@pytest.fixture
def packer() -> Packer:
    return Packer(LAYOUT, SIZE, BUCKETS)


@functools.cache
def beginning() -> Any:
    return jax.jit(begin_step)


@st.composite
def entries(draw: st.DrawFn) -> list[tuple[int, int, list[int]]]:
    """(seat, start, tokens) of decode entries, then of prefill entries."""
    seats = draw(st.permutations(range(SIZE.max_seqs)))
    num_decode = draw(st.integers(0, 4))
    chunks = draw(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=8)))
    chunks = chunks[: min(3, 4 - num_decode)]
    while sum(map(len, chunks)) > 8:
        chunks.pop()
    chunks = [[draw(st.integers(0, 99))] for _ in range(num_decode)] + chunks
    if not chunks:
        chunks = [[1]]
    starts = [draw(st.integers(0, SIZE.max_tokens - len(c))) for c in chunks]
    found = list(zip(seats, starts, chunks, strict=False))
    return found


def split(found: list[tuple[int, int, list[int]]], num_decode: int) -> StepWork:
    decode, prefill = found[:num_decode], found[num_decode:]
    return work(
        decode_seats=[seat for seat, _, _ in decode],
        decode_positions=[start for _, start, _ in decode],
        decode_tokens=[tokens[0] for _, _, tokens in decode],
        prefill_seats=[seat for seat, _, _ in prefill],
        prefill_starts=[start for _, start, _ in prefill],
        prefill_lens=[len(tokens) for _, _, tokens in prefill],
        prefill_tokens=[token for _, _, tokens in prefill for token in tokens],
    )


@given(entries())
def test_every_token_comes_back_with_its_entry(
    found: list[tuple[int, int, list[int]]],
) -> None:
    num_decode = sum(len(tokens) == 1 for _, _, tokens in found)
    found.sort(key=lambda entry: len(entry[2]) != 1)
    packed = Packer(LAYOUT, SIZE, BUCKETS).pack(split(found, num_decode))
    _, inputs = beginning()(cache(LAYOUT), packed)
    bucket = packed.bucket
    real = [i for i in range(bucket.num_entries) if inputs.query_lens[i]]
    assert [int(inputs.seat[i]) for i in real] == [seat for seat, _, _ in found]
    assert [int(inputs.context_lens[i]) for i in real] == [s for _, s, _ in found]
    for i, (_, start, tokens) in zip(real, found, strict=True):
        at = int(inputs.query_starts[i])
        here = slice(at, at + int(inputs.query_lens[i]))
        assert inputs.token_ids[here].tolist() == tokens
        assert inputs.positions[here].tolist() == [*range(start, start + len(tokens))]
        assert set(inputs.token_entry[here].tolist()) == {i}
        assert inputs.token_valid[here].all()
    padding = [i for i in range(bucket.num_entries) if i not in real]
    assert set(inputs.seat[jnp.array(padding, int)].tolist()) <= {SIZE.padding_seat}
    assert int(inputs.token_valid.sum()) == sum(len(tokens) for _, _, tokens in found)
    if bucket.prefill_seqs:
        assert bucket.num_entries - 1 in padding
    loose = inputs.token_entry[~inputs.token_valid]
    assert {int(i) for i in loose} <= set(padding)
    assert (inputs.positions[~inputs.token_valid] == 0).all()
    sinks = inputs.page_slots[:, ~inputs.token_valid]
    assert (sinks == SIZE.sink_slot).all()


def test_every_field_of_a_step(packer: Packer) -> None:
    """A step by hand, so that the meaning of each field stands somewhere."""
    packed = packer.pack(
        work(
            decode_seats=[3],
            decode_positions=[5],
            decode_tokens=[NEXT_TOKEN],
            prefill_seats=[1, 0],
            prefill_starts=[0, 6],
            prefill_lens=[5, 2],
            prefill_tokens=[10, 11, 12, 13, 14, 20, 21],
            snapshot_entries=[1],
            snapshot_positions=[8],
            snapshot_slots=[9],
            updates=[
                *[(0, 3, 1, 4), (0, 1, 0, 5), (0, 1, 1, 6), (0, 0, 1, 7)],
                *[(1, 3, 1, 8), (2, 3, 0, 3), (2, 3, 1, 4), (2, 1, 1, 5)],
            ],
            copies=[(0, 4, 9)],
        )
    )
    state, inputs = beginning()(cache(LAYOUT), packed)
    expected = {
        "token_ids": [-1, 0, 0, 0, 10, 11, 12, 13, 14, 20, 21, 0],
        "positions": [5, 0, 0, 0, 0, 1, 2, 3, 4, 6, 7, 0],
        "token_entry": [0, 1, 2, 3, 4, 4, 4, 4, 4, 5, 5, 7],
        "token_valid": [1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0],
        "seat": [3, 4, 4, 4, 1, 0, 4, 4],
        "context_lens": [5, 0, 0, 0, 0, 6, 0, 0],
        "query_lens": [1, 0, 0, 0, 5, 2, 0, 0],
        "query_starts": [0, 1, 2, 3, 4, 9, 11, 11],
        "state_read": [3, 0, 0, 0, 0, 0, 0, 0],
        "state_write": [4, 1, 1, 1, 5, 1, 1, 1],
        "snapshot_entry": [5, 7],
        "snapshot_position": [8, -1],
        "snapshot_slot": [9, 1],
        "page_offsets": [1, 0, 0, 0, 0, 1, 2, 3, 0, 2, 3, 0],
    }
    for name, value in expected.items():
        assert getattr(inputs, name).tolist() == value, name
    assert inputs.page_slots.tolist() == [
        [4, 1, 1, 1, 5, 5, 5, 5, 6, 7, 7, 1],
        [8, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1],
    ]
    tables = np.zeros((2, 8, 4), int)
    tables[0, 0, 1], tables[1, 0, 1] = 4, 8
    tables[0, 4, :2] = 5, 6
    tables[0, 5, 1] = 7
    assert inputs.page_tables.tolist() == tables.tolist()
    last = jnp.array([90, 91, 92, 93, 94, 95], jnp.int32)
    filled = fill_next_tokens(inputs, last)
    assert filled.token_ids.tolist() == [93, *expected["token_ids"][1:]]
    assert isinstance(filled, StepInputs)
    assert isinstance(state, CacheState)


def test_updates_beyond_the_bucket_travel_beside_it(packer: Packer) -> None:
    """A burst changes the same elements, whether it fits into the bucket or not."""
    every = [(g, s, c) for g in (0, 1) for s in range(4) for c in range(4)]
    updates = [(*element, i % 19) for i, element in enumerate(every)]
    decode: dict[str, Any] = {
        "decode_seats": [0],
        "decode_positions": [0],
        "decode_tokens": [1],
    }
    packed = packer.pack(work(**decode, updates=updates))
    inline = packed.bucket.updates
    assert 0 < inline < len(updates)
    assert packed.extra_updates.shape == (4, index_bucket(len(updates) - inline))
    state, _ = beginning()(cache(LAYOUT), packed)
    expected = np.zeros((2, 6, 4), int)
    expected[:, 4], expected[:, 5] = 1, 2
    for group, seat, column, value in updates:
        expected[group, seat, column] = value
    np.testing.assert_array_equal(state.page_table, expected)


def test_packed_steps_share_nothing(packer: Packer) -> None:
    """JAX may read the array of an earlier step while a later one is packed."""
    todo = work(decode_seats=[0], decode_positions=[1], decode_tokens=[2])
    steps, before = [], []
    # More than are cut from one block of memory.
    for token in range(200):
        todo.decode_tokens[:] = token
        steps.append(packer.pack(todo).packed)
        before.append(steps[-1].copy())
    starts = sorted(packed.ctypes.data for packed in steps)
    ends = [start + steps[0].nbytes for start in starts]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    # JAX copies what is not aligned like this.
    assert all(start % 64 == 0 for start in starts)
    for token, (packed, copy) in enumerate(zip(steps, before, strict=True)):
        np.testing.assert_array_equal(packed, copy)
        assert packed[0] == token
        np.testing.assert_array_equal(packed[1:], steps[0][1:])


def test_buckets_are_the_smallest_that_hold_a_step() -> None:
    buckets = Buckets((2, 8), (16, 64), max_prefill_seqs=3)
    assert buckets.count == len(set(buckets.shapes.values())) == 8
    shape = {(b.decode, b.prefill_tokens): b for b in buckets.shapes.values()}
    assert buckets.select(1, 0, 0) is shape[2, 0]
    assert buckets.select(3, 3, 17) is shape[8, 64]
    assert buckets.select(0, 1, 16) is shape[0, 16]
    decode = shape[2, 0]
    assert (decode.prefill_seqs, decode.snapshots, decode.copies) == (0, 0, 0)
    # One entry more than sequences, for padding.
    assert shape[0, 16].prefill_seqs == 4
    assert (buckets.max_decode, buckets.max_prefill_tokens) == (8, 64)


def test_sections_of_a_bucket_fill_the_packed_array() -> None:
    for bucket in BUCKETS.shapes.values():
        ends = [0]
        for section in bucket.sections.values():
            assert section.start == ends[-1]
            ends.append(section.stop)
        assert ends[-1] == bucket.num_packed


def test_buckets_of_powers_of_two() -> None:
    buckets = Buckets.powers_of_two(6, 100, max_prefill_seqs=2)
    assert buckets.decode == (2, 4, 6)
    assert buckets.prefill_tokens == (16, 32, 64, 100)
    assert Buckets.powers_of_two(1, 1).decode == (2,)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decode": (1, 2)}, "decode must be an ascending tuple"),
        ({"decode": (4, 2)}, "decode must be an ascending tuple"),
        ({"decode": [4]}, "decode must be an ascending tuple"),
        ({"prefill_tokens": (8, 8)}, "prefill_tokens must be an ascending tuple"),
        ({"decode": (), "prefill_tokens": ()}, "must not both be empty"),
        ({"max_snapshots": 1}, "max_snapshots must be 0 or at least 2, got 1"),
        ({"max_copies": -1}, "max_copies must be 0 or at least 2, got -1"),
        ({"max_prefill_seqs": 0}, "max_prefill_seqs must be an integer >= 1, got 0"),
    ],
)
def test_bad_buckets_are_refused(fields: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"decode": (2,), "prefill_tokens": (8,)}
    with pytest.raises(ValueError, match=re.escape(message)):
        Buckets(**(good | fields))


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((5, 0, 0), "num_decode must be at most 4, the largest decode bucket, got 5"),
        ((0, 1, 9), "num_prefill_tokens must be at most 8"),
        ((0, 4, 8), "num_prefill_seqs must be at most max_prefill_seqs = 3, got 4"),
        ((0, 0, 0), "num_decode or num_prefill_tokens must be at least 1"),
    ],
)
def test_step_beyond_the_buckets_is_refused(
    counts: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        BUCKETS.select(*counts)


DECODE = {"decode_seats": [0], "decode_positions": [0], "decode_tokens": [1]}
PREFILL = {
    "prefill_seats": [1],
    "prefill_starts": [2],
    "prefill_lens": [3],
    "prefill_tokens": [1, 2, 3],
}


def snapshot(entry: int = 0, position: int = 4, slot: int = 5) -> dict[str, list[int]]:
    return {
        "snapshot_entries": [entry],
        "snapshot_positions": [position],
        "snapshot_slots": [slot],
    }


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"decode_seats": [6]}, "decode_seats must be from 0 to below 6, got [6]"),
    ({"decode_seats": [-1]}, "decode_seats must be from 0 to below 6, got [-1]"),
    ({"decode_positions": [16]}, "decode_positions must be from 0 to below 16"),
    ({"decode_positions": []}, "decode_positions must have shape (1, as decode_seats"),
    ({"decode_tokens": [-2]}, "decode_tokens must be token ids >= 0, or -1 for"),
    ({"prefill_tokens": [1, -2, 3]}, "prefill_tokens must be token ids >= 0, or -1"),
    ({"decode_tokens": [-(2**31)]}, "decode_tokens must be token ids >= 0, or -1 for"),
    ({"prefill_seats": [0]}, "must not name a seat twice, got seats [0] more than"),
    ({"prefill_starts": [-1]}, "prefill_starts must be from 0 to below 16, got [-1]"),
    ({"prefill_starts": [14]}, "must be at most max_tokens = 16, got [17]"),
    ({"prefill_lens": [2]}, "prefill_tokens must have sum(prefill_lens) = 2 tokens"),
    ({"prefill_lens": [0]}, "prefill_lens must be at least 1, got [0]"),
    ({"prefill_lens": [2**31 - 1]}, "sum(prefill_lens) = 2147483647 tokens, got 3"),
    (
        {"prefill_seats": [], "prefill_starts": [], "prefill_lens": []},
        "prefill_tokens must have sum(prefill_lens) = 0 tokens, got 3",
    ),
    (snapshot(entry=1), "snapshot_entries must be indices of the 1 prefill entries"),
    (snapshot(position=2), "snapshot_positions must lie after the start"),
    (snapshot(position=6), "at most at the end of their chunks, [(2, 5)], got [6]"),
    (snapshot(slot=2), "snapshot_slots must be different rows, each at least 3"),
    (snapshot(slot=15), "snapshot_slots must be from 0 to below 15, got [15]"),
    (
        {key: value * 3 for key, value in snapshot().items()},
        "snapshot_slots must have at most 2 snapshots in this bucket, got 3",
    ),
    (
        {key: value * 2 for key, value in snapshot().items()},
        "snapshot_slots must be different rows",
    ),
    ({"copies": [(2, 3, 4)]}, "copies must name attention groups below 2, got [2]"),
    ({"copies": [(0, 19, 4)]}, "copies must have source pages below [19], got [19]"),
    ({"copies": [(0, 3, 2)]}, "destination pages from 3 to below [19], got [2]"),
    ({"copies": [(0, 3, 19)]}, "destination pages from 3 to below [19], got [19]"),
    ({"copies": [(0, 3, 4), (0, 5, 4)]}, "must not name a destination twice"),
    ({"copies": [(0, 3, 4)] * 3}, "copies must have at most 2 copies in this bucket"),
    ({"updates": [(3, 0, 0, 3)]}, "updates must have tables from 0 to below [3]"),
    ({"updates": [(-1, 0, 0, 3)]}, "updates must have tables from 0 to below [3]"),
    ({"updates": [(0, 4, 0, 3)]}, "updates must have seats from 0 to below [4]"),
    ({"updates": [(0, 0, 4, 3)]}, "updates must have columns from 0 to below [4]"),
    ({"updates": [(2, 0, 2, 3)]}, "updates must have columns from 0 to below [2]"),
    ({"updates": [(0, 0, 0, 19)]}, "updates must have values from 0 to below [19]"),
    ({"updates": [(2, 0, 0, 15)]}, "updates must have values from 0 to below [15]"),
    ({"updates": [(0, 0, 0, -1)]}, "updates must have values from 0 to below [19]"),
    ({"updates": [(2, 0, 1, 0)]}, "must not make row 0, the null row, a row that is"),
    ({"updates": [(0, 0, 0, 3)] * 2}, "updates must not change an element twice"),
]


@pytest.mark.parametrize(("fields", "message"), REFUSED)
def test_bad_step_is_refused_by_name(
    packer: Packer, fields: dict[str, Any], message: str
) -> None:
    packer.pack(work(**DECODE, **PREFILL))
    with pytest.raises(ValueError, match=re.escape(message)):
        packer.pack(work(**(DECODE | PREFILL | fields)))


def test_the_largest_values_of_each_field_are_packed(packer: Packer) -> None:
    """The bounds are where they say, not one short of it."""
    largest = 2**31 - 1
    packed = packer.pack(
        work(
            decode_seats=[SIZE.num_seats - 1, SIZE.max_seqs - 1],
            decode_positions=[SIZE.max_tokens - 1, 0],
            decode_tokens=[largest, NEXT_TOKEN],
            prefill_seats=[0],
            prefill_starts=[SIZE.max_tokens - 2],
            prefill_lens=[2],
            prefill_tokens=[largest, NEXT_TOKEN],
            **snapshot(position=SIZE.max_tokens, slot=SIZE.row_slots - 1),
        )
    )
    sections = packed.bucket.sections
    assert packed.packed[sections["token_ids"]][:2].tolist() == [largest, NEXT_TOKEN]
    assert packed.packed[sections["snapshot_slot"]][0] == SIZE.row_slots - 1


def test_changes_of_one_element_are_found_in_tables_of_any_size() -> None:
    """Elements are numbered in 32 bits where those are enough, and in 64 else."""
    size = CacheSize.create(LAYOUT, 2**14, 2**20, max_seqs=2**20, max_tokens=2**16)
    packer = Packer(LAYOUT, size, BUCKETS)
    assert size.max_seqs * size.max_pages > 2**31
    # In 32 bits the second of these would have the number of the first.
    far = (0, 2**18, 0, 3)
    assert 2**18 * size.max_pages == 2**32
    packer.pack(work(**DECODE, updates=[(0, 0, 0, 3), far]))
    with pytest.raises(ValueError, match="must not change an element twice"):
        packer.pack(work(**DECODE, updates=[far, (0, 0, 0, 3), far]))


def test_null_page_and_sinks_may_stand_in_a_page_table(packer: Packer) -> None:
    """A page that went stale is the null page; a fresh request reads the null row."""
    packer.pack(work(**DECODE, updates=[(0, 0, 0, 0), (1, 0, 0, 1), (2, 0, 0, 0)]))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(1), "decode_seats must be an int32 NumPy array, got float64"),
        (np.zeros(1, np.int64), "decode_seats must be an int32 NumPy array, got int64"),
        ([0], "decode_seats must be an int32 NumPy array, got list"),
        (np.zeros((1, 1), np.int32), "decode_seats must have shape (n), got (1, 1)"),
    ],
)
def test_arrays_of_another_type_are_refused(
    packer: Packer, array: Any, message: str
) -> None:
    todo = dataclasses.replace(work(**DECODE), decode_seats=array)
    with pytest.raises(ValueError, match=re.escape(message)):
        packer.pack(todo)


def test_one_wrong_array_among_right_ones_is_named(packer: Packer) -> None:
    wrong: Any = np.zeros(1, np.int16)
    for part in (DECODE, PREFILL, DECODE | PREFILL | snapshot()):
        for name in part:
            todo = work(**(DECODE | part))
            setattr(todo, name, wrong)
            with pytest.raises(ValueError, match=f"{name} must be an int32 NumPy"):
                packer.pack(todo)


def test_updates_of_another_shape_are_refused(packer: Packer) -> None:
    todo = dataclasses.replace(work(**DECODE), updates=ints(1, 2, 3, 4))
    with pytest.raises(ValueError, match=r"updates must have shape \(4, n\)"):
        packer.pack(todo)


def test_default_arrays_are_shared_and_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        StepWork().updates[:] = 1


def test_step_packed_for_another_cache_is_refused(packer: Packer) -> None:
    packed = packer.pack(work(**DECODE))
    other = CacheSize.create(LAYOUT, 16, 12, max_seqs=3, max_tokens=16)
    with pytest.raises(ValueError, match="packed must be for size"):
        begin_step(cache(LAYOUT), dataclasses.replace(packed, size=other))
    with pytest.raises(ValueError, match=r"packed\.packed must have shape"):
        begin_step(
            cache(LAYOUT), dataclasses.replace(packed, packed=packed.packed[:-1])
        )


def test_cache_without_rows_has_no_row_updates_but_a_row_index() -> None:
    """Attention alone: the table after the last page table is still the row index."""
    layout = CacheLayout(model(FULL), 4)
    state = cache(layout)
    packer = Packer(layout, state.size, BUCKETS)
    packed = packer.pack(work(**DECODE, updates=[(0, 0, 1, 7)]))
    state, inputs = beginning()(state, packed)
    assert state.page_table[0, 0].tolist() == [0, 7, 0, 0]
    assert inputs.page_tables.shape == (1, 4, 4)


def test_packed_inputs_is_a_pytree_with_static_bucket(packer: Packer) -> None:
    packed = packer.pack(work(**DECODE))
    leaves, structure = jax.tree.flatten(packed)
    assert len(leaves) == 1
    again = jax.tree.unflatten(structure, leaves)
    assert isinstance(again, PackedInputs)
    assert isinstance(again.bucket, Bucket)
    assert (again.bucket, again.size) == (packed.bucket, packed.size)
