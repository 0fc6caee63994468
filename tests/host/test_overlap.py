"""A plan may be made before the outcome of the last one is known."""

import numpy as np
import pytest

from jaxcache.host.errors import StalePlan, UnknownRequest
from jaxcache.inputs.packing import NEXT_TOKEN
from tests.host.caches import make_lru_manager
from tests.host.driver import Driver
from tests.host.test_must_hit import random_tokens

PROMPT = random_tokens("prompt", 50)


def make_driver() -> Driver:
    return Driver(make_lru_manager())


def test_a_token_not_known_yet_is_the_one_that_the_seat_sampled_last() -> None:
    driver = make_driver()
    driver.add("a", PROMPT)
    first = driver.plan([("a", 50)])
    second = driver.plan([("a", 1)])
    tokens = second.inputs.packed[second.inputs.bucket.sections["token_ids"]]
    assert tokens[0] == NEXT_TOKEN
    driver.complete(first)
    third = driver.plan([("a", 1)])
    driver.complete(second)
    driver.complete(third)
    fourth = driver.plan([("a", 1)])
    tokens = fourth.inputs.packed[fourth.inputs.bucket.sections["token_ids"]]
    assert tokens[0] == driver.manager.tokens("a")[-1]


def test_overlapped_steps_sample_what_single_steps_do() -> None:
    alone, overlapped = make_driver(), make_driver()
    _, wanted = alone.serve("a", PROMPT, 12)
    overlapped.add("a", PROMPT)
    plans = [overlapped.plan([("a", 50)])]
    for _ in range(11):
        plans.append(overlapped.plan([("a", 1)]))
        overlapped.complete(plans.pop(0))
        overlapped.manager.check()
    overlapped.complete(plans.pop())
    assert overlapped.manager.tokens("a")[50:].tolist() == wanted


def test_a_finish_after_the_end_of_sequence_leaves_only_what_is_certain() -> None:
    driver = make_driver()
    driver.add("a", PROMPT)
    first = driver.plan([("a", 50)])
    second = driver.plan([("a", 1)])
    driver.complete(first)
    # Say that was the end of the sequence: the step in flight runs one token too many.
    answer = driver.manager.tokens("a")[50:].tolist()
    driver.finish("a")
    assert driver.add("early", [*PROMPT, *answer, 7]).reused_tokens == 48
    driver.complete(second)
    driver.manager.check()
    # Its row has absorbed the last token that is known, so all of that can be reused.
    lookup = driver.add("next turn", [*PROMPT, *answer, 7, 8, 9])
    assert lookup.reused_tokens == lookup.matched_tokens == 51
    driver.prefill("next turn")


@pytest.mark.parametrize("ran", [False, True])
def test_a_finish_goes_through_when_the_step_in_flight_is_abandoned(ran: bool) -> None:
    driver = make_driver()
    driver.add("a", PROMPT)
    driver.prefill("a")
    plan = driver.plan([("a", 1)], run=ran)
    answer = driver.manager.tokens("a")[50:].tolist()
    driver.finish("a")
    driver.manager.abandon(plan, ran=ran)
    driver.manager.check()
    lookup = driver.add("next turn", [*PROMPT, *answer, 7])
    assert lookup.reused_tokens == (48 if ran else 50)
    driver.prefill("next turn")


def test_a_cancelled_request_gives_everything_back_while_a_step_is_in_flight() -> None:
    driver = make_driver()
    driver.add("a", PROMPT)
    driver.add("b", random_tokens("other", 50))
    plan = driver.plan([("a", 50), ("b", 50)])
    driver.cancel("a")
    driver.manager.check()
    assert driver.manager.stats.running == 1
    # Its seat may be taken at once; the outcome of the old step is not for the new one.
    driver.add("c", random_tokens("third", 40))
    later = driver.plan([("c", 40)])
    driver.complete(plan)
    assert driver.manager.tokens("c").tolist() == random_tokens("third", 40)
    driver.complete(later)
    driver.manager.check()
    assert driver.add("d", PROMPT).reused_tokens == 0


