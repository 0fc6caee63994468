"""What others may reuse, written down from the events alone.

The record never looks into the manager's tree. It sees what a serving loop sees: the
requests that were added and how they ended, the entries and inputs of each plan, which
plans were completed and which abandoned, and the public counts. From these follows what
must have been published. As long as nothing was evicted a lookup must find exactly
that; afterwards the record still says what it may find at most.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Set as AbstractSet
from typing import Any

from jaxcache.host.plans import StepPlan
from jaxcache.layouts import CacheLayout
from jaxcache.policies.policy import Wish
from jaxcache.policies.snapshots import Emission, SnapshotPolicy, wanted_points
from jaxcache.prefixes.lookup import Lookup
from tests.host.recorded import Recorded

Tokens = tuple[int, ...]


@dataclasses.dataclass(eq=False)
class Life:
    """One request, from `add` until it has left what it leaves.

    Attributes:
        scope: Whom it shares with.
        marked: Positions that its caller marked.
        reuse: Whether it uses and leaves prefixes.
        tokens: All that it was given or has sampled; the driver appends to it.
        bundle: The policy's notes of it.
        length: Tokens that it knew when it last began.
        planned: Tokens computed once every plan is; `None` while it waits.
        history: Tokens computed for certain.
        points: Where snapshots are still wanted.
        ghosts: Positions that are to be remembered without one.
        deepest: Position of the last snapshot that it has left.
        last_plan: Number of the last plan that it may be in.
        turn: Grows when it leaves its seat; what older plans know of it is void.
        is_lost: Whether a step that does not count has rewritten its row.
        is_finished: Whether it leaves all that it knows.
        is_closed: Whether it has.
    """

    scope: Hashable
    marked: list[int]
    reuse: bool
    tokens: list[int]
    bundle: Any = None
    length: int = 0
    planned: int | None = None
    history: int = 0
    points: list[int] = dataclasses.field(default_factory=list)
    ghosts: list[int] = dataclasses.field(default_factory=list)
    deepest: int = 0
    last_plan: int = 0
    turn: int = 0
    is_lost: bool = False
    is_finished: bool = False
    is_closed: bool = False

    def leave_seat(self) -> None:
        self.planned = None
        self.history = self.deepest = 0
        self.points, self.ghosts = [], []
        self.turn += 1


@dataclasses.dataclass
class Part:
    """One entry of a plan.

    Attributes:
        life: The request.
        turn: Its turn.
        seat: Its seat.
        start: Tokens before the entry.
        end: Tokens after it.
        is_first: Whether the request begins with it.
        is_prefill: Whether it leaves something when it is completed.
        points: The points wanted before.
        taken: Those at which a snapshot is taken.
    """

    life: Life
    turn: int
    seat: int
    start: int
    end: int
    is_first: bool
    is_prefill: bool
    points: list[int]
    taken: list[int]

    @property
    def is_alive(self) -> bool:
        return self.life.turn == self.turn


class Record:
    """What was published so far.

    Attributes:
        is_exact: Whether everything in it must still be there.
        exact_hits: Lookups that reused exactly what it says, and something.
        lives: The requests under way, by id.
    """

    def __init__(
        self,
        layout: CacheLayout,
        policy: SnapshotPolicy,
        emission: Emission,
        asked: Recorded,
        *,
        copies: bool,
    ) -> None:
        self.is_exact = True
        self.exact_hits = 0
        self.lives: dict[Hashable, Life] = {}
        self._layout = layout
        self._policy = policy
        self._emission = emission
        self._asked = asked
        self._copies = copies
        self._has_pages = layout.num_page_groups > 0
        self._page = layout.tokens_per_page
        self._known: set[tuple[Hashable, Tokens]] = set()
        self._paged: set[tuple[Hashable, Tokens]] = set()
        self._snapshots: set[tuple[Hashable, Tokens]] = set()
        self._plans: list[tuple[int, list[Part]]] = []
        self._ending: list[Life] = []

    # -- what a lookup should find -----------------------------------------------------

    def check(self, scope: Hashable, prompt: Iterable[int], lookup: Lookup) -> None:
        """Checks what a request that wants to reuse was told."""
        tokens = tuple(prompt)
        found = (lookup.reused_tokens, lookup.matched_tokens)
        wanted = self.find(scope, tokens)
        if self.is_exact:
            assert found[0] == wanted[0]
            self.exact_hits += found[0] > 0
            if not self._layout.has_recurrent:
                # With snapshots, tokens after the last one of a path are forgotten.
                assert found[1] == wanted[1]
        assert found[0] <= wanted[0]
        assert found[1] <= wanted[1]

    def find(self, scope: Hashable, prompt: Tokens) -> tuple[int, int]:
        """Returns how many tokens can be reused, and how many are known."""
        matched = len(prompt) - 1
        while matched and (scope, prompt[:matched]) not in self._known:
            matched -= 1
        for n in range(matched, 0, -1):
            prefix = (scope, prompt[:n])
            if self._layout.has_recurrent and prefix not in self._snapshots:
                continue
            if not self._has_pages:
                return n, matched
            if prefix in self._paged and (n % self._page == 0 or self._copies):
                return n, matched
        return 0, matched

    def _publish(self, life: Life, end: int, *, with_tail: bool) -> None:
        """Writes down tokens and their whole pages, and the begun page if it comes."""
        covered = end if with_tail else end // self._page * self._page
        for n in range(1, end + 1):
            prefix = (life.scope, tuple(life.tokens[:n]))
            self._known.add(prefix)
            if n <= covered:
                self._paged.add(prefix)

    def _publish_snapshot(self, life: Life, position: int) -> None:
        self._snapshots.add((life.scope, tuple(life.tokens[:position])))

    # -- events ------------------------------------------------------------------------

    def planned(
        self,
        plan: StepPlan,
        lookups: dict[Hashable, tuple[list[int], Lookup]],
        emitted: AbstractSet[tuple[int, int]],
        skipped: int,
    ) -> None:
        """A plan was made.

        Args:
            plan: The plan.
            lookups: What each request knew that begins in it, and was told.
            emitted: Seats and positions at which the step writes a snapshot out.
            skipped: Snapshots that were wanted of it, and are not taken.
        """
        parts: list[Part] = []
        for seat, entry in zip(plan.seats.tolist(), plan.entries, strict=True):
            life = self.lives[entry.request_id]
            is_first = life.planned is None
            if is_first:
                self._begin(life, entry.start, *lookups[entry.request_id])
            assert life.planned == entry.start
            end = entry.start + entry.num_tokens
            part = Part(
                life,
                life.turn,
                seat,
                entry.start,
                end,
                is_first,
                entry.start < life.length,
                life.points,
                [],
            )
            life.points = [p for p in life.points if p > end]
            life.planned = end
            life.last_plan = plan.number
            parts.append(part)
        self._choose(parts, emitted, skipped)
        self._plans.append((plan.number, parts))

    def _begin(self, life: Life, start: int, known: list[int], lookup: Lookup) -> None:
        assert start == lookup.reused_tokens
        if life.reuse:
            self.check(life.scope, known, lookup)
        life.length, life.planned, life.history = len(known), start, start
        if life.reuse and self._layout.has_recurrent:
            wanted = wanted_points(
                self._wishes(life, start, lookup.matched_tokens),
                self._emission,
                life.marked,
                life.length,
                start,
            )
            life.points = [point.position for point in wanted.points]
            life.ghosts = [point.position for point in wanted.ghosts]

    def _wishes(self, life: Life, start: int, matched: int) -> list[Wish]:
        """Returns what the policy wanted of a request that begins."""
        told = (life.length, start, matched)
        answers = [
            answer.wishes
            for answer in self._asked.answers_about(life.bundle)
            if answer.now[:3] == told
        ]
        assert answers, f"the policy was not asked about {told}"
        return answers[-1]

    def _choose(
        self, parts: list[Part], emitted: AbstractSet[tuple[int, int]], skipped: int
    ) -> None:
        """Says which of the snapshots wanted are taken.

        Those inside a chunk are seen. Of those at its end only the number is known,
        which is mostly enough: all, or none.
        """
        wanted = {(p.seat, at) for p in parts for at in p.points if at <= p.end}
        at_end = wanted & {(part.seat, part.end) for part in parts}
        assert emitted <= wanted - at_end
        missing = skipped - len(wanted - at_end - emitted)
        assert 0 <= missing <= len(at_end)
        if 0 < missing < len(at_end):
            self.is_exact = False
        taken = emitted | at_end if missing < len(at_end) else emitted
        for part in parts:
            part.taken = [at for at in part.points if (part.seat, at) in taken]

    def completed(self) -> None:
        """The oldest plan was completed."""
        _, parts = self._plans.pop(0)
        for part in parts:
            life = part.life
            if not part.is_alive:
                continue
            life.history = part.end
            if not part.is_prefill or not life.reuse:
                continue
            end = part.end // self._page * self._page if self._has_pages else 0
            for position in (*part.points, *life.ghosts):
                if position <= part.end:
                    end = max(end, position)
            if part.taken:
                life.deepest = part.taken[-1]
            self._publish(life, end, with_tail=False)
            for position in part.taken:
                self._publish_snapshot(life, position)
        self._settle()

    def abandoned(self, in_place: AbstractSet[int] | None) -> None:
        """The newest plan was abandoned.

        Args:
            in_place: Seats whose row its step read and wrote; `None` if it never ran.
        """
        number, parts = self._plans.pop()
        for part in parts:
            life = part.life
            if not part.is_alive:
                continue
            life.last_plan = number - 1
            if part.is_first:
                life.leave_seat()
                continue
            life.planned, life.points = part.start, part.points
            if in_place is not None:
                life.is_lost = self._layout.has_recurrent and part.seat in in_place
                if life not in self._ending:
                    self._ending.append(life)
        self._settle()

    def ended(self, request_id: Hashable, *, is_finished: bool) -> None:
        """A request was finished or cancelled."""
        life = self.lives.pop(request_id)
        life.is_finished = is_finished
        if is_finished and self._is_in_flight(life):
            self._ending.append(life)
        else:
            self._close(life)

    def _is_in_flight(self, life: Life) -> bool:
        if life.planned is None or not self._plans:
            return False
        return life.last_plan >= self._plans[0][0]

    def _settle(self) -> None:
        waiting, self._ending = self._ending, []
        for life in waiting:
            if life.is_closed:
                continue
            if self._is_in_flight(life):
                self._ending.append(life)
            elif life.is_finished:
                self._close(life)
            elif life.is_lost:
                if life.planned is not None:
                    self._leave_begun_page(life)
                    life.leave_seat()
                life.is_lost = False

    def _close(self, life: Life) -> None:
        life.is_closed = True
        if life.planned is not None and life.reuse:
            if life.is_finished:
                self._leave_all(life)
            else:
                self._leave_begun_page(life)
        life.leave_seat()

    def _leave_all(self, life: Life) -> None:
        """Leaves all confirmed tokens that somebody could use, and the row."""
        history = life.history
        if not self._layout.has_recurrent:
            self._publish(life, history, with_tail=True)
        elif (wanted := self._asked.response_of(life.bundle)) is not None:
            assert self._policy.response
            assert not life.is_lost
            # The begun page comes with all that is in it, for whichever snapshot.
            has_begun = wanted or life.deepest > history // self._page * self._page
            self._publish(life, history, with_tail=has_begun and self._has_pages)
            if wanted:
                self._publish_snapshot(life, history)
        elif self._has_pages:
            self._publish(life, history // self._page * self._page, with_tail=False)
            self._leave_begun_page(life)

    def _leave_begun_page(self, life: Life) -> None:
        if self._has_pages and life.reuse:
            self._publish(life, life.deepest, with_tail=True)
