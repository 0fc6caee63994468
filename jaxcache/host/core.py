"""The parts of the manager that planning, publishing and checking work on."""

import collections
import dataclasses
from collections.abc import Hashable
from typing import Any

from jaxcache.host.conversations import Conversations
from jaxcache.host.decode_run import DecodeRun
from jaxcache.host.errors import UnknownRequest
from jaxcache.host.plans import StepPlan
from jaxcache.host.requests import Request, Seats
from jaxcache.host.stats import Tally
from jaxcache.host.tables import DeviceTables
from jaxcache.inputs.buckets import Buckets
from jaxcache.layouts import CacheLayout, CacheSize
from jaxcache.policies.placement import Placement
from jaxcache.policies.policy import Policy
from jaxcache.policies.snapshots import Emission
from jaxcache.prefixes.lookup import Finder, Found
from jaxcache.prefixes.nodes import Snapshot
from jaxcache.prefixes.slots import PagePools, RowPool
from jaxcache.prefixes.tree import PrefixTree

# How many ended requests are remembered for error messages.
_REMEMBERED_ENDS = 1024


def check_hashable(name: str, value: object) -> None:
    """Refuses what cannot be looked up.

    Raises:
        ValueError: naming the argument.
    """
    try:
        hash(value)
    except TypeError:
        raise ValueError(f"{name} must be hashable, got {value!r}") from None


@dataclasses.dataclass(slots=True, eq=False)
class Core:
    """What the manager knows.

    Attributes:
        layout: The layout of the cache.
        size: Its size.
        buckets: The shapes of its steps.
        placement: Where snapshots are wanted.
        eviction: What goes first.
        emission: Where they can be taken inside a chunk.
        pages: Free pages.
        rows: Free rows.
        tree: What is known.
        finder: Lookups in it.
        seats: The requests that run.
        tables: What the device should know of them.
        tally: The counts.
        conversations: Their turns.
        requests: The requests that have not ended, by id.
        in_flight: Plans that were neither completed nor abandoned, oldest first.
        ending: Requests that end, or start again, once no plan in flight has them.
        number: Number of the last plan.
        epoch: Grows when a request stops decoding or leaves its seat.
        ends: How requests ended, by id; the newest ones.
        run: The decode steps that the last plans were, if they may go on.
    """

    layout: CacheLayout
    size: CacheSize
    buckets: Buckets
    placement: Placement
    eviction: Policy[Any]
    emission: Emission
    pages: PagePools
    rows: RowPool
    tree: PrefixTree
    finder: Finder
    seats: Seats
    tables: DeviceTables
    tally: Tally
    conversations: Conversations
    requests: dict[Hashable, Request]
    in_flight: collections.deque[StepPlan]
    ending: list[Request] = dataclasses.field(default_factory=list)
    number: int = 0
    epoch: int = 0
    ends: collections.OrderedDict[Hashable, str] = dataclasses.field(
        default_factory=collections.OrderedDict
    )
    run: DecodeRun | None = None

    @property
    def has_rows(self) -> bool:
        """Whether the model has recurrent layers."""
        return self.layout.has_recurrent

    @property
    def copies(self) -> bool:
        """Whether a step can copy the begun page of one more prefix."""
        return 0 < self.pages.num_groups <= self.buckets.max_copies

    def request(self, request_id: Hashable) -> Request:
        """Returns a request that has not ended.

        Raises:
            UnknownRequest: saying what became of it.
            ValueError: if it cannot be the id of any.
        """
        check_hashable("request_id", request_id)
        request = self.requests.get(request_id)
        if request is not None:
            return request
        end = self.ends.get(request_id)
        if end is None:
            raise UnknownRequest(f"request_id {request_id!r} was never added")
        raise UnknownRequest(f"request_id {request_id!r} maps to nothing: it was {end}")

    def is_in_flight(self, request: Request) -> bool:
        """Whether a plan that was neither completed nor abandoned has the request."""
        if request.seat < 0 or not self.in_flight:
            return False
        last = int(self.seats.last_plan[request.seat])
        return last >= self.in_flight[0].number

    def stop_run(self) -> None:
        """Lets the arrays over seats be all that is known of the requests."""
        if self.seats.catch_up is not None:
            self.seats.catch_up()
        self.run = None

    def forget(self, request: Request, end: str) -> None:
        """Lets the request's id map to nothing."""
        del self.requests[request.id]
        request.end = end
        self.ends[request.id] = end
        self.ends.move_to_end(request.id)
        if len(self.ends) > _REMEMBERED_ENDS:
            self.ends.popitem(last=False)
        self.epoch += 1

    # -- holding -----------------------------------------------------------------------

    def look_up(self, request: Request, *, copies: bool) -> None:
        """Looks a waiting request up and holds what it found instead of before."""
        found = self.finder.find(request.scope, request.data, copies=copies)
        self.hold_instead(request, found, self.tree.residency.version)

    def hold_instead(self, request: Request, found: Found, version: int) -> None:
        """Lets a waiting request hold another prefix than before.

        Nothing is given up, so that it can be undone; whoever is sure shrinks the tree.
        """
        hold, source = request.hold, request.source
        request.hold = request.source = None
        request.found = found
        request.version = version
        # First the new one: what both need must not be given up in between.
        self.hold_found(request)
        if source is not None:
            self.tree.residency.release_snapshot(source)
        if hold is not None:
            self.tree.residency.release(hold)

    def held(self, request: Request) -> Found:
        """Returns what a waiting request found, as the tree has it by now."""
        if request.hold is None:
            return request.found
        return request.found._replace(
            node=request.hold.node, held=request.hold.position
        )

    def hold_found(self, request: Request) -> None:
        """Holds what a waiting request found."""
        found = request.found
        if found.node is not None:
            request.hold = self.tree.residency.hold(found.node, found.held)
            if found.snapshot is not None:
                self.keep(request, found.snapshot)

    def keep(self, request: Request, snapshot: Snapshot) -> None:
        """Holds the snapshot that a request is going to read."""
        self.tree.residency.hold_snapshot(snapshot)
        request.source = snapshot

    def let_go(self, request: Request) -> None:
        """Releases everything that a request holds of the tree."""
        if request.source is not None:
            self.tree.residency.release_snapshot(request.source)
            request.source = None
        if request.hold is not None:
            self.tree.release(request.hold)
            request.hold = None