def test_an_ended_id_maps_to_nothing_at_once_and_may_be_used_again() -> None:
    driver = make_driver()
    driver.add("a", PROMPT)
    plan = driver.plan([("a", 50)])
    driver.finish("a")
    for call in (driver.manager.history, driver.manager.finish, driver.manager.cancel):
        with pytest.raises(
            UnknownRequest, match="'a' maps to nothing: it was finished"
        ):
            call("a")
    driver.add("a", random_tokens("another", 30))
    driver.complete(plan)
    assert driver.manager.history("a") == 0
    driver.prefill("a")
    driver.manager.check()


def test_at_most_two_plans_are_in_flight() -> None:
    driver = make_driver()
    driver.add("a", PROMPT)
    driver.plan([("a", 10)])
    driver.plan([("a", 10)])
    with pytest.raises(StalePlan, match=r"plans \[1, 2\] are in flight"):
        driver.plan([("a", 10)])


def test_an_abandoned_plan_was_never_made() -> None:
    driver = make_driver()
    driver.add("a", PROMPT)
    before = driver.manager.stats
    for _ in range(3):
        plan = driver.plan([("a", 50)], run=False)
        driver.manager.abandon(plan)
        driver.manager.check()
    after = driver.manager.stats
    assert (after.pages[0].free, after.rows.free) == (
        before.pages[0].free,
        before.rows.free,
    )
    assert after.running == 0
    driver.prefill("a")


def test_the_points_of_an_abandoned_plan_are_taken_by_the_next() -> None:
    driver = make_driver()
    driver.add("a", PROMPT, points=[25])
    driver.step([("a", 20)])
    driver.manager.abandon(driver.plan([("a", 30)], run=False))
    driver.prefill("a")
    assert driver.manager.stats.snapshots == {"marked": 1, "boundary": 1}


def test_updates_of_an_abandoned_plan_are_sent_again() -> None:
    driver = make_driver()
    driver.add("a", PROMPT)
    driver.step([("a", 40)])
    before = driver.plan([("a", 10)], run=False)
    assert before.updates.shape[1]
    driver.manager.abandon(before)
    again = driver.plan([("a", 10)])
    assert {tuple(u) for u in before.updates[:3].T.tolist()} <= {
        tuple(u) for u in again.updates[:3].T.tolist()
    }
    driver.complete(again)


def test_a_request_whose_row_an_abandoned_step_changed_starts_again() -> None:
    driver = make_driver()
    _, wanted = driver.serve("alone", PROMPT, 6, reuse=False)
    driver.add("a", PROMPT)
    driver.prefill("a")
    driver.decode("a", 2)
    plan = driver.plan([("a", 1)])
    driver.manager.abandon(plan, ran=True)
    driver.manager.check()
    assert driver.manager.stats.restarted == 1
    assert driver.manager.remaining("a") == 53
    driver.prefill("a")
    driver.decode("a", 2)
    assert driver.manager.tokens("a")[50:].tolist() == wanted


def test_a_request_whose_abandoned_step_ran_waits_for_the_plan_before() -> None:
    driver = make_driver()
    driver.add("a", PROMPT)
    first = driver.plan([("a", 50)])
    second = driver.plan([("a", 1)])
    driver.manager.abandon(second, ran=True)
    with pytest.raises(ValueError, match="'a' yet: its step that was abandoned ran"):
        driver.plan([("a", 1)])
    driver.complete(first)
    driver.prefill("a")
    driver.manager.check()


def test_plans_end_in_their_order_and_only_once() -> None:
    driver = make_driver()
    driver.add("a", PROMPT)
    first = driver.plan([("a", 10)])
    second = driver.plan([("a", 10)])
    zeros = np.zeros(1, np.int32)
    with pytest.raises(StalePlan, match="must wait for plan 1"):
        driver.manager.complete(second, zeros)
    with pytest.raises(StalePlan, match="must not be abandoned before plan 2"):
        driver.manager.abandon(first)
    driver.complete(first)
    with pytest.raises(StalePlan, match="was completed already"):
        driver.manager.abandon(first)
    other = make_driver()
    with pytest.raises(StalePlan, match="belongs to another manager"):
        other.manager.complete(second, zeros)
