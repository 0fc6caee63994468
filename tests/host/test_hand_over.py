"""A row becomes a snapshot without a copy: the next step reads it, writes another."""

import pytest

from jaxcache.host.plans import StepPlan
from jaxcache.policies.snapshots import Emission
from tests.host.caches import make_lru_manager
from tests.host.driver import Driver
from tests.host.test_must_hit import random_tokens

PROMPT = random_tokens("prompt", 64)


def rows_of(driver: Driver, request_id: str) -> tuple[int, int]:
    """What the device reads and writes for a request."""
    (seat,) = driver.manager.seats_of([request_id])
    read, write = driver.device.row_index[:, seat].tolist()
    return read, write


def test_a_fresh_request_reads_the_null_row_once() -> None:
    driver = Driver(make_lru_manager())
    driver.add("a", PROMPT)
    driver.step([("a", 10)])
    read, write = rows_of(driver, "a")
    assert read == 0
    driver.step([("a", 10)])
    assert rows_of(driver, "a") == (write, write)


def test_the_row_at_the_end_of_a_chunk_becomes_the_snapshot() -> None:
    driver = Driver(make_lru_manager())
    driver.add("a", PROMPT, points=[20])
    driver.step([("a", 20)])
    first = driver.device.row_index[1, driver.manager.seats_of(["a"])[0]]
    driver.step([("a", 20)])
    read, write = rows_of(driver, "a")
    assert read == first != write
    driver.step([("a", 20)])
    assert rows_of(driver, "a") == (write, write)
    stats = driver.manager.stats
    assert (stats.snapshots_handed_over, stats.snapshots_emitted) == (1, 1)
    driver.manager.check()


def test_without_a_fresh_row_a_request_goes_on_in_its_own() -> None:
    driver = Driver(make_lru_manager(num_rows=1, max_seqs=1))
    driver.add("a", PROMPT, points=[20])
    driver.step([("a", 20)])
    driver.step([("a", 44)])
    read, write = rows_of(driver, "a")
    assert read == write
    assert driver.manager.stats.snapshots == {}
    assert driver.manager.stats.snapshots_skipped == {"no row was free or evictable": 3}


def test_a_finished_request_leaves_its_row_as_the_response() -> None:
    driver = Driver(make_lru_manager())
    driver.add("a", PROMPT)
    driver.prefill("a")
    driver.decode("a", 4)
    row = driver.manager.rows_of(["a"])[0]
    driver.finish("a")
    free = driver.manager._core.rows.free_slots()
    assert row not in free
    assert driver.manager.stats.snapshots["response"] == 1
    lookup = driver.add("b", [*PROMPT, *random_tokens("more", 9)])
    assert lookup.reused_tokens == 64


def test_a_snapshot_is_read_in_place_and_never_written() -> None:
    driver = Driver(make_lru_manager())
    driver.serve("a", PROMPT, points=[50])
    snapshots = {
        snapshot.row: snapshot.position
        for root in driver.manager._core.tree.residency.roots.values()
        for node in root.walk()
        for snapshot in node.snapshots
    }
    driver.add("b", [*PROMPT[:50], 51, 51])
    driver.step([("b", 1)])
    read, write = rows_of(driver, "b")
    assert snapshots[read] == 50
    assert write not in snapshots


def overlapped(driver: Driver, work: list[tuple[str, int]]) -> list[StepPlan]:
    return [driver.plan([item]) for item in work]


@pytest.mark.parametrize("ran", [False, True])
def test_a_hand_over_of_a_step_in_flight_survives_an_abandoned_successor(
    ran: bool,
) -> None:
    driver = Driver(make_lru_manager())
    driver.add("a", PROMPT, points=[20])
    first = driver.plan([("a", 20)])
    second = driver.plan([("a", 20)], run=ran)
    driver.manager.abandon(second, ran=ran)
    driver.complete(first)
    driver.manager.check()
    driver.prefill("a")
    assert driver.manager.stats.restarted == 0


def test_a_hand_over_goes_on_from_a_twins_snapshot() -> None:
    driver = Driver(make_lru_manager(emission=Emission.chunk_end()))
    driver.add("a", PROMPT)
    driver.add("b", PROMPT)
    driver.step([("a", 48), ("b", 48)])
    driver.manager.check()
    assert driver.manager.stats.snapshots_skipped == {
        "the tree had one at this position already": 1
    }
    driver.step([("a", 16), ("b", 16)])
    reads = [rows_of(driver, request_id)[0] for request_id in "ab"]
    assert reads[0] == reads[1]
    driver.manager.check()


def test_a_twins_snapshot_is_read_again_when_the_step_that_read_it_is_abandoned() -> (
    None
):
    driver = Driver(make_lru_manager())
    for request_id in "ab":
        driver.add(request_id, PROMPT, points=[20])
    driver.step([("a", 10), ("b", 10)])
    driver.step([("a", 10)])
    # When the row of b arrives, which b has read by then, the tree has that of a.
    arrives = driver.plan([("b", 10)])
    reads = driver.plan([("b", 10)], run=False)
    driver.complete(arrives)
    driver.manager.check()
    driver.manager.abandon(reads)
    driver.manager.check()
    driver.add("c", random_tokens("takes the row that was given back", 30))
    driver.step([("c", 30)])
    driver.prefill("b")


def test_twins_end_up_with_the_same_pages() -> None:
    driver = Driver(make_lru_manager())
    driver.add("a", PROMPT)
    driver.add("b", PROMPT)
    driver.step([("a", 64), ("b", 64)])
    seats = driver.manager.seats_of(["a", "b"])
    driver.step([("a", 1), ("b", 1)])
    table = driver.device.page_table[0, seats, :4]
    assert (table[0] == table[1]).all()
    assert driver.manager.stats.columns_adopted == 4
    driver.manager.check()
