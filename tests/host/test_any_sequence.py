"""Any sequence of calls: no request ever reads what is not its own history."""

import os
import random

import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from jaxcache.host.errors import OutOfPages, OutOfRows, OutOfSeats
from tests.host.caches import KINDS
from tests.host.events import Events
from tests.host.recorded import RECORDED

EXAMPLES = int(os.environ.get("JAXCACHE_EXAMPLES", "20"))
SOAK_RUNS = int(os.environ.get("JAXCACHE_SOAK_RUNS", "12"))

# Every choice that an event makes is drawn one by one, so that failures shrink.
choices = st.randoms(note_method_calls=True, use_true_random=False)


class ManagerMachine(RuleBasedStateMachine):
    """Drives a manager through every kind of event, checking all after each."""

    kind: str
    eviction: str
    events: Events | None = None

    @initialize(rng=choices, is_roomy=st.booleans())
    def start(self, rng: random.Random, *, is_roomy: bool) -> None:
        self.events = Events(self.kind, rng, eviction=self.eviction, is_roomy=is_roomy)

    @rule(rng=choices)
    def add(self, rng: random.Random) -> None:
        assert self.events
        self.events.add(rng)

    @rule(rng=choices)
    def add_twins_and_plan(self, rng: random.Random) -> None:
        assert self.events
        self.events.add_twins(rng)
        self.events.plan(rng)

    @rule(rng=choices)
    def add_and_plan(self, rng: random.Random) -> None:
        assert self.events
        self.events.add(rng)
        self.events.plan(rng)

    @rule(rng=choices)
    def plan(self, rng: random.Random) -> None:
        assert self.events
        self.events.plan(rng)

    @rule(rng=choices)
    def plan_and_complete_late(self, rng: random.Random) -> None:
        assert self.events
        self.events.plan(rng)
        self.events.plan(rng)
        self.events.complete(rng)

    @rule(rng=choices)
    def complete_and_plan(self, rng: random.Random) -> None:
        assert self.events
        self.events.complete(rng)
        self.events.plan(rng)

    @rule(rng=choices)
    def dispatch(self, rng: random.Random) -> None:
        assert self.events
        self.events.dispatch(rng)

    @rule(rng=choices)
    def complete(self, rng: random.Random) -> None:
        assert self.events
        self.events.complete(rng)

    @rule(rng=choices)
    def abandon(self, rng: random.Random) -> None:
        assert self.events
        self.events.abandon(rng)

    @rule(rng=choices)
    def finish(self, rng: random.Random) -> None:
        assert self.events
        self.events.finish(rng)

    @rule(rng=choices)
    def cancel(self, rng: random.Random) -> None:
        assert self.events
        self.events.cancel(rng)

    @invariant()
    def all_counts_are_true(self) -> None:
        if self.events:
            self.events.check()

    def teardown(self) -> None:
        if self.events:
            self.events.end()


# A model without recurrent layers has no snapshots, so it asks no policy.
CASES = [
    (kind, eviction)
    for kind in KINDS
    for eviction in (["learned"] if kind == "attention" else RECORDED)
]


@pytest.mark.parametrize(("kind", "eviction"), CASES)
def test_no_sequence_of_calls_lets_a_request_read_anothers_tokens(
    kind: str, eviction: str
) -> None:
    class Machine(ManagerMachine):
        pass

    Machine.kind, Machine.eviction = kind, eviction
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=50,
            suppress_health_check=list(HealthCheck),
        ),
    )


WEIGHTS = {
    "add": 5,
    "add_twins": 1,
    "plan": 12,
    "dispatch": 1,
    "complete": 9,
    "abandon": 1,
    "finish": 2,
    "cancel": 1,
}


@pytest.mark.parametrize(("kind", "eviction"), CASES)
def test_long_runs_under_pressure_stay_right(kind: str, eviction: str) -> None:
    hits = exact_hits = 0
    refusals = set()
    for seed in range(SOAK_RUNS + SOAK_RUNS // 4):
        rng = random.Random(f"{kind} {seed}")
        events = Events(kind, rng, eviction=eviction, is_roomy=seed >= SOAK_RUNS)
        for name in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=300):
            getattr(events, name)(rng)
            events.check()
        hits += events.manager.stats.hits
        exact_hits += events.record.exact_hits
        refusals |= events.refusals
        events.end()
    assert hits
    assert exact_hits
    # Else the sizes have become too large to bring any pressure.
    layout = events.manager.layout
    groups = range(layout.num_page_groups)
    expected = {(OutOfSeats, None), *((OutOfPages, group) for group in groups)}
    if layout.has_recurrent:
        expected.add((OutOfRows, None))
    assert refusals == expected
