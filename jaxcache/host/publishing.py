"""Publishing: what a completed step, or the end of a request, leaves in the tree.

    positions    shared      full = h // B * B     deepest snapshot      h
    after a step |  published whole pages  |  tokens only        |  not yet  |
    at the end   |  published whole pages  |  the begun page, with the row at h

Only confirmed tokens are published. A snapshot inside a begun page is published with
the tokens before it; lookups use it from the moment the page is there: when it is full,
or when the request ends. The rows of snapshots are given to the tree, never copied.
"""

import contextlib
from typing import Any

import numpy.typing as npt

from jaxcache.host.core import Core
from jaxcache.host.planning import Planner
from jaxcache.host.plans import COMPLETED, Chunk, Reading, StepPlan
from jaxcache.host.repeats import Repeats
from jaxcache.host.requests import NOTHING_WANTED, Request
from jaxcache.policies.policy import RESPONSE
from jaxcache.policies.snapshots import Point
from jaxcache.prefixes.nodes import NO_ROW, Node, Snapshot

TWIN = "the tree had one at this position already"
LOST = "an abandoned step had changed the row"
UNWORTHY = "it was not worth a row, by the eviction policy"

_HANDED, _EMITTED = "snapshots_handed_over", "snapshots_emitted"


class Publisher:
    """Publishes for one manager, and takes from requests what they owned."""

    def __init__(self, core: Core, planner: Planner) -> None:
        self._core = core
        self._planner = planner
        self._page = core.size.tokens_per_page
        self._repeats = Repeats()
        # Requests that start again, and have been counted when they first began.
        self._restarted: set[Request] = set()

    # -- after a step ------------------------------------------------------------------

    def record(self, plan: StepPlan, next_tokens: npt.NDArray[Any]) -> None:
        """Writes down what a step sampled; it is in flight no longer.

        Raises:
            ValueError: if a token cannot be one. Nothing has changed.
        """
        core, run = self._core, plan.run
        if run is not None and run is core.run and run.epoch == core.epoch:
            _check_sampled(next_tokens)
            core.in_flight.popleft()
            plan.status = COMPLETED
            run.complete(plan.ends, next_tokens)
            return
        array, seats, ends = core.seats, plan.seats, plan.ends
        sampling, sampled = seats, next_tokens
        if plan.chunks or plan.epoch != core.epoch:
            live = array.generation[seats] == plan.generations
            samples = live & plan.samples
            sampling, sampled = seats[samples], next_tokens[samples]
            seats, ends = seats[live], ends[live]
        _check_sampled(sampled)
        core.in_flight.popleft()
        plan.status = COMPLETED
        array.history[seats] = ends
        known = array.known[sampling]
        array.flat_tokens[sampling * array.width + known] = sampled
        array.known[sampling] = known + 1

    def count_start(self, request: Request) -> None:
        """Counts a request whose first step is completed; once, if it starts again."""
        if request in self._restarted:
            self._restarted.discard(request)
            return
        counts, lookup = self._core.tally.counts, request.found.lookup
        counts["requests"] += 1
        counts["prompt_tokens"] += lookup.prompt_tokens
        if not lookup.looked_up:
            return
        counts["lookups"] += 1
        counts["matched_tokens"] += lookup.matched_tokens
        if reused := lookup.reused_tokens:
            counts["hits"] += 1
            counts["reused_tokens"] += reused
            is_aligned = reused % self._page == 0
            counts["aligned_hits" if is_aligned else "partial_hits"] += 1
        if request.length > self._page:
            missed = self._repeats.note(request.scope, request.data, lookup)
            counts["repeats_missed"] += missed

    def end_reading(self, reading: Reading) -> None:
        """Lets go of the snapshot that a request read in a step now completed."""
        request = reading.request
        if request.source is not None:
            self._core.tree.residency.release_snapshot(request.source)
            request.source = None
            if reading.is_decode:
                assert request.hold is not None
                self.hold_shared(request, request.hold.node)

    def publish_chunk(self, chunk: Chunk) -> None:
        """Publishes what a prefill entry computed."""
        core, request = self._core, chunk.request
        alive = core.seats.generation[chunk.seat] == chunk.generation
        rows = [(point, row, False) for point, row in chunk.emitted]
        if chunk.handed_point is not None:
            rows.append((chunk.handed_point, chunk.handed_row, True))
        if not alive or not request.reuse:
            for _, row, _ in rows:
                core.rows.put(row)
            return
        ghosts = chunk.ghosts
        history = chunk.start + chunk.length
        end = history // self._page * self._page if core.pages.num_groups else 0
        if rows:
            end = max(end, rows[-1][0].position)
        if ghosts:
            end = max(end, *(ghost.position for ghost in ghosts))
        node = self._publish_tokens(request, end)
        for point, row, is_handed in rows:
            assert node is not None
            assert point.position <= history
            how = _HANDED if is_handed else _EMITTED
            self._publish_row(request, node, point, row, how)
            if is_handed:
                self._go_on_from(request, node, point.position, row)
        for ghost in ghosts:
            assert node is not None
            self._publish_ghost(request, node, ghost)
        self.hold_shared(request, node)

    def _publish_tokens(
        self, request: Request, end: int, *, with_tail: bool = False
    ) -> Node | None:
        """Publishes the tokens after the shared pages, up to `end`.

        Returns:
            The node with the last of them; the one held before if there are none.
        """
        core, seat = self._core, request.seat
        start = request.shared * self._page
        before = None if request.hold is None else request.hold.node
        if end <= start:
            return before
        table = core.tables.page_table[:, seat]
        pages = end // self._page
        try:
            node, adopted = core.tree.insert(
                request.scope,
                before,
                start,
                core.seats.data(seat, start, end),
                table[:, request.shared : pages],
                table[:, pages].copy() if with_tail else None,
            )
        except BaseException:
            # The tree may have them by now: pages that are lost do less harm than
            # pages with two owners.
            request.shared = pages + with_tail
            raise
        if adopted:
            core.tables.mark_pages(seat, request.shared, request.shared + adopted)
            core.tally.counts["columns_adopted"] += adopted
        request.shared = pages
        return node

    def _publish_row(
        self, request: Request, node: Node, point: Point, row: int, how: str
    ) -> Snapshot | None:
        """Publishes a snapshot, unless the tree has one at its position already."""
        core = self._core
        request.deepest = max(request.deepest, point.position)
        snapshot = core.tree.attach(node, point.position, row, point.kind)
        if snapshot is None:
            core.rows.put(row)
            core.tally.skipped[TWIN] += 1
            return None
        if snapshot.record is None:
            core.eviction.added(request.bundle, snapshot)
        else:
            core.eviction.revived(request.bundle, snapshot)
        core.tally.snapshots[point.kind] += 1
        core.tally.counts[how] += 1
        return snapshot

    def _publish_ghost(self, request: Request, node: Node, point: Point) -> None:
        """Remembers a position without a row, unless the tree has a snapshot there."""
        core = self._core
        ghost = core.tree.attach(node, point.position, NO_ROW, point.kind)
        if ghost is not None:
            core.eviction.added(request.bundle, ghost)

    def _go_on_from(
        self, request: Request, node: Node, position: int, row: int
    ) -> None:
        """Lets a request read the snapshot at the end of its chunk, and holds it.

        Args:
            request: The request.
            node: A node at or below the snapshot.
            position: Where it is.
            row: The row that was handed over; the tree's may be another.
        """
        snapshot = self._core.tree.snapshot_at(node, position)
        assert snapshot is not None
        self._read_from(request, row, snapshot.row)
        self._core.keep(request, snapshot)

    def _read_from(self, request: Request, before: int, row: int) -> None:
        """Lets a request read a published row instead of the one it handed over.

        If a plan in flight has read that one already, then in case it is abandoned.
        """
        if request.reads == before:
            request.reads = row
            return
        for plan in self._core.in_flight:
            for reading in plan.readings:
                if reading.request is request and reading.row == before:
                    reading.row = row

    def hold_shared(self, request: Request, node: Node | None) -> None:
        """Holds the pages that a running request shares, and what it is going to read.

        Args:
            request: The request.
            node: A node at or below what is to be held.
        """
        core, before = self._core, request.hold
        position = request.shared * self._page
        if request.source is not None:
            position = max(position, request.source.position)
        if position == 0:
            request.hold = None
        else:
            assert node is not None
            node = core.tree.node_at(node, position)
            request.hold = core.tree.residency.hold(node, position)
        if before is not None:
            core.tree.release(before)

    # -- the end -----------------------------------------------------------------------

    def close(self, request: Request) -> None:
        """Ends a request that no plan in flight has: publishes, and gives all back.

        All is given back even where publishing fails, as nobody could ask again.
        """
        core = self._core
        request.is_closed = True
        node: Node | None = None
        try:
            if request.seat >= 0:
                history = int(core.seats.history[request.seat])
                if request.end == "finished":
                    node = self._publish_response(request, history)
                else:
                    node = self._publish_begun_page(request)
        finally:
            if request.seat >= 0:
                self._give_pages_back(request)
            core.let_go(request)
            if node is not None:
                core.tree.evictor.shrink(node)
            if request.seat >= 0:
                self._planner.leave_seat(request)

    def start_again(self, request: Request) -> None:
        """Lets a request wait again that has lost its row; its tokens stay known."""
        core = self._core
        seat = request.seat
        known = int(core.seats.known[seat])
        request.data = core.seats.data(seat, 0, known)
        request.length = known
        node = self._publish_begun_page(request)
        self._give_pages_back(request)
        core.let_go(request)
        if node is not None:
            core.tree.evictor.shrink(node)
        self._planner.leave_seat(request)
        request.deepest = 0
        request.wanted = NOTHING_WANTED
        request.found = core.finder.nothing(known, looked_up=request.reuse)
        request.version = -1
        if not core.in_flight:
            self._restarted = {r for r in self._restarted if not r.is_closed}
        self._restarted.add(request)
        core.tally.counts["restarted"] += 1

    def _publish_response(self, request: Request, history: int) -> Node | None:
        """Publishes all confirmed tokens, and the row as the snapshot at their end.

        Returns:
            The node of the last token, for whose sake it may not have to be kept.
        """
        core = self._core
        full = history // self._page * self._page
        # A row that was just handed over is published; its successor holds nothing yet.
        has_row = request.row != NO_ROW and request.reads is None
        wanted = core.has_rows and core.placement.takes_responses and request.reuse
        if wanted and request.is_lost:
            core.tally.skipped[LOST] += 1
        has_row = wanted and has_row and not request.is_lost and history > 0
        if not request.reuse:
            return None
        is_ghost = False
        if has_row:
            is_ghost = not core.placement.wants_response(
                request.bundle,
                history,
                history - request.found.lookup.prompt_tokens,
                core.rows.free,
            )
        if has_row:
            end = history
        elif core.has_rows:
            end = max(full, request.deepest) if core.pages.num_groups else 0
        else:
            end = history
        # A ghost needs no page, but a snapshot before it may.
        needed = request.deepest if is_ghost else end
        with_tail = core.pages.num_groups > 0 and needed > full
        node = self._publish_tokens(request, end, with_tail=with_tail)
        if with_tail:
            self._disown_tail(request)
        if has_row:
            assert node is not None
            point = Point(history, RESPONSE)
            if is_ghost:
                self._publish_ghost(request, node, point)
                core.tally.skipped[UNWORTHY] += 1
                return node
            row, request.row = request.row, NO_ROW
            snapshot = self._publish_row(request, node, point, row, _HANDED)
            if snapshot is not None and request.conversation is not None:
                whose = (request.scope, request.conversation)
                for older in core.conversations.answered(whose, snapshot):
                    core.tree.evictor.evict(older)
        return node

    def _publish_begun_page(self, request: Request) -> Node | None:
        """Publishes the begun page if a snapshot of the request lies inside it."""
        core = self._core
        begin = request.shared * self._page
        if request.reuse and core.pages.num_groups and request.deepest > begin:
            node = self._publish_tokens(request, request.deepest, with_tail=True)
            self._disown_tail(request)
            return node
        return None

    def _disown_tail(self, request: Request) -> None:
        """Counts the begun page among those that the tree owns."""
        request.shared += 1

    def _give_pages_back(self, request: Request) -> None:
        core, seat = self._core, request.seat
        pages = core.seats.num_pages(seat)
        own = core.tables.page_table[:, seat, request.shared : pages]
        core.pages.put(own)

    def settle(self) -> None:
        """Ends or restarts the requests that only waited for a plan in flight.

        If one of them fails, the others are settled all the same.
        """
        waiting, self._core.ending = self._core.ending, []
        with contextlib.ExitStack() as stack:
            for request in reversed(waiting):
                stack.callback(self._settle, request)

    def _settle(self, request: Request) -> None:
        core = self._core
        if request.is_closed:
            return
        if core.is_in_flight(request):
            core.ending.append(request)
        elif request.end is not None:
            self.close(request)
        else:
            request.is_halted = False
            if request.is_lost and request.seat >= 0:
                self.start_again(request)
            request.is_lost = False


def _check_sampled(tokens: npt.NDArray[Any]) -> None:
    """Refuses what cannot be token ids.

    Raises:
        ValueError: if one is not.
    """
    if not tokens.size:
        return
    # To find where the least is takes a quarter of the time of finding the least.
    least, most = tokens.item(tokens.argmin()), tokens.item(tokens.argmax())
    if not 0 <= least <= most < 1 << 31:
        raise ValueError(
            f"next_tokens must be int32 token ids >= 0 where an entry samples, "
            f"got {least} to {most}"
        )
