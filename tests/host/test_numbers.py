"""Statistics, explanations and warnings."""

import dataclasses
import logging

import numpy as np
import pytest

from jaxcache.host.stats import SlotUse, Stats
from tests.host.caches import make_lru_manager
from tests.host.driver import Driver
from tests.host.test_must_hit import random_tokens

PROMPT = random_tokens("prompt", 100)


def test_what_happens_is_counted() -> None:
    driver = Driver(make_lru_manager())
    driver.serve("a", PROMPT, 5)
    driver.serve("b", PROMPT, 5)
    driver.serve("c", PROMPT, 1, reuse=False)
    stats = driver.manager.stats
    assert (stats.requests, stats.lookups, stats.hits) == (3, 2, 1)
    assert (stats.aligned_hits, stats.partial_hits) == (1, 0)
    assert (stats.prompt_tokens, stats.reused_tokens) == (300, 96)
    assert stats.matched_tokens == 99
    assert stats.computed_tokens == 104 + 8 + 100
    assert (stats.plans, stats.completed, stats.abandoned) == (11, 11, 0)
    assert stats.finished == 3
    assert stats.snapshots == {"boundary": 1, "response": 1}
    assert stats.snapshots_handed_over == 1
    assert stats.snapshots_emitted == 1
    assert stats.bytes_uploaded > 0
    assert stats.plan_ns > 0
    assert stats.host_us_per_step > 0
    assert stats.reuse_ratio == 96 / 300


def test_a_hit_inside_a_page_copies_it_and_is_counted_apart() -> None:
    driver = Driver(make_lru_manager("two groups"))
    driver.serve("a", PROMPT, points=[50])
    driver.serve("b", [*PROMPT[:50], 51, 52])
    stats = driver.manager.stats
    assert (stats.aligned_hits, stats.partial_hits) == (0, 1)
    assert stats.pages_copied == 2
    layout = driver.manager.layout
    bytes_per_page = [layout.bytes_per_page(group) for group in range(2)]
    assert stats.bytes_copied_for_pages == sum(bytes_per_page)


def test_a_request_that_starts_again_is_counted_once() -> None:
    driver = Driver(make_lru_manager())
    manager = driver.manager
    driver.add("a", PROMPT)
    driver.prefill("a")
    before = manager.stats
    for times in (1, 2):
        manager.abandon(driver.plan([("a", 1)]), ran=True)
        assert manager.stats.restarted == times
        driver.prefill("a")
    after = manager.stats
    for name in ("requests", "lookups", "hits", "prompt_tokens", "reused_tokens"):
        assert getattr(after, name) == getattr(before, name)
    assert (after.requests, after.prompt_tokens) == (1, 100)
    assert after.repeats_missed == 0
    driver.serve("b", PROMPT)
    assert manager.stats.requests == 2


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_request_cancelled_as_it_starts_again_is_counted_once(
    *, in_flight: bool
) -> None:
    driver = Driver(make_lru_manager())
    manager = driver.manager
    driver.add("a", PROMPT)
    driver.prefill("a")
    manager.abandon(driver.plan([("a", 1)]), ran=True)
    plan = driver.plan([("a", 100)]) if in_flight else None
    driver.cancel("a")
    if plan is not None:
        driver.complete(plan)
    assert manager.stats.requests == 1
    driver.serve("a", PROMPT)
    assert (manager.stats.requests, manager.stats.restarted) == (2, 1)


def test_gauges_say_how_things_stand() -> None:
    driver = Driver(
        make_lru_manager(num_pages=300, num_rows=20, max_seqs=4, max_tokens=256)
    )
    driver.serve("a", PROMPT, 5)
    driver.add("b", PROMPT)
    driver.add("c", PROMPT)
    driver.step([("b", 2)])
    stats = driver.manager.stats
    assert (stats.running, stats.waiting) == (1, 1)
    # The tree has 7 pages, a begun one among them; b and c hold six, b has one.
    assert stats.pages == (SlotUse(300, 292, 1, 8),)
    assert stats.pages[0].used == 8
    # Two snapshots, of which c holds the one at 96, and the row of b.
    assert stats.rows == SlotUse(20, 17, 1, 3)


def test_the_difference_of_two_moments_is_what_happened_between() -> None:
    driver = Driver(make_lru_manager())
    driver.serve("a", PROMPT)
    before = driver.manager.stats
    driver.serve("b", PROMPT)
    delta = driver.manager.stats.delta(before)
    assert (delta.requests, delta.hits, delta.reused_tokens) == (1, 1, 96)
    assert delta.snapshots == {}
    assert delta.rows == driver.manager.stats.rows


def test_counting_goes_on_from_where_it_was() -> None:
    driver = Driver(make_lru_manager())
    driver.serve("a", PROMPT)
    before = driver.manager.stats
    other = Driver(make_lru_manager())
    other.manager.restore_counts(before)
    other.serve("b", PROMPT)
    after = other.manager.stats
    assert after.requests == 2
    assert after.snapshots == {"boundary": 2, "response": 2}


def test_statistics_cannot_be_written() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Stats().hits = 3  # type: ignore[misc]


