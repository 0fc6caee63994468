"""Where snapshots are wanted, and how chunks are cut for them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, strategies as st

from jaxcache.policies.learned import Learned
from jaxcache.policies.lru import Lru
from jaxcache.policies.policy import (
    BOUNDARY,
    BRANCH,
    GUESSES,
    MARKED,
    RESPONSE,
    Arrival,
    PolicyMaker,
    Wish,
)
from jaxcache.policies.snapshots import (
    Auto,
    Emission,
    Point,
    auto,
    cut_chunk,
    wanted_points,
)
from tests.host.caches import make_buckets, make_lru_manager, make_manager
from tests.host.driver import Driver
from tests.host.test_must_hit import random_tokens


def positions(
    prompt: int,
    reused: int = 0,
    matched: int = 0,
    marked: Sequence[int] = (),
    emission: Emission | None = None,
    policy: Auto | None = None,
) -> list[int]:
    kinds = (policy or auto()).kinds
    lru = Lru(row_bytes=1, page_bytes=1, tokens_per_page=16, kinds=kinds)
    arrival = Arrival(prompt, reused, matched, None)
    wishes = lru.wishes(arrival, arrival, 1)
    wanted = wanted_points(
        wishes,
        emission or Emission.anywhere(),
        marked,
        prompt,
        reused,
    )
    return [point.position for point in wanted.points]


def test_the_last_boundaries_of_a_prompt_are_points() -> None:
    assert positions(100) == [96]
    assert positions(96) == [80, 96]
    assert positions(97) == [96]
    assert positions(15) == []
    assert positions(16) == [16]


def test_the_branch_is_a_point_rounded_down_to_a_page() -> None:
    assert positions(100, reused=0, matched=50) == [48, 96]
    assert positions(100, reused=48, matched=50) == [96]
    assert positions(100, reused=32, matched=99) == [96]
    assert positions(100, reused=96, matched=99) == []


def test_marked_points_are_exact_and_only_those_after_what_is_reused_count() -> None:
    assert positions(100, marked=[7, 99, 100]) == [7, 96, 99, 100]
    assert positions(100, reused=7, matched=7, marked=[7, 99]) == [96, 99]


def test_a_point_that_is_wanted_twice_is_taken_once_and_is_the_callers() -> None:
    wanted = wanted_points([Wish(96, BOUNDARY, True)], Emission(), [96], 100, 0)
    assert wanted == ([Point(96, MARKED)], [])


def test_each_part_of_the_policy_can_be_left_out() -> None:
    assert positions(100, matched=50, policy=auto(boundary=False)) == [48]
    assert positions(100, matched=50, policy=auto(branch=False)) == [96]


@pytest.mark.parametrize("eviction", [Learned, Lru])
@pytest.mark.parametrize(
    ("left_out", "kinds"),
    [
        ("boundary", GUESSES),
        ("branch", (BRANCH,)),
        ("response", (RESPONSE,)),
    ],
)
def test_what_auto_leaves_out_is_not_taken_in_any_form(
    eviction: PolicyMaker, left_out: str, kinds: tuple[str, ...]
) -> None:
    policy = dataclasses.replace(auto(), **{left_out: False})
    taken = take_everywhere(policy, eviction)
    everything = take_everywhere(auto(), eviction)
    assert everything & set(kinds)
    assert taken == everything - set(kinds)


@pytest.mark.parametrize("eviction", [Learned, Lru])
def test_with_everything_left_out_only_marked_points_are_taken(
    eviction: PolicyMaker,
) -> None:
    policy = auto(boundary=False, branch=False, response=False)
    assert take_everywhere(policy, eviction) == {MARKED}


def take_everywhere(policy: Auto, eviction: PolicyMaker) -> set[str]:
    """Returns the kinds of snapshots and ghosts that prompts of all sorts leave."""
    manager = make_manager(policy=policy, eviction=eviction)
    driver = Driver(manager)
    for number in range(3):
        prompt = random_tokens("shared", 1100) + random_tokens(number, 700)
        driver.serve(number, prompt, new_tokens=2, points=[33])
    roots = manager._core.tree.residency.roots.values()
    nodes = [node for root in roots for node in root.walk()]
    return {snapshot.kind for node in nodes for snapshot in node.snapshots}


class WithoutResponses(Lru):
    def wants_response(self, *_: object) -> bool:
        return False


def test_a_point_in_the_begun_page_is_kept_though_the_response_is_not() -> None:
    driver = Driver(make_manager(eviction=WithoutResponses))
    prompt = random_tokens("a", 40)
    driver.serve(1, prompt, new_tokens=3, points=[37])
    assert driver.serve(2, prompt[:37] + random_tokens("b", 9))[0] == 37


def test_points_of_the_policy_are_rounded_down_to_the_grid_of_the_kernels() -> None:
    grid = Emission.on_grid(10)
    assert positions(100, matched=50, emission=grid) == [40, 90]
    assert positions(100, marked=[7], emission=grid) == [7, 90]


def test_a_grid_must_be_a_positive_number() -> None:
    with pytest.raises(ValueError, match="tokens must be an integer >= 1, got 0"):
        Emission.on_grid(0)
    with pytest.raises(ValueError, match="grid must be an integer >= 0, got -1"):
        Emission(-1)


def cut(start: int, budget: int, marked: list[int], emission: Emission) -> int:
    points = [Point(position, MARKED) for position in marked]
    return cut_chunk(emission, points, start, budget, 100, 16)


def test_where_states_can_be_emitted_the_budget_alone_decides() -> None:
    assert cut(0, 37, [20, 64], Emission.anywhere()) == 37
    assert cut(90, 37, [20, 64], Emission.anywhere()) == 10


def test_a_chunk_never_goes_past_a_point_that_cannot_be_emitted() -> None:
    assert cut(0, 100, [20, 64], Emission.chunk_end()) == 20
    assert cut(20, 100, [20, 64], Emission.chunk_end()) == 44
    assert cut(64, 100, [20, 64], Emission.chunk_end()) == 36


def test_a_chunk_that_reaches_no_point_ends_with_a_page() -> None:
    assert cut(0, 63, [64], Emission.chunk_end()) == 48
    assert cut(20, 30, [64], Emission.chunk_end()) == 28


def test_a_budget_that_reaches_no_page_skips_the_step() -> None:
    assert cut(0, 15, [64], Emission.chunk_end()) == 0
    assert cut(20, 11, [64], Emission.chunk_end()) == 0


def test_only_points_off_the_grid_cut_chunks() -> None:
    assert cut(0, 100, [20, 33, 64], Emission.on_grid(10)) == 33
    assert cut(33, 100, [20, 33, 60], Emission.on_grid(10)) == 67


@given(
    marked=st.sets(st.integers(1, 100)).map(sorted),
    budget=st.integers(1, 120),
    grid=st.integers(0, 20),
)
def test_chunks_reach_the_end_and_stop_at_every_point_that_needs_it(
    marked: list[int], budget: int, grid: int
) -> None:
    emission, start, ends = Emission(grid), 0, set()
    while start < 100:
        length = cut(start, budget, marked, emission)
        assert 0 <= length <= budget
        start += length or cut_chunk(
            emission, [Point(p, MARKED) for p in marked], start, budget, 100, 1
        )
        ends.add(start)
    assert ends >= {p for p in marked if not emission.can_emit(p)}


@pytest.mark.parametrize("grid", [0, 1, 10])
@pytest.mark.parametrize("chunk", [9, 50, 4096])
def test_marked_points_are_taken_exactly_however_chunks_are_cut(
    grid: int, chunk: int
) -> None:
    driver = Driver(make_manager(emission=Emission(grid)))
    prompt = random_tokens("prompt", 200)
    driver.serve("first", prompt, points=[37, 100, 101, 160], chunk=chunk)
    for point in (37, 100, 101, 160):
        other = [*prompt[:point], 51, 51]
        assert driver.serve(point, other)[0] == point


def test_a_step_of_one_request_runs_even_if_its_chunk_would_be_skipped() -> None:
    driver = Driver(make_manager(emission=Emission.chunk_end()))
    driver.add("a", random_tokens("prompt", 100))
    driver.add("b", random_tokens("other", 100))
    plan = driver.step([("a", 5), ("b", 16)])
    assert [(e.request_id, e.num_tokens) for e in plan.entries] == [("b", 16)]
    plan = driver.step([("a", 5)])
    assert [(e.request_id, e.num_tokens) for e in plan.entries] == [("a", 5)]


def test_more_points_than_a_step_can_emit_are_skipped_and_counted() -> None:
    driver = Driver(make_lru_manager(buckets=make_buckets(max_snapshots=2)))
    prompt = random_tokens("prompt", 200)
    driver.serve("first", prompt, points=[20, 40, 60])
    stats = driver.manager.stats
    assert stats.snapshots["marked"] == 2
    assert stats.snapshots_skipped == {"the step emits max_snapshots already": 2}
    assert driver.serve("second", [*prompt[:60], 51, 51])[0] == 40


def test_marked_points_get_rows_before_others() -> None:
    driver = Driver(make_lru_manager(num_rows=2, max_seqs=1))
    prompt = random_tokens("prompt", 100)
    driver.add("first", prompt, points=[50])
    driver.prefill("first")
    stats = driver.manager.stats
    assert stats.snapshots == {"marked": 1}
    assert stats.snapshots_skipped == {"no row was free or evictable": 1}


@dataclasses.dataclass(frozen=True)
class EveryTen:
    """A policy of somebody else."""

    response: bool = False

    def points(self, prompt_tokens: int, *others: Any) -> list[Point]:
        del others
        return [Point(p, "ten") for p in range(10, prompt_tokens + 1, 10)]


def test_any_policy_of_this_form_can_be_used() -> None:
    driver = Driver(make_manager(policy=EveryTen()))
    prompt = random_tokens("prompt", 95)
    driver.serve("first", prompt)
    assert driver.manager.stats.snapshots == {"ten": 9}
    assert driver.serve("second", [*prompt[:57], 51])[0] == 50


def test_the_kinds_of_snapshots_are_counted() -> None:
    driver = Driver(make_lru_manager())
    prompt = random_tokens("prompt", 100)
    driver.serve("first", prompt, 3)
    driver.serve("second", [*prompt[:50], *random_tokens("tail", 50)], 3)
    assert driver.manager.stats.snapshots == {BOUNDARY: 2, BRANCH: 1, "response": 2}
