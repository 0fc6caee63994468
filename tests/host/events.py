"""Everything that can happen to a manager, each event checked against oracles."""

import random
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import pytest

from jaxcache.host.errors import Refused, StalePlan
from jaxcache.host.plans import StepPlan
from jaxcache.policies.snapshots import Emission, auto
from tests.host.caches import make_buckets, make_manager
from tests.host.device_model import EMPTY, absorb, sample
from tests.host.driver import Driver
from tests.host.oracle import longest_reusable
from tests.host.record import Life, Record
from tests.host.recorded import RECORDED, Recorded
from tests.host.snapshot_of_core import describe

PAGE = 4
MAX_TOKENS = 32
VOCAB = 2
EMISSIONS = (Emission.anywhere(), Emission.on_grid(3), Emission.chunk_end())


class Events:
    """A manager, a device that remembers, and what may happen to them.

    Every event takes a source of randomness, does something, and checks what came of
    it.

    Attributes:
        refusals: Every kind of refusal that came, with the attention group if it has
            one.
    """

    def __init__(
        self,
        kind: str,
        rng: random.Random,
        *,
        eviction: str = "learned",
        is_roomy: bool = False,
    ) -> None:
        max_seqs = rng.randint(1, 5)
        pages = [rng.randint(8, 20), rng.randint(8, 20)]
        num_rows = rng.choice([max_seqs, rng.randint(max_seqs, 3 * max_seqs)])
        emission = rng.choice(EMISSIONS)
        policy = auto(
            boundary=rng.random() < 0.8,
            branch=rng.random() < 0.8,
            response=rng.random() < 0.8,
        )
        max_snapshots, max_copies = rng.choice([2, 8]), rng.choice([0, 2, 8, 8])
        if is_roomy:
            pages, num_rows, max_snapshots = [2000, 2000], 1000, 64
        self.is_roomy = is_roomy
        self.manager = make_manager(
            kind,
            tokens_per_page=PAGE,
            num_pages=pages if kind == "two groups" else pages[0],
            num_rows=num_rows,
            max_seqs=max_seqs,
            max_tokens=MAX_TOKENS,
            emission=emission,
            policy=policy,
            eviction=RECORDED[eviction],
            buckets=make_buckets(
                max_snapshots=max_snapshots if emission.grid else 0,
                max_copies=max_copies,
            ),
        )
        self.core = self.manager._core
        self.driver = Driver(self.manager, vocab=VOCAB)
        asked = self.core.eviction
        assert isinstance(asked, Recorded)
        self.asked: Recorded = asked
        self.record = Record(
            self.manager.layout, policy, emission, self.asked, copies=self.core.copies
        )
        self.number = 0
        self.seen: list[list[int]] = [[]]
        self.to_run: StepPlan | None = None
        self.refusals: set[tuple[type[Refused], int | None]] = set()

    @property
    def ids(self) -> list[Hashable]:
        """Requests under way."""
        return list(self.core.requests)

    # -- requests come and go ----------------------------------------------------------

    def add(self, rng: random.Random) -> None:
        if len(self.manager) > 2 * self.core.size.max_seqs:
            return
        like = rng.choice(self.seen[-12:])
        cut = rng.choice([len(like), rng.randint(0, len(like))])
        tail = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 12))]
        prompt = (like[:cut] + tail)[: MAX_TOKENS - rng.choice([0, 1, 8])] or [0]
        scope = rng.choice([None, None, None, "other"])
        reuse = rng.random() < 0.9
        points: list[int] = []
        if reuse and rng.random() < 0.3:
            points = sorted({rng.randint(1, len(prompt)) for _ in range(2)})
        self._add(prompt, scope, points, reuse)

    def add_twins(self, rng: random.Random) -> None:
        """Two or three of one prompt, most often a new one."""
        if len(self.manager) > 2 * self.core.size.max_seqs:
            return
        like = rng.choice([[], self.seen[-1]])
        tail = [rng.randrange(VOCAB) for _ in range(rng.randint(5, 12))]
        for _ in range(rng.randint(2, 3)):
            self._add((like + tail)[:MAX_TOKENS], None, [], True)

    def _add(
        self, prompt: list[int], scope: Hashable, points: list[int], reuse: bool
    ) -> None:
        wanted = longest_reusable(
            self.core.tree, scope, prompt, self.core.layout, self.core.copies
        )
        self.number += 1
        lookup = self.driver.add(
            self.number,
            prompt,
            scope=scope,
            points=points,
            reuse=reuse,
            # In roomy caches nothing may be evicted, older turns included.
            conversation=None if self.is_roomy else (None, "a", "b")[self.number % 3],
        )
        found = (lookup.reused_tokens, lookup.matched_tokens)
        assert found == (wanted if reuse else (0, 0))
        if reuse:
            self.record.check(scope, prompt, lookup)
        tokens = self.driver.truths[self.number].tokens
        bundle = self.core.requests[self.number].bundle
        self.record.lives[self.number] = Life(scope, points, reuse, tokens, bundle)
        assert lookup.why
        self.seen.append(prompt)

    def finish(self, rng: random.Random) -> None:
        self._end(rng, self.manager.finish)

    def cancel(self, rng: random.Random) -> None:
        self._end(rng, self.manager.cancel)

    def _end(self, rng: random.Random, end: Callable[[Hashable], Any]) -> None:
        if not self.ids:
            return
        request_id = rng.choice(self.ids)
        self._check_tokens(request_id)
        self.seen.append(self.manager.tokens(request_id).tolist()[: MAX_TOKENS - 1])
        end(request_id)
        self.record.ended(request_id, is_finished=end == self.manager.finish)
        assert request_id not in self.manager
        with pytest.raises(ValueError, match="maps to nothing: it was"):
            self.manager.history(request_id)

    def _check_tokens(self, request_id: Hashable) -> None:
        """The tokens are those that the request would have had alone."""
        truth = self.driver.truths[request_id]
        digest = EMPTY
        for position, token in enumerate(self.manager.tokens(request_id).tolist()):
            if position >= truth.prompt_length:
                assert token == sample(digest, VOCAB)
            else:
                assert token == truth.tokens[position]
            digest = absorb(digest, token, truth.scope)

    # -- steps -------------------------------------------------------------------------

    def plan(self, rng: random.Random) -> None:
        self._run()
        before = describe(self.core)
        if len(self.core.in_flight) == 2:
            with pytest.raises(StalePlan, match="complete the older one first"):
                self.manager.plan([("any", 1)])
            return
        work = self._work(rng)
        if not work:
            return
        fits = self.manager.fits(work)
        assert describe(self.core) == before
        if not fits:
            with pytest.raises(Refused) as refusal:
                self.manager.plan(work)
            assert refusal.value.needed > refusal.value.available
            self.refusals.add(
                (type(refusal.value), getattr(refusal.value, "group_id", None))
            )
            assert not self._is_alone(work)
            assert describe(self.core) == before
            return
        was_idle = not self.core.seats.num_taken and not self.core.in_flight
        known = {i: self.manager.tokens(i).tolist() for i, _ in work}
        self.asked.answers.clear()
        skipped = self.manager.stats.snapshots_skipped
        self.to_run = self.driver.plan(work, run=False)
        self._write_down(self.to_run, known, sum(skipped.values()))
        self._check_entries(self.to_run, dict(work), was_idle)

    def _write_down(
        self, plan: StepPlan, known: dict[Hashable, list[int]], skipped: int
    ) -> None:
        stats = self.manager.stats
        if stats.snapshots_evicted or stats.columns_evicted:
            self.record.is_exact = False
        lookups = {
            request_id: (known[request_id], self.manager.explain(request_id))
            for request_id in plan.request_ids
        }
        self.record.planned(
            plan,
            lookups,
            self.driver.device.emissions(plan.inputs).keys(),
            sum(stats.snapshots_skipped.values()) - skipped,
        )

    def _work(self, rng: random.Random) -> list[tuple[Hashable, int]]:
        ids = self.ids
        if rng.random() < 0.7:
            # Mostly those who run, and as many of the others as there are seats for.
            ids.sort(key=lambda i: self.core.requests[i].seat < 0)
            chosen = ids[: rng.randint(1, self.core.size.max_seqs)]
        else:
            chosen = rng.sample(ids, min(len(ids), rng.choice([1, 2, 3, 4])))
        work = []
        for request_id in chosen:
            request = self.core.requests[request_id]
            if request.is_halted:
                with pytest.raises(ValueError, match="abandoned ran"):
                    self.manager.plan([(request_id, 1)])
            elif request.is_decoding and self._is_full(request.seat):
                with pytest.raises(ValueError, match="finish it"):
                    self.manager.plan([(request_id, 1)])
            else:
                work.append((request_id, rng.choice([1, rng.randint(1, 9), 40])))
        return work

    def _is_full(self, seat: int) -> bool:
        return int(self.core.seats.planned[seat]) >= MAX_TOKENS

    def _is_alone(self, work: list[tuple[Hashable, int]]) -> bool:
        """Whether one request is to run, and nobody else does."""
        seated = sum(self.core.requests[i].seat >= 0 for i, _ in work)
        others = self.core.seats.num_taken - seated
        return len(work) == 1 and not others and not self.core.in_flight

    def _check_entries(
        self, plan: StepPlan, work: dict[Hashable, int], was_idle: bool
    ) -> None:
        assert plan.entries
        decoding = [entry.start >= self._prompt(entry) for entry in plan.entries]
        assert decoding == sorted(decoding, reverse=True)
        for entry in plan.entries:
            budget, prompt = work[entry.request_id], self._prompt(entry)
            assert 1 <= entry.num_tokens <= budget
            if entry.start >= prompt:
                assert (entry.num_tokens, entry.samples) == (1, True)
                continue
            assert entry.samples == (entry.start + entry.num_tokens == prompt)
            # Alone, a request may have to begin anew and stays within what it planned.
            may_begin_anew = was_idle and len(plan.entries) == 1
            if self.core.emission.grid == 1 and not may_begin_anew:
                assert entry.num_tokens == min(budget, prompt - entry.start)

    def _prompt(self, entry: Any) -> int:
        return self.core.requests[entry.request_id].length

    def _run(self) -> None:
        if self.to_run is not None:
            self.driver.run(self.to_run)
            self.to_run = None

    def dispatch(self, rng: random.Random) -> None:
        del rng
        self._run()

    def complete(self, rng: random.Random) -> None:
        del rng
        plans = self.manager.plans_in_flight
        if not plans:
            return
        if plans[0] is self.to_run:
            self._run()
        zeros = np.zeros(len(plans[-1].seats), np.int32)
        if len(plans) == 2:
            with pytest.raises(StalePlan, match="must wait for plan"):
                self.manager.complete(plans[1], zeros)
        self.driver.complete(plans[0])
        self.record.completed()
        with pytest.raises(StalePlan, match="was completed already"):
            self.manager.complete(plans[0], zeros)

    def abandon(self, rng: random.Random) -> None:
        del rng
        plans = self.manager.plans_in_flight
        if not plans:
            return
        if len(plans) == 2:
            with pytest.raises(StalePlan, match="must not be abandoned before plan"):
                self.manager.abandon(plans[0])
        ran = self.to_run is None
        self.manager.abandon(plans[-1], ran=ran)
        self.record.abandoned(self.driver.in_place[plans[-1]] if ran else None)
        self.to_run = None
        with pytest.raises(StalePlan, match="was abandoned already"):
            self.manager.abandon(plans[-1])

    # -- what must hold ----------------------------------------------------------------

    def check(self) -> None:
        """All counts are true, and the device holds what the tree says."""
        self.manager.check()
        for scope, root in self.core.tree.residency.roots.items():
            for node in root.walk():
                self.driver.device.check_node(node, scope)

    def end(self) -> None:
        """Ends everything; then nothing is owned but by the tree, and all can go."""
        self._run()
        while self.manager.plans_in_flight:
            self.manager.abandon(self.manager.plans_in_flight[-1], ran=True)
        for request_id in self.ids:
            self.manager.cancel(request_id)
        self.check()
        stats = self.manager.stats
        for use in (*stats.pages, stats.rows):
            assert use.free + use.evictable == use.total
        self.core.tree.evictor.make_room(
            min(self.core.size.num_pages, default=0), stats.rows.total
        )
        self.check()
