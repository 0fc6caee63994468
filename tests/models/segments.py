"""Ragged prefill steps for the kernel tests: drawn by hypothesis, packed for real."""

import dataclasses
import functools
from typing import Any

import hypothesis.strategies as st
import jax
import numpy as np

from jaxcache.device.state import init_cache
from jaxcache.device.step_inputs import StepInputs, begin_step
from jaxcache.inputs.buckets import Buckets
from jaxcache.inputs.packing import Packer, StepWork
from jaxcache.layouts import (
    CacheLayout,
    FullAttention,
    Layer,
    Mamba2,
    ModelLayout,
)

Array = np.ndarray[Any, Any]

CHUNK_SIZE = 8
NUM_TOKENS = 48
MAX_ENTRIES = 3
MAX_SNAPSHOTS = 6
BUCKETS = Buckets(
    decode=(2,),
    prefill_tokens=(NUM_TOKENS,),
    max_prefill_seqs=MAX_ENTRIES,
    max_snapshots=MAX_SNAPSHOTS,
)
LAYOUT = CacheLayout(
    ModelLayout(
        "kernels",
        (Layer(0, FullAttention(1, 2)), Layer(1, Mamba2(2, 2, 1, 2, 4))),
    ),
    4,
)


@dataclasses.dataclass(frozen=True)
class Segments:
    """Entries of one step.

    Attributes:
        starts: Tokens of each entry before the step.
        lengths: Tokens of each entry in the step.
        snapshots: (entry, position) of each emission.
    """

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    snapshots: tuple[tuple[int, int], ...] = ()

    @property
    def slices(self) -> list[slice]:
        """Where the tokens of each entry are."""
        ends = np.cumsum(self.lengths)
        return [
            slice(end - length, end)
            for end, length in zip(ends, self.lengths, strict=True)
        ]

    def inputs(self) -> StepInputs:
        """Packs the step and unpacks it as a jitted step does."""
        state, packer, unpack = _cache()
        work = StepWork(
            prefill_seats=_i32(range(len(self.starts))),
            prefill_starts=_i32(self.starts),
            prefill_lens=_i32(self.lengths),
            prefill_tokens=_i32([0] * sum(self.lengths)),
            snapshot_entries=_i32([entry for entry, _ in self.snapshots]),
            snapshot_positions=_i32([position for _, position in self.snapshots]),
            snapshot_slots=_i32(
                state.size.first_slot + i for i in range(len(self.snapshots))
            ),
        )
        inputs: StepInputs = unpack(state, packer.pack(work))
        return inputs


@st.composite
def segments(draw: st.DrawFn) -> Segments:
    """Draws entries, and emissions at their first token, end, chunk edges and between.

    No more than one emission may be at a position of an entry.
    """
    count = draw(st.integers(1, MAX_ENTRIES))
    lengths, left = [], NUM_TOKENS
    for entry in range(count):
        most = left - (count - 1 - entry)
        lengths.append(draw(st.integers(1, most) | st.just(min(most, 2 * CHUNK_SIZE))))
        left -= lengths[-1]
    starts = [draw(st.integers(0, 20) | st.just(CHUNK_SIZE)) for _ in lengths]
    snapshots: list[tuple[int, int]] = []
    for entry, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        edges = [p for p in range(start + 1, start + length) if p % CHUNK_SIZE == 0]
        places = st.integers(start + 1, start + length) | st.sampled_from(
            [start + 1, start + length, *edges]
        )
        for position in draw(st.lists(places, max_size=3, unique=True)):
            snapshots.append((entry, position))
    return Segments(tuple(starts), tuple(lengths), tuple(snapshots[:MAX_SNAPSHOTS]))


def pad_tokens(values: Array) -> Array:
    """Adds the padding tokens of the bucket, full of NaN."""
    padding = np.full((NUM_TOKENS - len(values), *values.shape[1:]), np.nan)
    return np.concatenate([values, padding]).astype(np.float32)


def pad_entries(values: Array) -> Array:
    """Adds the padding entries of the bucket, full of NaN."""
    padding = np.full((MAX_ENTRIES + 1 - len(values), *values.shape[1:]), np.nan)
    return np.concatenate([values, padding]).astype(np.float32)


def check_emissions(
    drawn: Segments, emitted: Array, expected: list[Array], tolerance: float
) -> None:
    """Checks final states and snapshots against the states after every token."""
    finals = [states[-1] for states in expected]
    snapshots = [
        expected[entry][position - drawn.starts[entry]]
        for entry, position in drawn.snapshots
    ]
    count = len(finals)
    first = MAX_ENTRIES + 1
    got = np.concatenate([emitted[:count], emitted[first : first + len(snapshots)]])
    want = np.array(finals + snapshots)
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * np.abs(want).max())


@functools.cache
def _cache() -> tuple[Any, Packer, Any]:
    state = init_cache(LAYOUT, 64, 8, max_seqs=MAX_ENTRIES, max_tokens=128)
    unpack = jax.jit(lambda state, packed: begin_step(state, packed)[1])
    return state, Packer(LAYOUT, state.size, BUCKETS), unpack


def _i32(values: Any) -> Array:
    return np.array(list(values), np.int32)
