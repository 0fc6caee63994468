"""The cache manager: which request runs on which slots, and what others may reuse.

A serving loop adds requests, plans a step for some of them, runs it on the device, and
tells the outcome:

    manager = CacheManager(state.layout, state.size, buckets)
    lookup = manager.add("a", prompt)
    plan = manager.plan([("a", len(prompt) - lookup.reused_tokens)])
    state, tokens = step(params, state, plan.inputs)
    manager.complete(plan, tokens[plan.entry_rows])
    manager.finish("a")

All of it is host work on plain Python objects and NumPy arrays; no device array is
touched. Steps must be dispatched in the order of their plans: then a slot that was
given up may be given to another request at once, since its next writer comes after
every earlier reader.
"""

import collections
import time
from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from jaxcache.events.stream import EventStream, describe
from jaxcache.host.admission import (
    check_options,
    check_size,
    make_policy,
    read_points,
    read_prompt,
)
from jaxcache.host.conversations import Conversations
from jaxcache.host.core import Core, check_hashable
from jaxcache.host.errors import Refused, StalePlan
from jaxcache.host.invariants import check
from jaxcache.host.planning import Planner
from jaxcache.host.plans import IN_FLIGHT, StepPlan
from jaxcache.host.publishing import Publisher
from jaxcache.host.requests import NO_SEAT, Request, Seats
from jaxcache.host.sizing import Work
from jaxcache.host.stats import SlotUse, Stats, Tally
from jaxcache.host.tables import DeviceTables
from jaxcache.inputs.buckets import Buckets
from jaxcache.layouts import NULL_SLOT, CacheLayout, CacheSize
from jaxcache.layouts.arguments import boolean, check_kind, integer
from jaxcache.policies.learned import Learned
from jaxcache.policies.placement import place_by, suggestible
from jaxcache.policies.policy import Arrival, PolicyMaker
from jaxcache.policies.snapshots import Emission, SnapshotPolicy, auto
from jaxcache.prefixes.lookup import Finder, Lookup
from jaxcache.prefixes.nodes import Int32s
from jaxcache.prefixes.slots import PagePools, RowPool
from jaxcache.prefixes.tree import PrefixTree

# One plan may be made before the outcome of the last one is known.
MAX_IN_FLIGHT = 2