def explain(driver: Driver, prompt: list[int]) -> str:
    return driver.add("asks", prompt).why


def test_an_unknown_prompt_explains_itself() -> None:
    why = explain(Driver(make_lru_manager()), PROMPT)
    assert why == "the tree knows 0 of the 99 tokens before the last one"


def test_a_complete_hit_explains_itself() -> None:
    driver = Driver(make_lru_manager())
    driver.serve("a", PROMPT, points=[99])
    why = explain(driver, PROMPT)
    assert why == "all 99 tokens before the last one are reused"


def test_a_missing_snapshot_explains_itself() -> None:
    driver = Driver(make_lru_manager())
    driver.serve("a", PROMPT)
    why = explain(driver, [*PROMPT[:50], 51])
    assert why == "of the 50 tokens that the tree knows no snapshot was kept"


def test_a_snapshot_short_of_the_match_explains_itself() -> None:
    driver = Driver(make_lru_manager())
    driver.serve("a", PROMPT, points=[20])
    why = explain(driver, [*PROMPT[:50], 51])
    assert why == "the last snapshot of the 50 tokens that the tree knows is at 20"


def test_a_begun_page_that_is_not_there_explains_itself() -> None:
    driver = Driver(make_lru_manager())
    driver.add("a", PROMPT, points=[20])
    driver.step([("a", 25)])
    why = explain(driver, [*PROMPT[:25], 51])
    assert "attention group 0 has the pages of 16 of the 20 tokens" in why


def test_reuse_that_was_not_wanted_explains_itself() -> None:
    driver = Driver(make_lru_manager())
    driver.add("a", PROMPT, reuse=False)
    assert driver.manager.explain("a").why == "reuse was not wanted"


def test_a_lookup_says_what_each_group_could_use() -> None:
    driver = Driver(make_lru_manager("two groups"))
    driver.serve("a", PROMPT, points=[20])
    lookup = driver.add("b", [*PROMPT[:50], 51])
    assert lookup.usable_tokens == (50, 50)
    assert lookup.snapshot_position == 20
    attention = Driver(make_lru_manager("attention"))
    assert attention.add("b", PROMPT).snapshot_position is None


def test_a_prompt_served_before_that_reuses_nothing_is_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver(make_lru_manager(num_rows=1, max_seqs=1))
    with caplog.at_level(logging.WARNING):
        for i in range(4):
            driver.serve(i, PROMPT, 3)
    assert driver.manager.stats.repeats_missed == 3
    (record,) = caplog.records
    assert "a prompt of 100 tokens that was served before reuses none" in record.message
    assert "no snapshot was kept" in record.message


def test_a_prompt_that_is_reused_or_new_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Driver(make_lru_manager())
    with caplog.at_level(logging.WARNING):
        driver.serve("a", PROMPT)
        driver.serve("b", PROMPT)
        driver.serve("c", PROMPT, scope="other")
        driver.serve("short", PROMPT[:5])
        driver.serve("short again", PROMPT[:5])
    assert driver.manager.stats.repeats_missed == 0
    assert not caplog.records


def test_questions_have_no_effect_and_keep_the_callers_order() -> None:
    driver = Driver(make_lru_manager())
    for name in "abc":
        driver.add(name, [*PROMPT, ord(name)])
    assert driver.manager.remaining("a") == 101
    driver.step([("a", 10), ("b", 20), ("c", 101)])
    manager = driver.manager
    assert [manager.remaining(name) for name in "abc"] == [91, 81, 0]
    assert [manager.history(name) for name in "abc"] == [10, 20, 101]
    seats = dict(zip("abc", manager.seats_of("abc").tolist(), strict=True))
    rows = dict(zip("abc", manager.rows_of("abc").tolist(), strict=True))
    assert manager.seats_of("cab").tolist() == [seats[name] for name in "cab"]
    assert manager.rows_of("cab").tolist() == [rows[name] for name in "cab"]
    assert len(set(seats.values())) == len(set(rows.values())) == 3
    assert "a" in manager
    assert "d" not in manager
    assert len(manager) == 3


def test_a_model_without_rows_answers_with_the_null_row() -> None:
    driver = Driver(make_lru_manager("attention"))
    driver.add("a", PROMPT)
    driver.step([("a", 10)])
    assert driver.manager.rows_of(["a"]).tolist() == [0]


def test_a_plan_says_who_runs_what_and_where_its_samples_are() -> None:
    driver = Driver(make_lru_manager())
    driver.add("b", PROMPT)
    driver.prefill("b")
    driver.add("a", random_tokens("other", 100))
    driver.add("c", PROMPT)
    plan = driver.plan([("a", 10), ("b", 1), ("c", 200)])
    assert [tuple(entry) for entry in plan.entries] == [
        ("b", 1, 100, True),
        ("a", 10, 0, False),
        ("c", 4, 96, True),
    ]
    assert plan.request_ids == ["b", "a", "c"]
    assert plan.num_tokens == 15
    # The decode part of the step is padded to its bucket.
    assert plan.entry_rows.tolist() == [0, 64, 65]
    assert np.array_equal(plan.samples, [True, False, True])
    assert "1 decode and 2 prefill entries, 15 tokens" in repr(plan)
