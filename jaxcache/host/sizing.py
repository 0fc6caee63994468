"""Sizing a plan: what it would take, and whether that is there. Nothing is taken yet.

A request that waits looks its prompt up again if the tree has changed, so that what it
reuses does not depend on how long it waited. If the plan is refused after that, it
holds again what it held before.
"""

import dataclasses
import operator
from collections.abc import Hashable, Sequence
from typing import Any, SupportsIndex

import numpy as np

from jaxcache.host.core import Core
from jaxcache.host.decode_run import is_equal_work
from jaxcache.host.errors import OutOfPages, OutOfRows, OutOfSeats, Refused
from jaxcache.host.requests import NO_SEAT, NOTHING_WANTED, Request
from jaxcache.inputs.buckets import Bucket
from jaxcache.policies.policy import Arrival
from jaxcache.policies.snapshots import Wanted, cut_chunk, wanted_points
from jaxcache.prefixes.lookup import Found
from jaxcache.prefixes.nodes import Int64s

Work = Sequence[tuple[Hashable, SupportsIndex]]


@dataclasses.dataclass(slots=True, eq=False)
class Intent:
    """A prefill entry that is to be planned.

    Attributes:
        request: The request.
        start: Tokens in the cache before it.
        length: Tokens it runs.
        pages: Pages that the request has, of each group, shared ones included.
        columns: Pages it needs, of each group.
        wanted: The points it still wants, those in this chunk first.
    """

    request: Request
    start: int
    length: int
    pages: int
    columns: int
    wanted: Wanted

    @property
    def is_first(self) -> bool:
        """Whether the request begins to run with it."""
        return self.request.seat == NO_SEAT


@dataclasses.dataclass(slots=True, eq=False)
class Draft:
    """A plan that was sized.

    Attributes:
        requests: The requests that decode.
        seats: `i64[d]`, their seats.
        positions: `i64[d]`, where their tokens go.
        growing: `i64[g]`, which of them need another page.
        intents: The prefill entries.
        bucket: The shape of the step.
        columns: Pages it needs, of each group.
        rows: Rows it cannot do without.
        before: What requests held, and knew of the tree, that hold something else now.
    """

    requests: list[Request]
    seats: Int64s
    positions: Int64s
    growing: Int64s
    intents: list[Intent]
    bucket: Bucket
    columns: int
    rows: int
    before: list[tuple[Request, Found, int]]


