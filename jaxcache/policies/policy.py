"""The protocol of a policy: where snapshots are taken, and what goes first.

A policy decides for models with recurrent layers only, where a prefix can be reused at
a position if a snapshot was kept there. It is asked along the life of a request:

    arrive      what the tree knew of the prompt; gives the policy's notes, a bundle
    wishes      where in the prompt to take snapshots
    added       each of them is in the tree, with a row or as a ghost
    response    whether to keep the state at the end of the request
    victim      which snapshot gives up its row, whenever rows or pages are short

A ghost is a snapshot without row and pages: a position and its history. A lookup meets
ghosts too, so that a policy can learn what it would have been worth to keep them.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from jaxcache.prefixes.nodes import Snapshot
from jaxcache.prefixes.order import EvictionOrder

# Why a snapshot is taken; of two on one position the earlier kind is the more telling.
MARKED = "marked"
BRANCH = "branch"
RESPONSE = "response"
BOUNDARY = "boundary"
LADDER_50 = "ladder_50"
LADDER_75 = "ladder_75"
LADDER_90 = "ladder_90"
GRID = "grid"
KINDS = (MARKED, BRANCH, RESPONSE, BOUNDARY, LADDER_50, LADDER_75, LADDER_90, GRID)
# Guesses at where a later prompt will leave this one.
GUESSES = (BOUNDARY, LADDER_50, LADDER_75, LADDER_90, GRID)


class Arrival(NamedTuple):
    """What the tree knows of a prompt when its request is added.

    Attributes:
        prompt_tokens: Length of the prompt.
        reused: Position of the deepest usable resident snapshot, 0 if there is none.
        matched: Longest prefix that the tree knows, less than the prompt.
        credited: The deepest snapshot at or before `matched`, ghosts included.
    """

    prompt_tokens: int
    reused: int
    matched: int
    credited: Snapshot | None


class Wish(NamedTuple):
    """A position inside the prompt at which a snapshot is wanted.

    Attributes:
        position: Tokens that it will have absorbed.
        kind: Why it is wanted.
        worth_a_row: Whether to take it; if not it is registered as a ghost.
    """

    position: int
    kind: str
    worth_a_row: bool


class Policy[Bundle](EvictionOrder, Protocol):
    """Where snapshots are taken, and what goes first."""

    def arrive(self, arrival: Arrival) -> Bundle:
        """Notes a new request and credits what it found; called once a request."""
        ...

    def wishes(self, bundle: Bundle, now: Arrival, free_rows: int) -> Sequence[Wish]:
        """Returns where in the prompt snapshots are wanted, as the request begins.

        Args:
            bundle: What `arrive` returned.
            now: What the tree knows of the prompt by now.
            free_rows: Rows that nobody uses; while there are any every position that
                is worth a thought is worth a row.

        Returns:
            In order of position, all after `now.reused`, none after the prompt.
        """
        ...

    def wants_response(
        self, bundle: Bundle, position: int, response_tokens: int, free_rows: int
    ) -> bool:
        """Returns whether the state at the end of a request is worth its row."""
        ...

    def added(self, bundle: Bundle, snapshot: Snapshot) -> None:
        """Notes a snapshot that is new in the tree, with a row or as a ghost."""
        ...

    def revived(self, bundle: Bundle, snapshot: Snapshot) -> None:
        """Notes that a ghost got a row from another request that passed by it."""
        ...

    def used(self, bundle: Bundle, snapshot: Snapshot) -> None:
        """Notes that a request begins from a snapshot."""
        ...

    def expired(self) -> Iterable[Snapshot]:
        """Returns the ghosts to be forgotten now; asked once a request."""
        ...


class PolicyMaker(Protocol):
    """Makes the policy of one cache: `Learned`, `Lru`, or any other callable."""

    def __call__(
        self,
        *,
        row_bytes: int,
        page_bytes: int,
        tokens_per_page: int,
        kinds: Collection[str],
    ) -> Policy[Any]:
        """Returns a policy.

        Args:
            row_bytes: Bytes of one row.
            page_bytes: Bytes of one column of pages, one of each attention group.
            tokens_per_page: Tokens of one page.
            kinds: The kinds of snapshots that `wishes` may suggest, of `KINDS`.
        """
        ...
