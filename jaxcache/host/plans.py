"""Step plans: who runs how many tokens, with everything reserved."""

import dataclasses
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxcache.host.decode_run import DecodeRun
from jaxcache.host.requests import Request
from jaxcache.inputs.buckets import Bucket
from jaxcache.inputs.packing import PackedInputs
from jaxcache.policies.snapshots import Point, Wanted
from jaxcache.prefixes.nodes import Int32s, Int64s

IN_FLIGHT = "in flight"
COMPLETED = "completed"
ABANDONED = "abandoned"


class Entry(NamedTuple):
    """One request's part of a step.

    Attributes:
        request_id: The request.
        num_tokens: Tokens that it runs.
        start: Tokens in the cache before them.
        samples: Whether the last of them gives a new token.
    """

    request_id: Hashable
    num_tokens: int
    start: int
    samples: bool


class EmittedRow(NamedTuple):
    """A row that a step writes as it passes a point."""

    point: Point
    row: int


@dataclasses.dataclass(slots=True, eq=False)
class Chunk:
    """A prefill entry, and what undoes it.

    Attributes:
        request: The request.
        seat: Its seat in this plan.
        generation: The seat's generation.
        start: Tokens in the cache before the chunk.
        length: Tokens of the chunk.
        is_first: Whether the request began to run with it.
        is_last: Whether it ends the prompt.
        pages_before: Pages that the request had.
        emitted: Rows that the step writes inside the chunk.
        handed_point: The point at the end of the chunk whose row is handed over.
        handed_row: That row; the request goes on in another.
        ghosts: Points that the chunk passes of which only the position is kept.
        wanted_before: Points that the request still wanted.
    """

    request: Request
    seat: int
    generation: int
    start: int
    length: int
    is_first: bool
    is_last: bool
    pages_before: int
    emitted: list[EmittedRow]
    handed_point: Point | None
    handed_row: int
    ghosts: list[Point]
    wanted_before: Wanted


@dataclasses.dataclass(slots=True, eq=False)
class Reading:
    """A request that read a row other than its own in a step.

    Attributes:
        request: The request.
        row: The row it read.
        is_decode: Whether it read it in a decode entry.
    """

    request: Request
    row: int
    is_decode: bool


class StepPlan:
    """A step that can run: an opaque handle for `complete` or `abandon`.

    Entries are in the order of the step: decode entries first, then prefill entries.

    Attributes:
        number: Counts the plans of a manager.
        inputs: What to give to the step.
        seats: `i64[entries]`.
        starts: `i64[entries]`, tokens in the cache before each entry's.
        ends: `i64[entries]`, tokens in the cache after them.
        status: "in flight", "completed" or "abandoned".

    The rest is for the manager.
    """

    __slots__ = (
        "_bucket",
        "_entries",
        "chunks",
        "ends",
        "epoch",
        "generations",
        "grown_indices",
        "grown_seats",
        "inputs",
        "num_decode",
        "number",
        "readings",
        "requests",
        "run",
        "seats",
        "starts",
        "status",
        "updates",
    )

    def __init__(
        self,
        number: int,
        bucket: Bucket,
        updates: Int32s,
        requests: list[Request],
        num_decode: int,
        chunks: list[Chunk],
        seats: Int64s,
        starts: Int64s,
        ends: Int64s,
        generations: Int64s,
        epoch: int,
    ) -> None:
        self.number = number
        self.inputs: PackedInputs
        self.updates = updates
        self.num_decode = num_decode
        self.chunks = chunks
        self.seats = seats
        self.starts = starts
        self.ends = ends
        self.generations = generations
        self.epoch = epoch
        self.grown_seats: Int64s
        self.grown_indices: Int64s
        self.readings: list[Reading]
        self.run: DecodeRun | None = None
        self.status = IN_FLIGHT
        self.requests = requests
        self._bucket = bucket
        self._entries: tuple[Entry, ...] | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return self.num_decode + sum(chunk.length for chunk in self.chunks)

    @property
    def request_ids(self) -> list[Hashable]:
        """The request of each entry."""
        return [request.id for request in self.requests]

    @property
    def samples(self) -> npt.NDArray[np.bool_]:
        """`bool[entries]`, whether each entry gives a new token."""
        samples = np.ones(len(self.seats), np.bool_)
        samples[self.num_decode :] = [chunk.is_last for chunk in self.chunks]
        return samples

    @property
    def entry_rows(self) -> Int64s:
        """`i64[entries]`, index of each entry among those of the padded step."""
        rows = np.arange(len(self.seats))
        rows[self.num_decode :] += self._bucket.decode - self.num_decode
        return rows

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Every entry; made when first asked for."""
        if self._entries is None:
            self._entries = tuple(
                map(
                    Entry,
                    self.request_ids,
                    (self.ends - self.starts).tolist(),
                    self.starts.tolist(),
                    self.samples.tolist(),
                )
            )
        return self._entries

    def __repr__(self) -> str:
        return (
            f"StepPlan({self.number}, {self.status}: {self.num_decode} decode and "
            f"{len(self.chunks)} prefill entries, {self.num_tokens} tokens)"
        )
