"""Conversations: only the newest turns keep the state at their end."""

from typing import Any

import pytest

from jaxcache import Learned, Lru, PolicyMaker
from tests.host.caches import make_manager
from tests.host.driver import Driver
from tests.host.test_must_hit import random_tokens


def talk(driver: Driver, turns: int, name: str = "talk", **options: Any) -> list[int]:
    """Serves the turns of a conversation; returns all its tokens."""
    tokens = random_tokens(name, 40)
    for turn in range(turns):
        _, answer = driver.serve((name, turn), tokens, 9, **options)
        tokens = [*tokens, *answer, *random_tokens(f"{name} {turn}", 21)]
    return tokens


def responses(driver: Driver) -> list[int]:
    """Positions of the resident response snapshots."""
    return sorted(
        snapshot.position
        for root in driver.manager._core.tree.residency.roots.values()
        for node in root.walk()
        for snapshot in node.snapshots
        if snapshot.is_resident and snapshot.kind == "response"
    )


@pytest.mark.parametrize("eviction", [Learned, Lru])
@pytest.mark.parametrize("max_turns", [1, 2, 3])
def test_the_newest_turns_of_a_conversation_keep_their_state(
    eviction: PolicyMaker, max_turns: int
) -> None:
    driver = Driver(make_manager(eviction=eviction, max_turns=max_turns))
    talk(driver, 5, conversation="a")
    # Turn n ends after 40 + 30 n tokens of the prompt and 8 of the answer.
    ends = [40 + 30 * turn + 8 for turn in range(5)]
    assert responses(driver) == ends[-max_turns:]
    driver.manager.check()


def test_every_turn_reuses_the_one_before() -> None:
    driver = Driver(make_manager(max_turns=1))
    tokens = talk(driver, 5, conversation="a")
    assert driver.add("next", tokens).reused_tokens == 40 + 30 * 4 + 8


def test_without_a_conversation_every_turn_stays() -> None:
    driver = Driver(make_manager(max_turns=1))
    talk(driver, 4)
    assert len(responses(driver)) == 4


def test_conversations_and_scopes_are_told_apart() -> None:
    driver = Driver(make_manager(max_turns=1))
    talk(driver, 2, "a", conversation="same", scope="one")
    talk(driver, 2, "b", conversation="same", scope="two")
    talk(driver, 2, "c", conversation="other", scope="two")
    assert len(responses(driver)) == 3


def test_a_turn_that_a_request_holds_is_left_for_later() -> None:
    driver = Driver(make_manager(max_turns=1))
    tokens = talk(driver, 1, conversation="a")
    assert driver.add("waits", tokens).reused_tokens == 48
    # The conversation goes on from elsewhere while somebody waits to read the old turn.
    driver.serve("edit", [*tokens[:20], *random_tokens("edit", 30)], conversation="a")
    assert len(responses(driver)) == 2
    driver.cancel("waits")
    driver.serve("again", [*tokens[:20], *random_tokens("x", 30)], conversation="a")
    assert len(responses(driver)) == 1
    driver.manager.check()


def test_a_conversation_must_be_hashable_and_turns_a_number() -> None:
    driver = Driver(make_manager())
    with pytest.raises(ValueError, match="conversation must be hashable, got"):
        driver.add("a", [1, 2], conversation=[])
    with pytest.raises(ValueError, match="max_turns must be an integer >= 1, got 0"):
        make_manager(max_turns=0)
