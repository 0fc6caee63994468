"""Room: what is refused, what is evicted for it, and that a refusal changes nothing."""

from collections.abc import Callable

import pytest

from jaxcache.host.errors import (
    OutOfPages,
    OutOfRows,
    OutOfSeats,
    Refused,
    UnknownRequest,
)
from jaxcache.host.manager import CacheManager
from jaxcache.inputs.buckets import Buckets
from jaxcache.policies.lru import Lru
from jaxcache.prefixes.nodes import Snapshot
from jaxcache.prefixes.order import Geometry
from tests.host.caches import make_buckets, make_lru_manager, make_manager
from tests.host.driver import Driver
from tests.host.snapshot_of_core import describe
from tests.host.test_must_hit import random_tokens


def tight(pool: str) -> CacheManager:
    """A manager of two groups in which one pool is short, and the others are not."""
    num_pages = [16 if pool == f"pages of group {g}" else 200 for g in range(2)]
    return make_manager(
        "two groups",
        num_pages=num_pages,
        num_rows=3 if pool == "rows" else 40,
        max_seqs={"rows": 3, "seats": 2}.get(pool, 8),
        max_tokens=16 * 16,
    )


def prompt(name: object, length: int = 100) -> list[int]:
    return random_tokens(name, length)


ERRORS: dict[str, type[Refused]] = {
    "pages of group 0": OutOfPages,
    "pages of group 1": OutOfPages,
    "rows": OutOfRows,
    "seats": OutOfSeats,
}


@pytest.mark.parametrize("pool", ERRORS)
def test_a_plan_that_any_one_pool_refuses_changes_nothing(pool: str) -> None:
    driver = Driver(tight(pool))
    manager = driver.manager
    # Something in the tree, evictable and held, someone running, someone waiting.
    driver.serve("old", prompt("old", 90))
    assert driver.add("holds", prompt("old", 90)).reused_tokens == 80
    driver.add("runs", prompt("runs", 60))
    driver.step([("runs", 33)])
    ids = [f"new {i}" for i in range(2 if pool == "rows" else 4)]
    for request_id in ids:
        driver.add(request_id, [*prompt("old", 90)[:85], *prompt(request_id, 40)])
    work = [("runs", 20), *((i, 100) for i in ids)]
    before = describe(manager._core)
    assert not manager.fits(work)
    with pytest.raises(ERRORS[pool], match=f"the plan needs .* {pool}") as refusal:
        manager.plan(work)
    assert refusal.value.needed > refusal.value.available
    assert refusal.value.request_id in ids
    assert describe(manager._core) == before
    assert manager.stats.refused == 1
    # Less at once finds room.
    driver.step(work[:2])
    manager.check()


def test_a_refusal_names_the_first_request_without_room() -> None:
    driver = Driver(make_manager(num_pages=16, max_tokens=256))
    driver.add("a", prompt("a", 128))
    driver.add("b", prompt("b", 100))
    driver.add("c", prompt("c", 100))
    with pytest.raises(OutOfPages) as refusal:
        driver.plan([("a", 128), ("b", 100), ("c", 100)])
    error = refusal.value
    assert (error.request_id, error.needed, error.available) == ("c", 22, 16)
    assert error.group_id == 0


def test_a_decode_step_that_needs_a_page_can_be_refused() -> None:
    driver = Driver(make_manager(num_pages=16, max_tokens=256))
    driver.add("a", prompt("a", 128))
    driver.add("b", prompt("b", 128))
    driver.step([("a", 128), ("b", 128)])
    before = describe(driver.manager._core)
    with pytest.raises(OutOfPages) as refusal:
        driver.plan([("a", 1), ("b", 1)])
    assert refusal.value.request_id == "a"
    assert describe(driver.manager._core) == before
    driver.cancel("b")
    driver.step([("a", 1)])


def test_capacity_is_exactly_what_was_asked_for() -> None:
    driver = Driver(make_manager(num_pages=16, num_rows=4, max_seqs=4, max_tokens=64))
    for i in range(4):
        driver.add(i, prompt(i, 64), reuse=False)
    driver.step([(i, 64) for i in range(4)])
    stats = driver.manager.stats
    assert (stats.pages[0].free, stats.rows.free, stats.running) == (0, 0, 4)
    assert (stats.pages[0].peak, stats.rows.peak) == (16, 4)


