"""Snapshot policy: at which token positions states are kept for reuse.

    prompt     0 ........ reused ........ matched ............. (L-1)//B*B ..... L
                             |  known but   |  new                  |           |
                             |  no snapshot |                       |           |
    points                             branch (page floor)      boundary    boundary

A point is the number of tokens that the state has absorbed. `branch` is where the
prompt leaves what the tree knows: others that leave there too can start from it. The
last page boundaries of the prompt serve the same prompt again and any that goes on from
it. The state at the end of what was generated, `response`, serves the next turn.
"""

import dataclasses
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from jaxcache.policies.policy import (
    BRANCH,
    GUESSES,
    KINDS,
    MARKED,
    RESPONSE,
    Wish,
)

# The order in which points of one step get rows when there are not enough for all.
_RANKS = {kind: rank for rank, kind in enumerate(KINDS)}


class Point(NamedTuple):
    """A position at which a snapshot is wanted.

    Attributes:
        position: Tokens that the snapshot has absorbed.
        kind: Why it is wanted.
    """

    position: int
    kind: str

    @property
    def rank(self) -> int:
        """Which points get a row first when there are not enough: the lowest."""
        return _RANKS.get(self.kind, len(_RANKS))


class SnapshotPolicy(Protocol):
    """Where snapshots are wanted, besides the points that the caller marked."""

    @property
    def response(self) -> bool:
        """Whether the state of a finished request is kept."""
        ...

    def points(
        self, prompt_tokens: int, reused: int, matched: int, tokens_per_page: int
    ) -> Sequence[Point]:
        """Returns the points in a prompt, in any order; the same ones on every rank.

        Args:
            prompt_tokens: Length of the prompt.
            reused: Tokens that are reused; only points after them can be taken.
            matched: Tokens that the tree knows.
            tokens_per_page: Tokens of one page.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Auto:
    """The positions that the eviction policy suggests, by how likely they are used.

    With all three off, only the points that callers mark are taken.

    Attributes:
        boundary: Whether there are points that depend on the prompt's length alone: its
            last page boundaries, and what the eviction policy adds (ladder, grid).
        branch: Whether the place where a prompt leaves the tree is a point.
        response: Whether the state of a finished request is kept.
    """

    boundary: bool = True
    branch: bool = True
    response: bool = True

    def points(
        self, prompt_tokens: int, reused: int, matched: int, tokens_per_page: int
    ) -> Sequence[Point]:
        """Returns none of its own."""
        return ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """What the eviction policy may suggest."""
        groups = (
            (self.boundary, GUESSES),
            (self.branch, (BRANCH,)),
            (self.response, (RESPONSE,)),
        )
        return tuple(kind for is_on, kinds in groups if is_on for kind in kinds)


def auto(*, boundary: bool = True, branch: bool = True, response: bool = True) -> Auto:
    """Returns the default policy; see `Auto` for what it can leave out."""
    return Auto(boundary, branch, response)


@dataclasses.dataclass(frozen=True)
class Emission:
    """Where inside a prefill chunk the kernels can write a state out.

    A state at the end of a chunk is never written out: the row is handed over.

    Attributes:
        grid: Positions that are multiples of it; 1 for all, 0 for none.
    """

    grid: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.grid, int) or self.grid < 0:
            raise ValueError(f"grid must be an integer >= 0, got {self.grid!r}")

    @classmethod
    def anywhere(cls) -> "Emission":
        """Kernels that can emit at any position."""
        return cls(1)

    @classmethod
    def on_grid(cls, tokens: int) -> "Emission":
        """Kernels that can emit at positions that are multiples of `tokens`.

        Points of the policy are rounded down to the grid; where the caller marked a
        point off the grid a chunk is ended.
        """
        if not isinstance(tokens, int) or tokens < 1:
            raise ValueError(f"tokens must be an integer >= 1, got {tokens!r}")
        return cls(tokens)

    @classmethod
    def chunk_end(cls) -> "Emission":
        """Kernels that cannot emit: chunks are ended at every point."""
        return cls(0)

    def can_emit(self, position: int) -> bool:
        """Whether a state can be written out at a position inside a chunk."""
        return self.grid > 0 and position % self.grid == 0

    def place(self, point: Point) -> Point:
        """Returns the point as it will be taken."""
        if self.grid <= 1 or point.kind == MARKED:
            return point
        return Point(point.position // self.grid * self.grid, point.kind)


class Wanted(NamedTuple):
    """Where snapshots of a prompt are wanted, in order of position, each once.

    Attributes:
        points: Those that are worth a row.
        ghosts: Those of which only the position is to be remembered.
    """

    points: list[Point]
    ghosts: list[Point]


def wanted_points(
    wishes: Iterable[Wish],
    emission: Emission,
    marked: Sequence[int],
    prompt_tokens: int,
    reused: int,
) -> Wanted:
    """Returns the points that a prompt will be asked for.

    Args:
        wishes: What the policy wants.
        emission: Where states can be emitted.
        marked: Points that the caller wants.
        prompt_tokens: Length of the prompt.
        reused: Tokens that are reused; only points after them can be taken.
    """
    points: dict[int, Point] = {}
    ghosts: dict[int, Point] = {}
    for position, kind, worth_a_row in wishes:
        placed = emission.place(Point(position, kind))
        if worth_a_row:
            points[placed.position] = placed
        else:
            ghosts[placed.position] = placed
    for position in marked:
        points[position] = Point(position, MARKED)
    return Wanted(
        [points[p] for p in sorted(points) if reused < p <= prompt_tokens],
        [
            ghosts[p]
            for p in sorted(ghosts)
            if reused < p <= prompt_tokens and p not in points
        ],
    )


def wishes_of(
    policy: SnapshotPolicy,
    prompt_tokens: int,
    reused: int,
    matched: int,
    tokens_per_page: int,
) -> list[Wish]:
    """Returns the points of a policy, all of them worth a row.

    Raises:
        ValueError: if the policy gives anything else than points.
    """
    given = policy.points(prompt_tokens, reused, matched, tokens_per_page)
    return [Wish(*point, True) for point in _read_points(policy, given)]


def _read_points(policy: SnapshotPolicy, given: Sequence[Point]) -> list[Point]:
    points = []
    try:
        for position, kind in given:
            if not isinstance(kind, str):
                raise TypeError
            points.append(Point(operator.index(position), kind))
    except (TypeError, ValueError):
        raise ValueError(
            f"policy must give points, each an integer position with the name of a "
            f"kind, got {given!r} of {policy!r}"
        ) from None
    return points


def cut_chunk(
    emission: Emission,
    points: Sequence[Point],
    start: int,
    budget: int,
    prompt_tokens: int,
    tokens_per_page: int,
) -> int:
    """Returns how many tokens of a prompt a step runs; 0 to skip the step.

    Where every point ahead can be emitted inside a chunk, the budget alone decides.
    Else a chunk never goes past a point that cannot, and a chunk that reaches neither
    such a point nor the end of the prompt ends with a page.

    Args:
        emission: Where states can be emitted.
        points: The points not taken yet, in order.
        start: Tokens in the cache.
        budget: Most tokens to run, at least 1.
        prompt_tokens: Length of the prompt, more than `start`.
        tokens_per_page: Tokens of one page.
    """
    stop = min(start + budget, prompt_tokens)
    for point in points:
        if point.position > start and not emission.can_emit(point.position):
            if stop >= point.position:
                return point.position - start
            if stop < prompt_tokens:
                stop = stop // tokens_per_page * tokens_per_page
            return max(stop - start, 0)
    return stop - start