class CacheManager:
    """Manages the slots of one cache.

    Not for use from several threads at once.
    """

    def __init__(
        self,
        layout: CacheLayout,
        size: CacheSize,
        buckets: Buckets,
        *,
        policy: SnapshotPolicy | None = None,
        emission: Emission | None = None,
        eviction: PolicyMaker | None = None,
        max_turns: int = 2,
    ) -> None:
        """Makes a manager for an empty cache.

        Args:
            layout: The layout of the cache.
            size: Its size.
            buckets: The shapes of its steps. `max_copies` must be at least the number
                of attention groups if prefixes are to be reused that end inside a page.
            policy: Where snapshots are wanted. Default: `auto()`.
            emission: Where inside a chunk the kernels can write a state out. Default:
                anywhere.
            eviction: Makes the policy of what goes first, and with `auto()` of what is
                taken at all. Default: `Learned`.
            max_turns: How many turns of one `conversation` keep the state at their
                end.

        Raises:
            ValueError: if the arguments do not belong together, or one request of
                `max_tokens` could never run.
        """
        policy = auto() if policy is None else policy
        emission = Emission.anywhere() if emission is None else emission
        eviction = Learned if eviction is None else eviction
        check_size(layout, size)
        check_options(layout, buckets, policy, emission, size.max_tokens)
        order = make_policy(layout, eviction, suggestible(policy))
        pages, rows = PagePools(size), RowPool(size)
        tree = PrefixTree(layout, size, pages, rows, order)
        self._core = Core(
            layout=layout,
            size=size,
            buckets=buckets,
            placement=place_by(policy, order, size.tokens_per_page),
            eviction=order,
            emission=emission,
            pages=pages,
            rows=rows,
            tree=tree,
            finder=Finder(layout, tree),
            seats=Seats(size),
            tables=DeviceTables(size),
            tally=Tally(),
            conversations=Conversations(integer("max_turns", max_turns, 1)),
            requests={},
            in_flight=collections.deque(),
        )
        self._planner = Planner(self._core)
        self._publisher = Publisher(self._core, self._planner)

    # -- the life of a request ---------------------------------------------------------

    def add(
        self,
        request_id: Hashable,
        prompt: npt.ArrayLike,
        *,
        scope: Hashable = None,
        conversation: Hashable = None,
        points: Sequence[int] = (),
        reuse: bool = True,
    ) -> Lookup:
        """Adds a request. Nothing is allocated; the prefix that was found is held.

        If the request waits, its first plan looks again, and may find more.

        Args:
            request_id: The caller's name for it, of no other request under way.
            prompt: `i32[tokens]`, copied.
            scope: Adapter, salt, tenant: requests of different scope share nothing.
            conversation: Whose turn it is, if any: of its older turns only the newest
                `max_turns` keep the state at their end.
            points: Positions at which others are expected to leave this prompt; a
                snapshot is taken at exactly these. Ascending.
            reuse: Whether it uses and leaves prefixes.

        Returns:
            What it reuses, and why not more.

        Raises:
            ValueError: if an argument is wrong, the id is taken, or the prompt can
                never fit.
        """
        core = self._core
        check_hashable("request_id", request_id)
        check_hashable("scope", scope)
        check_hashable("conversation", conversation)
        boolean("reuse", reuse)
        if request_id in core.requests:
            raise ValueError(f"request_id {request_id!r} is under way already")
        data = read_prompt(request_id, prompt, core.size.max_tokens)
        marked = read_points(request_id, points, len(data) // 4)
        if marked and not reuse:
            raise ValueError(
                f"points of request {request_id!r} must be empty without reuse, "
                f"got {marked}"
            )
        if reuse:
            found = core.finder.find(scope, data, copies=core.copies)
        else:
            found = core.finder.nothing(len(data) // 4, looked_up=False)
        version = core.tree.residency.version
        request = Request(request_id, scope, data, marked, reuse, found, version)
        request.conversation = conversation
        if reuse and core.has_rows:
            self._credit(request)
        core.hold_found(request)
        core.requests[request_id] = request
        return found.lookup

    def plan(self, work: Work) -> StepPlan:
        """Plans a step: all of it, or nothing.

        Args:
            work: Requests, each once, and the most tokens that each may run. A request
                whose prompt is done runs one. One within its prompt runs fewer where a
                chunk must end earlier, or none at all this time: `StepPlan.entries`
                says what runs. Decode entries come first there.

        Returns:
            The plan, with the inputs of the step. It must be completed or abandoned.

        Raises:
            Refused: if pages, rows or seats are short. Nothing has changed.
            ValueError: if a request is unknown, named twice or full, or the work
                exceeds the largest bucket.
            StalePlan: if two plans are in flight already.
        """
        if len(self._core.in_flight) >= MAX_IN_FLIGHT:
            raise StalePlan(
                f"plans {[p.number for p in self._core.in_flight]} are in flight; "
                f"complete the older one first"
            )
        try:
            return self._planner.plan(work)
        except Refused:
            self._core.tally.counts["refused"] += 1
            raise

    def fits(self, work: Work) -> bool:
        """Says whether `plan(work)` would find room now. Changes nothing.

        Raises:
            ValueError: as `plan` does.
        """
        return self._planner.sizer.fits(work)

    def complete(self, plan: StepPlan, next_tokens: npt.ArrayLike) -> None:
        """Tells what a step sampled: histories advance and what they hold is published.

        Args:
            plan: The oldest plan in flight. One more may have been made since.
            next_tokens: `i32[entries]`, the token that each entry sampled. Ignored
                where the entry does not sample, or its request has ended.

        Raises:
            ValueError: if the tokens do not fit the plan.
            StalePlan: if the plan is not in flight, or not the oldest.
        """
        began = time.perf_counter_ns()
        core = self._core
        self._check_plan(plan)
        if core.in_flight[0] is not plan:
            raise StalePlan(
                f"{plan} must wait for plan {core.in_flight[0].number}: plans are "
                f"completed in their order"
            )
        try:
            tokens = np.asarray(next_tokens)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"next_tokens must be an array of shape {plan.seats.shape}: {error}"
            ) from error
        if tokens.shape != plan.seats.shape or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"next_tokens must be integers of shape {plan.seats.shape}, one for "
                f"each entry, got {tokens.dtype} of shape {tokens.shape}"
            )
        self._publisher.record(plan, tokens)
        for reading in plan.readings:
            self._publisher.end_reading(reading)
        for chunk in plan.chunks:
            if chunk.is_first:
                self._publisher.count_start(chunk.request)
            self._publisher.publish_chunk(chunk)
        if core.ending:
            self._publisher.settle()
        counts = core.tally.counts
        counts["completed"] += 1
        counts["computed_tokens"] += plan.num_tokens
        counts["complete_ns"] += time.perf_counter_ns() - began

    def abandon(self, plan: StepPlan, *, ran: bool = False) -> None:
        """Makes it as if a plan had never been made.

        Args:
            plan: The newest plan in flight.
            ran: Whether its step was dispatched all the same. Requests whose rows that
                step rewrote in place then start again, from what can be reused; their
                tokens stay as they are.

        Raises:
            StalePlan: if the plan is not in flight, or not the newest.
        """
        core = self._core
        boolean("ran", ran)
        self._check_plan(plan)
        if core.in_flight[-1] is not plan:
            raise StalePlan(
                f"{plan} must not be abandoned before plan "
                f"{core.in_flight[-1].number}, which builds on it"
            )
        self._planner.undo(plan, ran)
        core.tally.counts["abandoned"] += 1
        if core.ending:
            self._publisher.settle()

    def finish(self, request_id: Hashable) -> None:
        """Ends a request and leaves its confirmed tokens, and its state, for others.

        Its id maps to nothing from now on. With a plan in flight that has it, the rest
        happens when that plan is completed or abandoned.

        Raises:
            UnknownRequest: if there is no such request; says what became of it.
        """
        core = self._core
        request = core.request(request_id)
        core.forget(request, "finished")
        core.tally.counts["finished"] += 1
        if core.is_in_flight(request):
            core.ending.append(request)
        else:
            self._publisher.close(request)

    def cancel(self, request_id: Hashable) -> None:
        """Ends a request and gives back at once what it owned.

        What completed steps computed of its prompt stays for others; what was generated
        or is still in flight does not.

        Raises:
            UnknownRequest: if there is no such request; says what became of it.
        """
        core = self._core
        request = core.request(request_id)
        core.forget(request, "cancelled")
        core.tally.counts["cancelled"] += 1
        self._publisher.close(request)

    def listen(self, *, rank: int = 0) -> EventStream:
        """Returns a stream of all that can be restored, and then of what changes.

        Nothing is hashed, and nothing kept, until somebody listens.

        Args:
            rank: Which of several data-parallel caches this is.

        Raises:
            ValueError: if a stream listens already that was not closed.
        """
        shape = describe(self._core.layout, copies=self._core.copies)
        return EventStream(shape, self._core.tree.residency, rank=rank)

    # -- questions ---------------------------------------------------------------------

    @property
    def layout(self) -> CacheLayout:
        """The layout of the cache."""
        return self._core.layout

    @property
    def size(self) -> CacheSize:
        """The size of the cache."""
        return self._core.size

    @property
    def stats(self) -> Stats:
        """What was counted so far."""
        core = self._core
        residency = core.tree.residency
        core.tally.counts["snapshots_evicted"] = core.tree.evictor.num_snapshots
        core.tally.counts["columns_evicted"] = core.tree.evictor.num_columns
        pages = tuple(
            SlotUse(
                core.pages.num_pages[group],
                core.pages.free(group),
                residency.evictable_pages(group),
                core.pages.peak(group),
            )
            for group in range(core.pages.num_groups)
        )
        rows = SlotUse(
            core.rows.num_rows,
            core.rows.free,
            residency.evictable_rows,
            core.rows.peak,
        )
        running = core.seats.num_taken
        waiting = sum(r.seat == NO_SEAT for r in core.requests.values())
        return core.tally.snapshot(pages, rows, running, waiting)

    def restore_counts(self, stats: Stats) -> None:
        """Goes on counting from an earlier snapshot, of another manager for example."""
        self._core.tally.restore(stats)
        self._core.tree.evictor.num_snapshots = stats.snapshots_evicted
        self._core.tree.evictor.num_columns = stats.columns_evicted

    def __contains__(self, request_id: Hashable) -> bool:
        """Whether a request of this id is under way."""
        check_hashable("request_id", request_id)
        return request_id in self._core.requests

    def __bool__(self) -> bool:
        """Always true, also while no request is under way."""
        return True

    def __len__(self) -> int:
        """How many requests are under way, waiting ones included."""
        return len(self._core.requests)

    @property
    def plans_in_flight(self) -> tuple[StepPlan, ...]:
        """Plans that were neither completed nor abandoned, oldest first."""
        return tuple(self._core.in_flight)

    def explain(self, request_id: Hashable) -> Lookup:
        """Returns what a request reuses, and why not more."""
        return self._core.request(request_id).found.lookup

    def history(self, request_id: Hashable) -> int:
        """Returns how many tokens of a request are reused, or computed for certain."""
        request = self._core.request(request_id)
        if request.seat == NO_SEAT:
            return request.found.lookup.reused_tokens
        return int(self._core.seats.history[request.seat])

    def remaining(self, request_id: Hashable) -> int:
        """Returns how many tokens of a prompt no plan has taken yet; 0 once it decodes.

        A request that waits may turn out to need fewer when it begins.
        """
        request = self._core.request(request_id)
        if request.seat == NO_SEAT:
            return request.length - request.found.lookup.reused_tokens
        planned = int(self._core.seats.planned[request.seat])
        return max(0, request.length - planned)

    def tokens(self, request_id: Hashable) -> Int32s:
        """Returns a copy of the tokens of a request, those sampled so far included."""
        request = self._core.request(request_id)
        if request.seat == NO_SEAT:
            return np.frombuffer(request.data, np.int32).copy()
        known = int(self._core.seats.known[request.seat])
        return self._core.seats.tokens[request.seat, :known].copy()

    def worst_case_pages(self, num_tokens: int) -> tuple[int, ...]:
        """Returns the most pages of each group that a request of this length holds."""
        size = self._core.size
        num_tokens = integer("num_tokens", num_tokens)
        if not 0 < num_tokens <= size.max_tokens:
            raise ValueError(
                f"num_tokens must be from 1 to max_tokens = {size.max_tokens}, "
                f"got {num_tokens}"
            )
        pages = -(-num_tokens // size.tokens_per_page)
        return (pages,) * self._core.pages.num_groups

    def seats_of(self, request_ids: Iterable[Hashable]) -> Int32s:
        """Returns the seats of running requests, in the caller's order."""
        check_kind("request_ids", request_ids, Iterable)
        return np.array([self._running(i).seat for i in request_ids], np.int32)

    def rows_of(self, request_ids: Iterable[Hashable]) -> Int32s:
        """Returns the rows that running requests write next, in the caller's order.

        The null row for each in a model without recurrent layers.
        """
        check_kind("request_ids", request_ids, Iterable)
        rows = [self._running(i).row for i in request_ids]
        if not self._core.has_rows:
            rows = [NULL_SLOT] * len(rows)
        return np.array(rows, np.int32)

    def check(self) -> None:
        """Checks every invariant; for tests and debugging, it looks at everything.

        Raises:
            RuntimeError: naming the first that does not hold, with the numbers.
        """
        check(self._core)

    # -- parts -------------------------------------------------------------------------

    def _credit(self, request: Request) -> None:
        """Lets the policy learn from what a new request found."""
        core, lookup = self._core, request.found.lookup
        request.bundle = core.eviction.arrive(
            Arrival(
                lookup.prompt_tokens,
                lookup.reused_tokens,
                lookup.matched_tokens,
                request.found.credited,
            )
        )
        for ghost in core.eviction.expired():
            core.tree.evictor.forget(ghost)

    def _running(self, request_id: Hashable) -> Request:
        request = self._core.request(request_id)
        if request.seat == NO_SEAT:
            raise ValueError(f"request_id {request_id!r} waits: it has no seat yet")
        return request

    def _check_plan(self, plan: StepPlan) -> None:
        if not isinstance(plan, StepPlan):
            raise ValueError(f"plan must be a StepPlan, got {plan!r}")
        if plan.status != IN_FLIGHT:
            raise StalePlan(f"{plan} was {plan.status} already")
        if plan not in self._core.in_flight:
            raise StalePlan(f"{plan} belongs to another manager")