def test_a_request_of_max_tokens_runs_in_the_smallest_pool_that_is_legal() -> None:
    for kind in ("hybrid", "attention", "recurrent"):
        driver = Driver(
            make_manager(kind, num_pages=8, num_rows=1, max_seqs=1, max_tokens=128)
        )
        for turn in range(3):
            driver.serve(turn, prompt("long", 61), 67, chunk=13)
            driver.serve((turn, "full"), prompt("long", 128))
            driver.manager.check()


def test_who_waits_cannot_keep_the_only_one_that_could_run_from_running() -> None:
    driver = Driver(
        make_lru_manager(num_pages=8, num_rows=1, max_seqs=1, max_tokens=128)
    )
    _, answer = driver.serve("first", prompt("first", 100), 3)
    # Both hold the only row, as the snapshot they would start from.
    waiting = [*prompt("first", 100), *answer, 1, 2, 3]
    assert driver.add("a", waiting).reused_tokens == 102
    assert driver.add("b", waiting).reused_tokens == 102
    driver.prefill("b")
    assert driver.manager.explain("b").reused_tokens == 0
    driver.manager.check()
    driver.finish("b")
    driver.prefill("a")
    driver.manager.check()


def test_nothing_held_is_ever_evicted() -> None:
    driver = Driver(make_manager(num_pages=24, num_rows=6, max_seqs=3, max_tokens=256))
    driver.serve("kept", prompt("kept", 100))
    lookup = driver.add("waits", prompt("kept", 100))
    assert lookup.reused_tokens == 96
    for i in range(6):
        driver.serve(i, prompt(i, 200))
    driver.prefill("waits")
    assert driver.manager.explain("waits").reused_tokens == 96


def reuse_of(driver: Driver, tokens: list[int]) -> int:
    """What a prompt would reuse, without using it."""
    reused = driver.add("probe", [*tokens, 51]).reused_tokens
    driver.cancel("probe")
    return reused


def test_the_least_recently_used_snapshot_gives_up_its_row_first() -> None:
    driver = Driver(make_lru_manager(num_rows=5, max_seqs=1))
    for name in ("a", "b"):
        driver.serve(name, prompt(name, 50), 3)
    # Restored now, so that its two snapshots are not the oldest any more: one is used.
    driver.serve("again", prompt("a", 50), 3)
    driver.serve("c", prompt("c", 50), 3)
    assert reuse_of(driver, prompt("a", 50)) == 48
    assert reuse_of(driver, prompt("c", 50)) == 48


def test_only_the_snapshot_that_is_restored_is_credited() -> None:
    driver = Driver(make_lru_manager(num_rows=6, max_seqs=1))
    tokens = prompt("a", 100)
    driver.serve("a", tokens, points=[20, 40, 60])
    positions = lru_positions(driver)
    driver.serve("b", [*tokens[:45], 51])
    assert lru_positions(driver)[-2:] == [40, 45 + 1]
    assert lru_positions(driver)[0] == positions[0] == 20


def lru_positions(driver: Driver) -> list[int]:
    """Positions of the snapshots, the next victim first."""
    eviction = driver.manager._core.eviction
    assert isinstance(eviction, Lru)
    return [snapshot.position for snapshot in eviction._residents]


def test_a_lookup_alone_credits_nothing() -> None:
    driver = Driver(make_lru_manager())
    driver.serve("a", prompt("a"))
    driver.serve("b", prompt("b"))
    before = lru_positions(driver)
    reuse_of(driver, prompt("a"))
    assert lru_positions(driver) == before


def test_eviction_of_pages_goes_down_to_the_next_snapshot() -> None:
    driver = Driver(make_manager(num_pages=20, max_tokens=256))
    tokens = prompt("a", 160)
    driver.serve("a", tokens, points=[32, 96])
    # Ten pages are free, six more are needed: those after 144, 96 and 32.
    driver.serve("b", prompt("b", 250))
    assert reuse_of(driver, tokens) == 32
    for i in range(3):
        driver.serve(i, prompt(i, 250))
    assert reuse_of(driver, tokens) == 0
    driver.manager.check()


