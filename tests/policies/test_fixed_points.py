"""Points by rule, with the vectors of the behaviour they are to have."""

import pytest

from jaxcache import (
    FixedPoints,
    Learned,
    branch,
    from_end,
    from_start,
    periodic,
    response,
)
from tests.host.caches import make_manager
from tests.host.driver import Driver
from tests.host.test_must_hit import random_tokens

EXAMPLE = periodic(64) | from_start(128, 999) | from_end(0, 22, 999)


def positions(policy: FixedPoints, length: int, matched: int = 0) -> list[int]:
    return sorted({p.position for p in policy.points(length, 0, matched, 16)})


@pytest.mark.parametrize(
    ("length", "expected"),
    [(150, [64, 128, 150]), (128, [64, 106, 128]), (32, [10, 32])],
)
def test_points_are_those_of_every_rule_once(length: int, expected: list[int]) -> None:
    assert positions(EXAMPLE, length) == expected


def test_the_branch_is_rounded_down_to_a_page() -> None:
    assert positions(branch(), 150, matched=77) == [64]
    assert positions(branch(), 150, matched=0) == []


def test_rules_add_up_in_any_order() -> None:
    rules = [periodic(64), from_start(3), from_end(5), branch(), response()]
    forward, backward = FixedPoints(), FixedPoints()
    for rule in rules:
        forward, backward = forward | rule, rule | backward
    assert forward == backward
    assert forward == FixedPoints((64,), (3,), (5,), True, True)


@pytest.mark.parametrize("length", [32, 128, 150])
def test_snapshots_are_taken_at_exactly_the_points(length: int) -> None:
    driver = Driver(make_manager(policy=EXAMPLE, eviction=Learned))
    tokens = random_tokens("a", length)
    driver.serve("a", tokens, 9, chunk=37)
    taken = positions(EXAMPLE, length)
    for position in taken:
        probe = [*tokens[:position], 51, 52]
        # Inside a page only where the page came into the tree.
        reused = driver.add("probe", probe).reused_tokens
        assert reused == position
        driver.cancel("probe")
    assert driver.manager.stats.rows.used == len(taken)
    driver.manager.check()


def test_without_response_among_the_rules_none_is_kept() -> None:
    for policy, kept in ((periodic(64), 0), (periodic(64) | response(), 1)):
        driver = Driver(make_manager(policy=policy, eviction=Learned))
        driver.serve("a", random_tokens("a", 40), 5)
        assert driver.manager.stats.snapshots.get("response", 0) == kept


@pytest.mark.parametrize(
    "policy", [periodic(64), from_start(64), from_end(64, 99), FixedPoints()]
)
def test_a_policy_that_can_never_hit_is_refused(policy: FixedPoints) -> None:
    with pytest.raises(ValueError, match="policy can never hit: it"):
        make_manager(policy=policy, max_tokens=64)


def test_points_must_be_positive_numbers() -> None:
    with pytest.raises(ValueError, match="interval must be an integer >= 1, got 0"):
        periodic(0)
    with pytest.raises(ValueError, match="offsets must be an integer >= 1, got 0"):
        from_start(0)
    with pytest.raises(ValueError, match="offsets must be an integer >= 0, got -1"):
        from_end(-1)
