"""Requests: what the manager knows of each, and the arrays over seats.

Positions in a request's tokens, and who owns the pages before each:

    0           shared pages    history      planned         capacity       known
    |  tree's,     |  own,         |  own, being |  own,          |            |
    |  held        |  computed     |  computed   |  allocated     |            |

Tokens up to `known` have ids on the host. A decode step in flight samples one more,
which the next plan may already need: `planned` may equal `known`, never pass it.
"""

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np

from jaxcache.layouts import CacheSize
from jaxcache.policies.snapshots import Wanted
from jaxcache.prefixes.lookup import Found
from jaxcache.prefixes.nodes import NO_ROW, Hold, Int32s, Int64s, Snapshot

NO_SEAT = -1

# Where no snapshot is wanted; never changed.
NOTHING_WANTED = Wanted([], [])

# Stands for "no page is ever missing" in a model without attention.
_UNLIMITED = np.iinfo(np.int64).max


class Request:
    """One request, from `add` until it has ended and given back what it owned.

    Attributes:
        id: The caller's name for it.
        scope: Whom it shares prefixes with.
        data: Its tokens when it last waited, as the bytes of int32.
        length: How many those are: what prefill has to compute, or to reuse.
        marked: Positions that the caller wants a snapshot at.
        reuse: Whether it uses and leaves prefixes.
        found: The prefix it reuses.
        version: The tree's version that `found` was looked up in; -1 if it must be
            looked up again.
        hold: What it holds of the tree.
        source: A snapshot whose row it reads in a step not completed yet; held.
        seat: Its seat, `NO_SEAT` while it waits.
        row: The row that its next step writes.
        reads: The row that its next step reads, where that is another one.
        shared: Pages at the start of its page table that the tree owns.
        is_decoding: Whether all of `data` is planned.
        bundle: What the eviction policy notes of it.
        conversation: Whose turn it is; `None` if nobody's.
        wanted: Where snapshots are still wanted, in order.
        deepest: Position of the deepest snapshot that it has published.
        end: Why it takes part in no more plans: "finished" or "cancelled".
        is_halted: Whether it must wait for the plans in flight, since a step that was
            abandoned ran.
        is_lost: Whether that step has changed its row.
        is_closed: Whether it has given back what it owned.
    """

    __slots__ = (
        "bundle",
        "conversation",
        "data",
        "deepest",
        "end",
        "found",
        "hold",
        "id",
        "is_closed",
        "is_decoding",
        "is_halted",
        "is_lost",
        "length",
        "marked",
        "reads",
        "reuse",
        "row",
        "scope",
        "seat",
        "shared",
        "source",
        "version",
        "wanted",
    )

    def __init__(
        self,
        request_id: Hashable,
        scope: Hashable,
        data: bytes,
        marked: tuple[int, ...],
        reuse: bool,
        found: Found,
        version: int,
    ) -> None:
        self.id = request_id
        self.scope = scope
        self.data = data
        self.length = len(data) // 4
        self.marked = marked
        self.reuse = reuse
        self.found = found
        self.version = version
        self.hold: Hold | None = None
        self.source: Snapshot | None = None
        self.seat = NO_SEAT
        self.row = NO_ROW
        self.reads: int | None = None
        self.shared = 0
        self.is_decoding = False
        self.bundle: Any = None
        self.conversation: Hashable = None
        self.wanted = NOTHING_WANTED
        self.deepest = 0
        self.end: str | None = None
        self.is_halted = False
        self.is_lost = False
        self.is_closed = False


class Seats:
    """What is known of the request in each seat, as arrays over seats.

    S is `max_seqs`, W is `max_tokens` + 1: the token sampled last is never computed.

    Requests that only decode on advance in a `DecodeRun`, which writes what it knows
    of them here when somebody asks: whoever reads one of the properties.

    Attributes:
        owners: The request in each seat.
        generation: `i64[S]`, grows when the seat is given back.
        width: W.
        catch_up: Brings the arrays up to date; `None` where they are.
    """

    def __init__(self, size: CacheSize) -> None:
        seats = size.max_seqs
        self._page = size.tokens_per_page
        self._has_pages = bool(size.num_pages)
        self._free = list(range(seats - 1, -1, -1))
        self.owners: list[Request | None] = [None] * seats
        self.generation = np.zeros(seats, np.int64)
        self.width = size.max_tokens + 1
        self.catch_up: Callable[[], None] | None = None
        self._history = np.zeros(seats, np.int64)
        self._planned = np.zeros(seats, np.int64)
        self._known = np.zeros(seats, np.int64)
        self._capacity = np.zeros(seats, np.int64)
        self._last_plan = np.zeros(seats, np.int64)
        self._tokens: Int32s = np.zeros((seats, self.width), np.int32)
        self._flat_tokens = self._tokens.reshape(-1)

    @property
    def history(self) -> Int64s:
        """`i64[S]`, tokens whose computation was confirmed."""
        if self.catch_up is not None:
            self.catch_up()
        return self._history

    @property
    def planned(self) -> Int64s:
        """`i64[S]`, tokens computed once every plan in flight is."""
        if self.catch_up is not None:
            self.catch_up()
        return self._planned

    @property
    def known(self) -> Int64s:
        """`i64[S]`, tokens with ids, sampled ones included."""
        if self.catch_up is not None:
            self.catch_up()
        return self._known

    @property
    def capacity(self) -> Int64s:
        """`i64[S]`, tokens that fit into the pages it has."""
        if self.catch_up is not None:
            self.catch_up()
        return self._capacity

    @property
    def last_plan(self) -> Int64s:
        """`i64[S]`, number of the last plan with it."""
        if self.catch_up is not None:
            self.catch_up()
        return self._last_plan

    @property
    def tokens(self) -> Int32s:
        """`i32[S, W]`. Memory is only used for what is written."""
        if self.catch_up is not None:
            self.catch_up()
        return self._tokens

    @property
    def flat_tokens(self) -> Int32s:
        """The same as `i32[S * W]`."""
        if self.catch_up is not None:
            self.catch_up()
        return self._flat_tokens

    @property
    def num_free(self) -> int:
        """How many seats are free."""
        return len(self._free)

    @property
    def num_taken(self) -> int:
        """How many requests run."""
        return len(self.owners) - len(self._free)

    def free_seats(self) -> list[int]:
        """Returns a copy of the free seats, in no order."""
        return list(self._free)

    def take(self, request: Request) -> int:
        """Gives a request a seat and writes its tokens down there."""
        seat = self._free.pop()
        request.seat = seat
        self.owners[seat] = request
        reused = request.found.lookup.reused_tokens
        self.history[seat] = reused
        self.planned[seat] = reused
        self.known[seat] = request.length
        pages = reused // self._page * self._page
        self.capacity[seat] = pages if self._has_pages else _UNLIMITED
        self.tokens[seat, : request.length] = np.frombuffer(request.data, np.int32)
        return seat

    def give_back(self, request: Request) -> None:
        """Frees the request's seat; what plans in flight know of it is void."""
        seat = request.seat
        request.seat = NO_SEAT
        self.owners[seat] = None
        self.generation[seat] += 1
        self._free.append(seat)

    def num_pages(self, seat: int) -> int:
        """Returns how many pages a request has, shared ones included."""
        return int(self.capacity[seat]) // self._page if self._has_pages else 0

    def data(self, seat: int, start: int, stop: int) -> bytes:
        """Returns tokens of a request, as the bytes of int32."""
        return self.tokens[seat, start:stop].tobytes()
