"""Who owns which slots, and who may read and write them."""

import pytest

from jaxcache.host.errors import OutOfPages
from tests.host.caches import KINDS, make_manager
from tests.host.driver import Driver
from tests.host.test_must_hit import random_tokens

PROMPT = random_tokens("prompt", 100)


def free_slots(driver: Driver) -> list[int]:
    stats = driver.manager.stats
    return [use.free for use in (*stats.pages, stats.rows)]


@pytest.mark.parametrize("kind", KINDS)
def test_adding_a_request_allocates_nothing_and_its_first_plan_does(kind: str) -> None:
    driver = Driver(make_manager(kind))
    driver.serve("served", PROMPT)
    before = free_slots(driver)
    assert driver.add("a", [*PROMPT, 51, 52, 53]).reused_tokens
    driver.add("b", random_tokens("other", 100))
    assert free_slots(driver) == before
    driver.plan([("a", 200), ("b", 200)])
    stats = driver.manager.stats
    assert all(n < b for n, b in zip(free_slots(driver), before, strict=True) if b)
    assert stats.running == 2


def test_the_call_that_was_refused_may_succeed_later() -> None:
    driver = Driver(make_manager(num_pages=8, max_seqs=2, max_tokens=128))
    driver.add("runs", PROMPT)
    driver.add("waits", random_tokens("other", 100))
    driver.step([("runs", 100)])
    work = [("waits", 100)]
    for _ in range(2):
        with pytest.raises(OutOfPages):
            driver.plan(work)
    driver.cancel("runs")
    driver.step(work)
    driver.manager.check()


def test_a_history_never_goes_back_when_plans_are_refused_or_abandoned() -> None:
    driver = Driver(make_manager(num_pages=8, max_seqs=2, max_tokens=128))
    manager = driver.manager
    driver.add("a", PROMPT)
    driver.add("b", random_tokens("other", 100))
    for wanted in (40, 80, 100, 101):
        before = manager.history("a")
        manager.abandon(driver.plan([("a", 40)], run=False))
        assert manager.history("a") == before
        with pytest.raises(OutOfPages):
            driver.plan([("a", 40), ("b", 100)])
        assert manager.history("a") == before
        driver.step([("a", 40)])
        assert manager.history("a") == wanted > before


def test_every_running_request_owns_exactly_one_row() -> None:
    driver = Driver(make_manager())
    driver.serve("served", PROMPT)
    ids = list(range(8))
    before = driver.manager.stats.rows.free
    for i in ids:
        driver.add(i, [*PROMPT, 51, *random_tokens(i, 5)], reuse=i % 2 == 0)
    driver.step([(i, 1) for i in ids])
    assert len({*driver.manager.rows_of(ids).tolist()}) == len(ids)
    assert driver.manager.stats.rows.free == before - len(ids)
    driver.manager.check()


def test_a_page_that_another_is_about_to_commit_under_stays_in_the_tree() -> None:
    driver = Driver(make_manager(num_pages=16, num_rows=2, max_seqs=2, max_tokens=128))
    driver.serve("served", PROMPT)
    driver.add("a", [*PROMPT[:96], *random_tokens("tail", 20)])
    driver.step([("a", 4)])
    assert driver.manager.history("a") == 100
    for i in range(6):
        driver.serve(i, random_tokens(i, 100))
    assert driver.manager.stats.columns_evicted
    assert driver.manager.stats.snapshots_evicted
    driver.prefill("a")
    driver.finish("a")
    driver.manager.check()


@pytest.mark.parametrize("kind", KINDS)
def test_a_lookup_uses_at_most_all_tokens_but_the_last(kind: str) -> None:
    driver = Driver(make_manager(kind))
    driver.serve("served", PROMPT, 5, points=[95, 96])
    for length in (100, 97, 96):
        lookup = driver.add(length, PROMPT[:length])
        assert lookup.matched_tokens <= length - 1
        assert lookup.reused_tokens == lookup.matched_tokens or length == 100
        driver.prefill(length)
    assert driver.manager.explain(97).reused_tokens == 96
    assert driver.manager.explain(96).reused_tokens == 95


def test_each_reader_of_a_begun_page_gets_a_copy_of_its_own() -> None:
    driver = Driver(make_manager("two groups"))
    driver.serve("served", PROMPT, points=[50])
    for i in range(3):
        assert driver.add(i, [*PROMPT[:50], 51 + i, 7]).reused_tokens == 50
    driver.step([(i, 2) for i in range(3)])
    seats = driver.manager.seats_of(range(3))
    for group in range(2):
        pages = driver.device.page_table[group, seats, 50 // 16].tolist()
        assert len({*pages}) == 3
    # The page that was shared is as it was.
    assert driver.serve("again", [*PROMPT[:50], 60, 7])[0] == 50
    assert driver.manager.stats.pages_copied == 2 * 4


def test_twins_of_one_step_do_not_read_what_the_other_has_not_written() -> None:
    driver = Driver(make_manager("two groups"))
    driver.add("a", PROMPT)
    driver.add("b", PROMPT)
    plan = driver.step([("a", 64), ("b", 64)])
    assert [entry.start for entry in plan.entries] == [0, 0]
    assert driver.manager.stats.reused_tokens == 0
    driver.prefill("a")
    driver.prefill("b")
    assert driver.manager.tokens("a").tolist() == driver.manager.tokens("b").tolist()
    driver.manager.check()
