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

EXAMPLES = int(os.environ.get("JAXCACHE_EXAMPLES", "20"))
SOAK_RUNS = int(os.environ.get("JAXCACHE_SOAK_RUNS", "12"))

seeds = st.integers(0, 2**32).map(random.Random)


class ManagerMachine(RuleBasedStateMachine):
    """Drives a manager through every kind of event, checking all after each."""

    kind: str
    events: Events | None = None

    @initialize(seed=seeds)
    def start(self, seed: random.Random) -> None:
        self.events = Events(self.kind, seed)

    @rule(seed=seeds)
    def add(self, seed: random.Random) -> None:
        assert self.events
        self.events.add(seed)

    @rule(seed=seeds)
    def add_and_plan(self, seed: random.Random) -> None:
        assert self.events
        self.events.add(seed)
        self.events.plan(seed)

    @rule(seed=seeds)
    def plan(self, seed: random.Random) -> None:
        assert self.events
        self.events.plan(seed)

    @rule(seed=seeds)
    def complete_and_plan(self, seed: random.Random) -> None:
        assert self.events
        self.events.complete(seed)
        self.events.plan(seed)

    @rule(seed=seeds)
    def dispatch(self, seed: random.Random) -> None:
        assert self.events
        self.events.dispatch(seed)

    @rule(seed=seeds)
    def complete(self, seed: random.Random) -> None:
        assert self.events
        self.events.complete(seed)

    @rule(seed=seeds)
    def abandon(self, seed: random.Random) -> None:
        assert self.events
        self.events.abandon(seed)

    @rule(seed=seeds)
    def finish_or_cancel(self, seed: random.Random) -> None:
        assert self.events
        seed.choice([self.events.finish, self.events.cancel])(seed)

    @invariant()
    def all_counts_are_true(self) -> None:
        if self.events:
            self.events.check()

    def teardown(self) -> None:
        if self.events:
            self.events.end()


@pytest.mark.parametrize("kind", KINDS)
def test_no_sequence_of_calls_lets_a_request_read_anothers_tokens(kind: str) -> None:
    class Machine(ManagerMachine):
        pass

    Machine.kind = kind
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
    "plan": 12,
    "dispatch": 1,
    "complete": 9,
    "abandon": 1,
    "finish": 2,
    "cancel": 1,
}


@pytest.mark.parametrize("kind", KINDS)
def test_long_runs_under_pressure_stay_right(kind: str) -> None:
    hits = 0
    refusals = set()
    for seed in range(SOAK_RUNS):
        rng = random.Random(f"{kind} {seed}")
        events = Events(kind, rng)
        for name in rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=300):
            getattr(events, name)(rng)
            events.check()
        hits += events.manager.stats.hits
        refusals |= events.refusals
        events.end()
    assert hits
    # Else the sizes have become too large to bring any pressure.
    layout = events.manager.layout
    groups = range(layout.num_page_groups)
    expected = {(OutOfSeats, None), *((OutOfPages, group) for group in groups)}
    if layout.has_recurrent:
        expected.add((OutOfRows, None))
    assert refusals == expected