def test_eviction_of_attention_pages_takes_no_more_than_is_needed() -> None:
    driver = Driver(make_manager("attention", num_pages=20, max_tokens=256))
    driver.serve("a", prompt("a", 160))
    driver.serve("b", prompt("b", 176))
    assert driver.manager.stats.columns_evicted == 1
    assert reuse_of(driver, prompt("a", 160)) == 144


def test_a_row_that_is_needed_is_taken_from_the_tree() -> None:
    driver = Driver(make_manager(num_rows=3, max_seqs=3))
    driver.serve("a", prompt("a"))
    for i in range(3):
        driver.add(i, prompt(i))
    driver.step([(i, 100) for i in range(3)])
    assert driver.manager.stats.snapshots_evicted == 2
    driver.manager.check()


def test_prefixes_that_end_inside_a_page_start_one_after_the_other() -> None:
    """Where a step can copy fewer pages than it has requests that need a copy."""
    driver = Driver(make_manager(buckets=buckets_with_copies(2)))
    tokens = prompt("a", 50)
    driver.serve("a", tokens, 3, points=[45])
    for i in range(4):
        driver.add(i, [*tokens[:45], 51, i])
    plan = driver.step([(i, 2) for i in range(4)])
    assert [entry.request_id for entry in plan.entries] == [0, 1]
    plan = driver.step([(i, 2) for i in (2, 3)])
    assert [entry.start for entry in plan.entries] == [45, 45]


def test_without_room_for_copies_prefixes_end_with_a_page() -> None:
    driver = Driver(make_manager(buckets=buckets_with_copies(0)))
    tokens = prompt("a", 50)
    driver.serve("a", tokens, 3, points=[32, 45])
    assert driver.serve("b", [*tokens[:45], 51, 52])[0] == 32
    assert driver.manager.stats.pages_copied == 0


def buckets_with_copies(count: int) -> Buckets:
    return make_buckets(max_copies=count)


def finish(driver: Driver) -> None:
    driver.prefill("a")
    driver.finish("a")


def cancel(driver: Driver) -> None:
    driver.step([("a", 30)])
    driver.cancel("a")


def drop_while_planned(driver: Driver) -> None:
    driver.manager.abandon(driver.plan([("a", 30)], run=False))
    driver.cancel("a")


def finish_before_it_ran(driver: Driver) -> None:
    driver.finish("a")


def fail_to_be_admitted(driver: Driver) -> None:
    driver.add("b", prompt("b"))
    with pytest.raises(OutOfSeats):
        driver.plan([("a", 30), ("b", 30)])
    driver.cancel("a")
    driver.cancel("b")


def cancel_twice(driver: Driver) -> None:
    driver.cancel("a")
    with pytest.raises(UnknownRequest, match="it was cancelled"):
        driver.cancel("a")


@pytest.mark.parametrize(
    "end",
    [
        finish,
        cancel,
        drop_while_planned,
        finish_before_it_ran,
        fail_to_be_admitted,
        cancel_twice,
    ],
)
def test_after_every_end_of_a_request_the_counts_return(
    end: Callable[[Driver], None],
) -> None:
    driver = Driver(make_manager(num_pages=16, num_rows=4, max_seqs=1, max_tokens=256))
    manager = driver.manager
    driver.add("a", prompt("a"), points=[20])
    end(driver)
    assert len(manager) == 0
    stats = manager.stats
    assert (stats.running, stats.waiting) == (0, 0)
    for use in (*stats.pages, stats.rows):
        assert use.free + use.evictable == use.total
    manager.check()


class CountingLru(Lru):
    """Counts how often it is asked for a victim."""

    asked = 0

    def victim(self, geometry: Geometry, needs_pages: bool) -> Snapshot | None:
        self.asked += 1
        return super().victim(geometry, needs_pages)


def test_evicting_asks_for_what_it_frees_whatever_the_size_of_the_tree() -> None:
    driver = Driver(
        make_manager(num_pages=300, num_rows=60, max_tokens=256, eviction=CountingLru)
    )
    for i in range(60):
        driver.serve(i, prompt(i, 64))
    core = driver.manager._core
    eviction = core.eviction
    assert isinstance(eviction, CountingLru)
    eviction.asked = 0
    core.tree.evictor.make_room(core.pages.free_columns + 1, 0)
    assert eviction.asked == 1
    driver.manager.check()