class Sizer:
    """Sizes plans for one manager.

    Attributes:
        work: The newest work in which all requests decode.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._page = core.size.tokens_per_page
        # Its entries, which are often those of the next plan.
        self.work: tuple[Any, ...] = ()
        self._epoch = -1
        self._requests: list[Request] = []
        self._seats = np.zeros(0, np.int64)

    def draft(self, work: Work) -> Draft:
        """Returns what a plan takes.

        Raises:
            ValueError: if the work is not well formed or exceeds the buckets.
            Refused: if there is no room. Nothing has changed.
        """
        core = self._core
        requests, seats, prefill = self._sort(work)
        positions = core.seats.planned[seats]
        growing = (positions >= core.seats.capacity[seats]).nonzero()[0]
        if seats.size and positions.max() >= core.size.max_tokens:
            self._refuse_full(requests, positions)
        before: list[tuple[Request, Found, int]] = []
        try:
            intents = self._intents(prefill, seats.size > 0, before)
            bucket = core.buckets.select(
                seats.size, len(intents), sum(intent.length for intent in intents)
            )
            draft = Draft(
                requests=requests,
                seats=seats,
                positions=positions,
                growing=growing,
                intents=intents,
                bucket=bucket,
                columns=0,
                rows=0,
                before=before,
            )
            self._count(draft)
            refusal = self._refusal(draft)
            if refusal is not None and not self._make_it_fit(draft):
                raise refusal
        except BaseException:
            self._hold_as(before)
            raise
        return draft

    def fits(self, work: Work) -> bool:
        """Says whether a plan would find room, without any effect.

        Raises:
            ValueError: if the work is not well formed or exceeds the buckets.
        """
        try:
            draft = self.draft(work)
        except Refused:
            return False
        self._hold_as(draft.before)
        return True

    # -- reading the work --------------------------------------------------------------

    def _sort(
        self, work: Work
    ) -> tuple[list[Request], Int64s, list[tuple[Request, int]]]:
        """Returns the requests that decode, their seats, and those that prefill."""
        try:
            items = tuple(work)
        except TypeError:
            raise ValueError(
                f"work must be a sequence of pairs (request_id, num_tokens), "
                f"got {work!r}"
            ) from None
        if self._epoch == self._core.epoch and is_equal_work(items, self.work):
            return self._requests, self._seats, []
        if not items:
            raise ValueError("work must name at least one request, got none")
        requests: list[Request] = []
        prefill: list[tuple[Request, int]] = []
        get = self._core.requests.get
        pairs: list[tuple[Hashable, int]] = []
        for item in items:
            request_id, num_tokens = _read_pair(item)
            try:
                request = get(request_id)
            except TypeError:
                request = None
            if request is None:
                request = self._core.request(request_id)
            pairs.append((request_id, num_tokens))
            if request.is_halted:
                raise ValueError(
                    f"work must not name request {request_id!r} yet: its step that was "
                    f"abandoned ran, so the plan before has to be completed first"
                )
            if request.is_decoding:
                requests.append(request)
            else:
                prefill.append((request, num_tokens))
        if len({*requests, *(request for request, _ in prefill)}) < len(items):
            ids = [request_id for request_id, _ in pairs]
            twice = sorted({repr(i) for i in ids if ids.count(i) > 1})
            raise ValueError(
                f"work must name each request once, got {', '.join(twice)} twice"
            )
        seats = np.array([request.seat for request in requests], np.int64)
        if not prefill:
            # Tuples stay as they are, so the very same ones need not be looked into.
            are_tuples = {*map(type, items)} == {tuple}
            self.work = items if are_tuples else tuple(pairs)
            self._epoch = self._core.epoch
            self._requests, self._seats = requests, seats
        return requests, seats, prefill

    def _refuse_full(self, requests: list[Request], positions: Int64s) -> None:
        request = requests[int(positions.argmax())]
        raise ValueError(
            f"request {request.id!r} has max_tokens = {self._core.size.max_tokens} "
            f"tokens; finish it"
        )

    def _intents(
        self,
        prefill: list[tuple[Request, int]],
        has_decode: bool,
        before: list[tuple[Request, Found, int]],
    ) -> list[Intent]:
        intents = []
        skipped: list[tuple[Request, int]] = []
        copies_left = self._core.buckets.max_copies
        for request, num_tokens in prefill:
            if request.seat == NO_SEAT:
                self._look_again(request, before)
                if request.found.source is not None:
                    if copies_left < self._core.pages.num_groups:
                        continue
                    copies_left -= self._core.pages.num_groups
            intent = self._intent(request, num_tokens, self._core.size.tokens_per_page)
            if intent is None:
                skipped.append((request, num_tokens))
            else:
                intents.append(intent)
        if not intents and not has_decode:
            # A step with a runnable request runs at least one token.
            intent = self._intent(*skipped[0], 1)
            assert intent is not None
            intents.append(intent)
        return intents

    def _look_again(
        self, request: Request, before: list[tuple[Request, Found, int]]
    ) -> None:
        if request.reuse and request.version != self._core.tree.residency.version:
            before.append((request, self._core.held(request), request.version))
            self._core.look_up(request, copies=self._core.copies)

    def _wanted(self, request: Request, reused: int) -> Wanted:
        """Returns the points of a request that begins."""
        core = self._core
        if not core.has_rows or not request.reuse:
            return NOTHING_WANTED
        matched = request.found.lookup.matched_tokens
        now = Arrival(request.length, reused, matched, request.found.credited)
        wishes = core.placement.wishes(request.bundle, now, core.rows.free - 1)
        return wanted_points(
            wishes, core.emission, request.marked, request.length, reused
        )

    def _intent(
        self,
        request: Request,
        num_tokens: int,
        unit: int,
        wanted: Wanted | None = None,
    ) -> Intent | None:
        """Returns the chunk that a request runs next, `None` to skip the step."""
        core = self._core
        if request.seat == NO_SEAT:
            lookup = request.found.lookup
            start, pages = lookup.reused_tokens, lookup.reused_tokens // self._page
            if wanted is None:
                wanted = self._wanted(request, start)
        else:
            start = int(core.seats.planned[request.seat])
            pages = core.seats.num_pages(request.seat)
            wanted = request.wanted
        length = cut_chunk(
            core.emission, wanted.points, start, num_tokens, request.length, unit
        )
        if length == 0:
            return None
        columns = 0
        if core.pages.num_groups:
            columns = max(0, -(-(start + length) // self._page) - pages)
        else:
            pages = 0
        return Intent(request, start, length, pages, columns, wanted)

    # -- counting ----------------------------------------------------------------------

    def _count(self, draft: Draft) -> None:
        draft.columns = draft.growing.size + sum(i.columns for i in draft.intents)
        draft.rows = 0
        if self._core.has_rows:
            draft.rows = sum(intent.is_first for intent in draft.intents)

    def _refusal(self, draft: Draft) -> Refused | None:
        """Returns why a plan does not fit, `None` if it does."""
        core = self._core
        residency = core.tree.residency
        first = [i.request.id for i in draft.intents if i.is_first]
        if len(first) > core.seats.num_free:
            free = core.seats.num_free
            return OutOfSeats(first[free], len(first), free)
        for group in range(core.pages.num_groups):
            available = core.pages.free(group) + residency.evictable_pages(group)
            if draft.columns > available:
                request_id = self._first_without(draft, available)
                return OutOfPages(request_id, draft.columns, available, group)
        available = core.rows.free + residency.evictable_rows
        if draft.rows > available:
            return OutOfRows(first[available], draft.rows, available)
        return None

    def _first_without(self, draft: Draft, available: int) -> Hashable:
        """Returns the first request whose pages are not there."""
        if draft.growing.size > available:
            return draft.requests[int(draft.growing[available])].id
        needed = draft.growing.size
        for intent in draft.intents:
            needed += intent.columns
            if needed > available:
                break
        return intent.request.id

    # -- the last resort ---------------------------------------------------------------

    def _make_it_fit(self, draft: Draft) -> bool:
        """Takes from those who wait what they hold, if nobody runs who could finish.

        So a plan of one request fits whenever nothing else runs, if need be without
        reuse: else those who wait could hold, together, what each of them needs.
        """
        core = self._core
        in_plan = {intent.request for intent in draft.intents}
        seated = draft.seats.size + sum(r.seat != NO_SEAT for r in in_plan)
        if core.in_flight or core.seats.num_taken > seated:
            return False
        for request in core.requests.values():
            if request.hold is not None and request.seat == NO_SEAT:
                if request not in in_plan:
                    self._take_hold(draft, request)
        if self._refusal(draft) is None:
            return True
        if len(draft.intents) + draft.seats.size > 1:
            return False
        # Asked before anything is given up, since the policy may fail.
        anew = [self._wanted(i.request, 0) for i in draft.intents if i.is_first]
        # One alone fits for certain, so this need not be undone.
        self.tidy(draft)
        if self._refusal(draft) is None:
            return True
        assert draft.intents
        assert draft.intents[0].is_first
        intent = draft.intents[0]
        request = intent.request
        self._take_hold(draft, request)
        again = self._intent(request, intent.length, 1, anew[0])
        assert again is not None
        draft.intents[0] = again
        draft.bucket = core.buckets.select(0, 1, again.length)
        self._count(draft)
        return self._refusal(draft) is None

    def tidy(self, draft: Draft) -> None:
        """Gives up what only holds that were replaced had been a reason to keep."""
        for _, found, _ in draft.before:
            if found.node is not None and found.node.parent is not None:
                self._core.tree.evictor.shrink(found.node)

    def _take_hold(self, draft: Draft, request: Request) -> None:
        core = self._core
        # Looked up again in any case: the page it was to copy may have moved.
        draft.before.append((request, core.held(request), -1))
        nothing = core.finder.nothing(
            request.length,
            looked_up=True,
            matched=request.found.lookup.matched_tokens,
        )
        core.hold_instead(request, nothing, -1)

    def _hold_as(self, before: list[tuple[Request, Found, int]]) -> None:
        """Lets requests hold again what they held before."""
        while before:
            self._core.hold_instead(*before.pop())


def _read_pair(item: Any) -> tuple[Hashable, int]:
    """Returns a request's id and its number of tokens.

    Raises:
        ValueError: if it is no such pair.
    """
    try:
        request_id, number = item
    except (TypeError, ValueError):
        raise ValueError(
            f"work must hold pairs (request_id, num_tokens), got {item!r}"
        ) from None
    num_tokens = number if type(number) is int else _as_int(number)
    if num_tokens < 1:
        raise ValueError(
            f"work must give request {request_id!r} at least 1 token, got {number!r}"
        )
    return request_id, num_tokens


def _as_int(number: Any) -> int:
    """Returns an integer of another type as an int, 0 for what is none."""
    if isinstance(number, bool | np.bool_):
        return 0
    try:
        return operator.index(number)
    except TypeError:
        return 0
