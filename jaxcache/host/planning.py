"""Making a plan: rooms taken, tables brought up to date, inputs packed; and undoing it.

A request that begins gets its seat, its row and its pages here. Its first step reads
the row of the snapshot that it starts from, or the null row; each later one reads the
row that it writes, unless that row was handed over in between.
"""

import time
from collections.abc import Iterable

import numpy as np

from jaxcache.host.core import Core
from jaxcache.host.decode_run import DecodeRun
from jaxcache.host.plans import ABANDONED, Chunk, EmittedRow, Reading, StepPlan
from jaxcache.host.requests import Request
from jaxcache.host.sizing import Draft, Intent, Sizer, Work
from jaxcache.host.tables import NO_UPDATES
from jaxcache.inputs.packing import NEXT_TOKEN, Packer, StepWork
from jaxcache.layouts import NULL_SLOT
from jaxcache.policies.snapshots import Point, Wanted
from jaxcache.prefixes.nodes import NO_ROW, Int32s, Int64s

NO_ROOM = "no row was free or evictable"
NO_SLOT = "the step emits max_snapshots already"

_NOTHING = np.zeros(0, np.int64)


class Planner:
    """Makes and undoes the plans of one manager."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._page = core.size.tokens_per_page
        self._packer = Packer(core.layout, core.size, core.buckets)
        self.sizer = Sizer(core)
        # Seats whose row index must change when they next run: they read another row
        # than they write, then or now.
        self._unsettled: set[int] = set()
        # The seats of the last plan if that only decoded; the same array if the same
        # requests do in the next one.
        self._decoded: Int64s | None = None

    def plan(self, work: Work) -> StepPlan:
        """Returns a plan for the work; see `CacheManager.plan`."""
        began = time.perf_counter_ns()
        core = self._core
        plan = self._go_on(work) if core.run is not None else None
        if plan is None:
            plan = self._plan(work)
        counts = core.tally.counts
        counts["plans"] += 1
        counts["bytes_uploaded"] += plan.inputs.packed.nbytes
        if plan.inputs.extra_updates is not None:
            counts["bytes_uploaded"] += plan.inputs.extra_updates.nbytes
        counts["plan_ns"] += time.perf_counter_ns() - began
        return plan

    def _plan(self, work: Work) -> StepPlan:
        core = self._core
        draft = self.sizer.draft(work)
        core.stop_run()
        self.sizer.tidy(draft)
        chosen = self._choose_points(draft)
        optional = sum(len(points) for points in chosen)
        core.tree.evictor.make_room(draft.columns, draft.rows + optional)
        core.number += 1
        step = StepWork()
        grown_seats, grown_indices = self._decode(draft, step)
        chunks: list[Chunk] = []
        readings: list[Reading] = []
        copies: list[tuple[int, int, int]] = []
        if self._unsettled and draft.seats.size and core.has_rows:
            self._settle(readings)
        for intent, points in zip(draft.intents, chosen, strict=True):
            chunk = self._chunk(intent, points, readings, copies)
            chunks.append(chunk)
        prefill_tokens = self._prefill(chunks, step)
        if copies:
            step.copies = np.array(copies, np.int32).T.copy()
        step.updates = core.tables.take_updates()
        plan = self._record(draft, chunks, step.updates)
        plan.grown_seats, plan.grown_indices = grown_seats, grown_indices
        plan.readings = readings
        core.in_flight.append(plan)
        try:
            plan.inputs = self._packer.pack_unchecked(
                step, draft.bucket, prefill_tokens
            )
        except BaseException:
            self.undo(plan, ran=False)
            raise
        for group, _, _ in copies:
            core.tally.counts["pages_copied"] += 1
            core.tally.counts["bytes_copied_for_pages"] += core.layout.bytes_per_page(
                group
            )
        self._begin_run(plan)
        return plan

    # -- decoding on -------------------------------------------------------------------

    def _begin_run(self, plan: StepPlan) -> None:
        """Lets the next plans go on from this one, if all of them only decode.

        That pays from the second plan of the same requests on.
        """
        core, seats = self._core, plan.seats
        is_repeated = not plan.chunks and seats is self._decoded
        self._decoded = None if plan.chunks else seats
        if not is_repeated or any(p.seats is not seats for p in core.in_flight):
            return
        if not self._unsettled.isdisjoint(seats.tolist()):
            return
        form = self._packer.repeat(seats.astype(np.int32))
        groups = core.pages.num_groups
        if form.bucket.updates < seats.size * groups:
            return
        run = DecodeRun(
            self.sizer.work,
            plan.requests,
            seats,
            core.seats,
            form,
            core.number,
            core.epoch,
            core.size,
        )
        if groups and not run.plan_growth(core.seats, core.tables):
            return
        core.run = run
        for each in core.in_flight:
            each.run = run

    def _go_on(self, work: Work) -> StepPlan | None:
        """Returns the next plan of the run, `None` if there is more to see to."""
        core = self._core
        run = core.run
        assert run is not None
        if (
            run.number != core.number
            or run.epoch != core.epoch
            or run.left <= 0
            or core.tables.has_updates
            or (self._unsettled and not self._unsettled.isdisjoint(run.taken))
            or not run.goes_on(work)
        ):
            return None
        updates, growth = NO_UPDATES, run.growth
        grown_seats = grown_indices = _NOTHING
        if growth is not None:
            grown_seats, grown_indices = growth.seats, growth.indices
            count = grown_seats.size
            if core.pages.free_columns < count:
                residency = core.tree.residency
                for group in range(core.pages.num_groups):
                    free = core.pages.free(group)
                    if free + residency.evictable_pages(group) < count:
                        return None
                core.tree.evictor.make_room(count, 0)
            updates = growth.set_pages(core.pages.take(count))
        core.number += 1
        inputs, starts, ends = run.advance(core.number, updates, not core.in_flight)
        plan = StepPlan(
            number=core.number,
            bucket=run.bucket,
            updates=updates,
            requests=run.requests,
            num_decode=len(starts),
            chunks=[],
            seats=run.seats,
            starts=starts,
            ends=ends,
            generations=run.generations,
            epoch=run.epoch,
        )
        plan.inputs = inputs
        plan.grown_seats, plan.grown_indices = grown_seats, grown_indices
        plan.readings = []
        plan.run = run
        core.in_flight.append(plan)
        return plan

    # -- decode entries ----------------------------------------------------------------

    def _decode(self, draft: Draft, step: StepWork) -> tuple[Int64s, Int64s]:
        """Fills the decode part in; returns which seats got which page."""
        seats, positions = draft.seats, draft.positions
        if not seats.size:
            return _NOTHING, _NOTHING
        core = self._core
        array = core.seats
        grown_seats = grown_indices = _NOTHING
        if draft.growing.size:
            grown_seats = seats[draft.growing]
            grown_indices = positions[draft.growing] // self._page
            columns = core.pages.take(draft.growing.size)
            core.tables.set_page_of_each(grown_seats, grown_indices, columns)
            array.capacity[grown_seats] += self._page
        tokens = array.flat_tokens[seats * array.width + positions]
        if core.in_flight:
            tokens[positions >= array.known[seats]] = NEXT_TOKEN
        array.planned[seats] = positions + 1
        array.last_plan[seats] = core.number
        step.decode_seats = seats.astype(np.int32)
        step.decode_positions = positions.astype(np.int32)
        step.decode_tokens = tokens
        return grown_seats, grown_indices

    def _settle(self, readings: list[Reading]) -> None:
        """Sets the rows of decode entries that do not simply go on in their own."""
        core = self._core
        for seat in list(self._unsettled):
            request = core.seats.owners[seat]
            if request is None:
                self._unsettled.discard(seat)
            elif core.seats.last_plan[seat] == core.number:
                self._set_rows(request, readings)

    def _set_rows(self, request: Request, readings: list[Reading]) -> None:
        """Brings a request's entry of the row index up to date for this step."""
        tables, seat = self._core.tables, request.seat
        row = request.row if request.reads is None else request.reads
        tables.set_rows(seat, row, request.row)
        if request.reads is None:
            self._unsettled.discard(seat)
        else:
            readings.append(Reading(request, row, request.is_decoding))
            request.reads = None
            self._unsettled.add(seat)

    # -- prefill entries ---------------------------------------------------------------

    def _choose_points(self, draft: Draft) -> list[list[Point]]:
        """Returns the points of each chunk that get a row."""
        core = self._core
        chosen: list[list[Point]] = [[] for _ in draft.intents]
        wanted: list[tuple[int, int, Point]] = []
        for index, intent in enumerate(draft.intents):
            for point in intent.wanted.points:
                if point.position > intent.start + intent.length:
                    break
                wanted.append((point.rank, index, point))
        if not wanted:
            return chosen
        rows = core.rows.free + core.tree.residency.evictable_rows - draft.rows
        slots = draft.bucket.snapshots
        if len(wanted) > min(rows, slots):
            wanted.sort()
        for _, index, point in wanted:
            intent = draft.intents[index]
            inside = point.position < intent.start + intent.length
            if rows == 0:
                core.tally.skipped[NO_ROOM] += 1
            elif inside and slots == 0:
                core.tally.skipped[NO_SLOT] += 1
            else:
                rows -= 1
                slots -= inside
                chosen[index].append(point)
        return chosen

    def _chunk(
        self,
        intent: Intent,
        points: list[Point],
        readings: list[Reading],
        copies: list[tuple[int, int, int]],
    ) -> Chunk:
        core, request = self._core, intent.request
        is_first = intent.is_first
        if is_first:
            self._begin(request)
        seat, end = request.seat, intent.start + intent.length
        pages, seats = intent.pages, core.seats
        if intent.columns:
            columns = core.pages.take(intent.columns)
            core.tables.set_pages(seat, pages, columns)
            seats.capacity[seat] = (pages + intent.columns) * self._page
        if is_first and request.found.source is not None:
            table = core.tables.page_table[:, seat, pages]
            pairs = zip(request.found.source.tolist(), table.tolist(), strict=True)
            copies.extend((group, *pair) for group, pair in enumerate(pairs))
        if core.has_rows:
            self._set_rows(request, readings)
        chunk = Chunk(
            request=request,
            seat=seat,
            generation=seats.generation.item(seat),
            start=intent.start,
            length=intent.length,
            is_first=is_first,
            is_last=end == request.length,
            pages_before=pages,
            emitted=[],
            handed_point=None,
            handed_row=NO_ROW,
            ghosts=_passed(intent.wanted, points, end),
            wanted_before=intent.wanted,
        )
        for point in sorted(points) if len(points) > 1 else points:
            row = core.rows.take()
            if point.position < end:
                chunk.emitted.append(EmittedRow(point, row))
            else:
                # The row that this step writes becomes the snapshot. The next step
                # reads it and writes the new one.
                chunk.handed_point, chunk.handed_row = point, request.row
                request.reads, request.row = request.row, row
                self._unsettled.add(seat)
        request.wanted = _after(intent.wanted, end)
        request.is_decoding = chunk.is_last
        seats.planned[seat] = end
        seats.last_plan[seat] = core.number
        return chunk

    def _begin(self, request: Request) -> None:
        """Gives a request its seat and row, and the pages that it shares."""
        core = self._core
        seat = core.seats.take(request)
        if core.has_rows:
            source = request.source
            request.row = core.rows.take()
            request.reads = NULL_SLOT if source is None else source.row
            if source is not None:
                core.eviction.used(request.bundle, source)
        hold = request.hold
        request.shared = request.found.lookup.reused_tokens // self._page
        if hold is None:
            return
        node = hold.node
        core.tree.evictor.touch_leaf(node)
        table = core.tables.page_table
        while node.parent is not None:
            first = node.start // self._page
            stop = min(node.end // self._page, request.shared)
            if stop > first:
                table[:, seat, first:stop] = node.pages[:, : stop - first]
            node = node.parent
        core.tables.mark_pages(seat, 0, request.shared)

    def _prefill(self, chunks: list[Chunk], step: StepWork) -> list[Int32s]:
        """Fills the prefill part in; returns the tokens of each entry."""
        if not chunks:
            return []
        tokens = self._core.seats.tokens
        step.prefill_seats = _int32(chunk.seat for chunk in chunks)
        step.prefill_starts = _int32(chunk.start for chunk in chunks)
        step.prefill_lens = _int32(chunk.length for chunk in chunks)
        emitted = [
            (index, point.position, row)
            for index, chunk in enumerate(chunks)
            for point, row in chunk.emitted
        ]
        if emitted:
            step.snapshot_entries = _int32(entry for entry, _, _ in emitted)
            step.snapshot_positions = _int32(position for _, position, _ in emitted)
            step.snapshot_slots = _int32(row for _, _, row in emitted)
        return [tokens[c.seat, c.start : c.start + c.length] for c in chunks]

    def _record(self, draft: Draft, chunks: list[Chunk], updates: Int32s) -> StepPlan:
        core, seats, starts = self._core, draft.seats, draft.positions
        requests, ends = draft.requests, starts + 1
        if chunks:
            requests = requests + [chunk.request for chunk in chunks]
            seats = np.append(seats, [chunk.seat for chunk in chunks])
            starts = np.append(starts, [chunk.start for chunk in chunks])
            ends = np.append(ends, [chunk.start + chunk.length for chunk in chunks])
        return StepPlan(
            number=core.number,
            bucket=draft.bucket,
            updates=updates,
            requests=requests,
            num_decode=draft.seats.size,
            chunks=chunks,
            seats=seats,
            starts=starts,
            ends=ends,
            generations=core.seats.generation[seats],
            epoch=core.epoch,
        )

    # -- undoing -----------------------------------------------------------------------

    def undo(self, plan: StepPlan, ran: bool) -> None:
        """Makes it as if the newest plan had never been; see `CacheManager.abandon`."""
        core = self._core
        assert core.in_flight[-1] is plan
        core.stop_run()
        core.in_flight.pop()
        plan.status = ABANDONED
        core.epoch += 1
        array = core.seats
        live = array.generation[plan.seats] == plan.generations
        seats = plan.seats[live]
        array.planned[seats] = plan.starts[live]
        array.last_plan[seats] = plan.number - 1
        if plan.grown_seats.size:
            self._undo_growth(plan, seats)
        if core.has_rows:
            # They are set anew in the next plan that has them.
            self._unsettled.update(seats.tolist())
        read_elsewhere = {reading.request for reading in plan.readings}
        for chunk in plan.chunks:
            self._undo_chunk(chunk)
        for reading in plan.readings:
            if reading.request.seat >= 0 and not reading.request.is_closed:
                reading.request.reads = reading.row
        if ran:
            # What such a seat sampled last on the device is not the token of the last
            # plan that counts, and a row that was read and written is gone.
            for request in [array.owners[seat] for seat in seats.tolist()]:
                if request is not None:
                    request.is_halted = True
                    request.is_lost = core.has_rows and request not in read_elsewhere
                    if request not in core.ending:
                        core.ending.append(request)
        core.tables.put_updates_back(plan.updates)

    def _undo_growth(self, plan: StepPlan, live: Int64s) -> None:
        core = self._core
        still = np.isin(plan.grown_seats, live)
        seats, indices = plan.grown_seats[still], plan.grown_indices[still]
        core.pages.put(core.tables.page_table[:, seats, indices])
        core.seats.capacity[seats] -= self._page

    def _undo_chunk(self, chunk: Chunk) -> None:
        core, request, seat = self._core, chunk.request, chunk.seat
        for _, row in chunk.emitted:
            core.rows.put(row)
        if core.seats.generation[seat] != chunk.generation:
            if chunk.handed_point is not None:
                core.rows.put(chunk.handed_row)
            return
        if chunk.handed_point is not None:
            core.rows.put(request.row)
            request.row = chunk.handed_row
        request.reads = None
        pages = core.seats.num_pages(seat)
        core.pages.put(core.tables.page_table[:, seat, chunk.pages_before : pages])
        request.wanted = chunk.wanted_before
        request.is_decoding = False
        if core.pages.num_groups:
            core.seats.capacity[seat] = chunk.pages_before * self._page
        if chunk.is_first:
            self.leave_seat(request)

    def leave_seat(self, request: Request) -> None:
        """Takes seat and row from a request; its pages are the tree's or given back."""
        core = self._core
        if request.row != NO_ROW:
            core.rows.put(request.row)
            request.row = NO_ROW
        request.reads = None
        request.shared = 0
        request.is_decoding = False
        core.tables.point_rows_at_sink(request.seat)
        core.tables.forget_pages(request.seat)
        core.seats.give_back(request)
        core.epoch += 1


def _passed(wanted: Wanted, taken: list[Point], position: int) -> list[Point]:
    """Returns the points up to a position that are only to be remembered."""
    ghosts = [point for point in wanted.ghosts if point.position <= position]
    if len(taken) < len(wanted.points):
        ghosts += [
            point
            for point in wanted.points
            if point.position <= position and point not in taken
        ]
    return ghosts


def _after(wanted: Wanted, position: int) -> Wanted:
    """Returns the points that are still ahead."""
    points, ghosts = wanted
    if points and points[0].position <= position:
        points = [point for point in points if point.position > position]
    if ghosts and ghosts[0].position <= position:
        ghosts = [point for point in ghosts if point.position > position]
    return Wanted(points, ghosts)


def _int32(values: Iterable[int]) -> Int32s:
    return np.fromiter(values, np.int32)
