"""Bad input: each refusal names the argument, what was needed and what came."""

from typing import Any

import numpy as np
import pytest

from jaxcache.host.errors import StalePlan, UnknownRequest
from jaxcache.host.manager import CacheManager
from jaxcache.layouts import CacheSize
from jaxcache.policies.fixed_points import response
from jaxcache.policies.learned import Learned
from jaxcache.policies.lru import Lru
from jaxcache.policies.snapshots import (
    Auto,
    Emission,
    Point,
    SnapshotPolicy,
    auto,
)
from tests.host.caches import make_buckets, make_layout, make_manager
from tests.host.driver import Driver
from tests.host.snapshot_of_core import describe
from tests.host.test_must_hit import random_tokens

PROMPT = np.array(random_tokens("prompt", 50), np.int32)


# -- making a manager ------------------------------------------------------------------


def make_size(**changes: Any) -> CacheSize:
    fields = {
        "num_pages": (100,),
        "num_rows": 8,
        "max_seqs": 4,
        "max_tokens": 256,
        "tokens_per_page": 16,
    }
    return CacheSize(**{**fields, **changes})


def make(
    layout: Any = None, size: Any = None, buckets: Any = None, **options: Any
) -> None:
    CacheManager(
        layout or make_layout(),
        size or make_size(),
        buckets or make_buckets(),
        **options,
    )


def test_a_layout_and_a_size_are_needed() -> None:
    with pytest.raises(ValueError, match="must be a CacheLayout and a CacheSize, got"):
        make(layout="qwen")


def test_a_size_of_other_pages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tokens_per_page must be 16, .*got 32"):
        make(size=make_size(tokens_per_page=32))


def test_a_size_of_other_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="each of the 1 attention groups, got 2"):
        make(size=make_size(num_pages=(100, 100)))


def test_too_few_rows_are_refused_with_the_smallest_number_that_works() -> None:
    with pytest.raises(ValueError, match="num_rows must be at least max_seqs = 4"):
        make(size=make_size(num_rows=3))


def test_too_few_pages_are_refused_with_the_smallest_number_that_works() -> None:
    with pytest.raises(ValueError, match="num_pages of group 0 must be at least 16"):
        make(size=make_size(num_pages=(15,)))


def test_too_few_pages_of_a_window_group_are_refused() -> None:
    layout = make_layout("two groups")
    with pytest.raises(ValueError, match="num_pages of group 1 must be at least 16"):
        make(layout, make_size(num_pages=(16, 15)))


def test_buckets_are_needed() -> None:
    with pytest.raises(ValueError, match="buckets must be a Buckets, got 64"):
        make(buckets=64)


def test_a_policy_needs_points() -> None:
    with pytest.raises(
        ValueError, match="policy must have a method points, got 'auto'"
    ):
        make(policy="auto")


class WithoutResponse:
    points = Auto().points


@pytest.mark.parametrize("policy", [WithoutResponse(), Auto, Auto(response=None)])  # type: ignore[arg-type]
def test_a_policy_needs_a_response(policy: Any) -> None:
    with pytest.raises(ValueError, match="policy must be an object whose response is"):
        make(policy=policy)


@pytest.mark.parametrize("option", ["policy", "emission", "eviction"])
@pytest.mark.parametrize("value", [0, "", [], {}])
def test_what_is_false_is_no_default(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{option} must "):
        make(**{option: value})


class HalfAPolicy:
    def __init__(self, **sizes: Any) -> None:
        self.victim = Lru(**sizes).victim


@pytest.mark.parametrize("eviction", [HalfAPolicy, "lru"])
def test_an_eviction_needs_every_method(eviction: Any) -> None:
    with pytest.raises(ValueError, match=r"eviction must (be Learned|make an object)"):
        make(eviction=eviction)


def test_an_emission_is_needed() -> None:
    with pytest.raises(ValueError, match="emission must be an Emission, got 64"):
        make(emission=64)


def test_emitting_into_no_slots_is_refused_and_ending_chunks_is_not() -> None:
    buckets = make_buckets(max_snapshots=0)
    with pytest.raises(ValueError, match="max_snapshots must be at least 2 where"):
        make(buckets=buckets)
    make(buckets=buckets, emission=Emission.chunk_end())
    make(make_layout("attention"), make_size(num_rows=0), buckets)


# -- adding ----------------------------------------------------------------------------


def refuse_add(match: str, prompt: Any = PROMPT, **options: Any) -> None:
    manager = make_manager(max_tokens=64)
    before = describe(manager._core)
    with pytest.raises(ValueError, match=match):
        manager.add("a", prompt, **options)
    assert describe(manager._core) == before
    assert len(manager) == 0


def test_an_empty_prompt_is_refused() -> None:
    refuse_add(r"prompt of request 'a' must have shape \(n,\), .*got \(0,\)", [])


def test_a_prompt_of_two_dimensions_is_refused() -> None:
    refuse_add(r"must have shape \(n,\), n at least 1, got \(1, 2\)", [[1, 2]])


def test_a_prompt_of_no_integers_is_refused() -> None:
    refuse_add("prompt of request 'a' must hold integers, got float64", [1.0])
    refuse_add("must hold integers, got bool", [True])


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.int8])
def test_negative_token_ids_are_refused(dtype: type) -> None:
    refuse_add("must hold token ids >= 0, got -3", np.array([1, -3, 2], dtype))


def test_token_ids_past_int32_are_refused() -> None:
    refuse_add("must hold int32 token ids, got 2147483648", [1, 1 << 31])
    refuse_add("must hold int32 token ids, got", np.array([1 << 63], np.uint64))


def test_a_prompt_that_can_never_fit_is_refused_at_once() -> None:
    refuse_add("at most max_tokens = 64 tokens, got 65: it can never fit", [1] * 65)


@pytest.mark.parametrize(
    "points", [[0], [51], [20, 10], [10, 10], [-1, 5], np.array([60])]
)
def test_points_outside_the_prompt_or_out_of_order_are_refused(points: Any) -> None:
    match = "points of request 'a' must be ascending positions from 1 to the 50"
    refuse_add(match, points=points)


def test_points_that_are_no_integers_are_refused() -> None:
    refuse_add("points of request 'a' must be integers", points=[1.5])


@pytest.mark.parametrize("points", [None, 3, (i for i in [5]), [None], ["a"]])
def test_points_that_are_no_sequence_are_refused(points: Any) -> None:
    refuse_add("points of request 'a' must be integers in a sequence", points=points)


def test_a_ragged_prompt_is_refused() -> None:
    refuse_add("prompt of request 'a' must be an array of shape", [[1], [1, 2]])


def test_a_prompt_of_nothing_is_refused() -> None:
    refuse_add("prompt of request 'a' must have shape", None)


def test_a_scope_that_cannot_be_looked_up_is_refused() -> None:
    refuse_add(r"scope must be hashable, got \['tenant'\]", scope=["tenant"])


def test_an_id_that_cannot_be_looked_up_is_refused() -> None:
    manager = make_manager()
    asks: list[Any] = [manager.finish, manager.cancel, manager.explain]
    for ask in (*asks, lambda i: manager.add(i, PROMPT)):
        with pytest.raises(ValueError, match=r"request_id must be hashable, got \["):
            ask([1])


def test_points_without_reuse_are_refused() -> None:
    refuse_add("points of request 'a' must be empty without", points=[5], reuse=False)


def test_an_id_under_way_is_refused() -> None:
    manager = make_manager()
    manager.add("a", PROMPT)
    with pytest.raises(ValueError, match="request_id 'a' is under way already"):
        manager.add("a", PROMPT)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16, None])
def test_prompts_of_any_integers_are_taken(dtype: type | None) -> None:
    manager = make_manager()
    manager.add("a", PROMPT.tolist() if dtype is None else PROMPT.astype(dtype))
    assert manager.tokens("a").tolist() == PROMPT.tolist()


def test_a_prompt_is_copied() -> None:
    manager = make_manager()
    prompt = PROMPT.copy()
    manager.add("a", prompt[::2])
    prompt[:] = 0
    assert manager.tokens("a").tolist() == PROMPT[::2].tolist()


# -- planning --------------------------------------------------------------------------


def refuse_plan(match: str, work: Any, **options: Any) -> None:
    driver = Driver(make_manager(**options))
    driver.add("a", PROMPT)
    driver.add("b", PROMPT)
    driver.prefill("b")
    before = describe(driver.manager._core)
    with pytest.raises(ValueError, match=match):
        driver.manager.plan(work)
    assert describe(driver.manager._core) == before


def test_a_plan_of_nothing_is_refused() -> None:
    refuse_plan("work must name at least one request, got none", [])


def test_a_plan_of_an_unknown_request_is_refused() -> None:
    refuse_plan("request_id 'c' was never added", [("a", 1), ("c", 1)])


def test_a_plan_that_names_a_request_twice_is_refused() -> None:
    refuse_plan("work must name each request once, got 'a' twice", [("a", 1)] * 2)
    refuse_plan("each request once, got 'b' twice", [("b", 1), ("a", 1), ("b", 1)])


@pytest.mark.parametrize("count", [0, -1, 1.5, None, True])
def test_a_plan_of_no_number_of_tokens_is_refused(count: Any) -> None:
    refuse_plan("work must give request 'a' at least 1 token, got", [("a", count)])


@pytest.mark.parametrize("work", [None, 3])
def test_a_plan_of_no_sequence_is_refused(work: Any) -> None:
    refuse_plan("work must be a sequence of pairs", work)


@pytest.mark.parametrize("item", [None, 3, "a", ("a",), ("a", 1, 2), []])
def test_a_plan_of_no_pairs_is_refused(item: Any) -> None:
    refuse_plan(r"work must hold pairs \(request_id, num_tokens\), got", [item])


def test_a_plan_of_an_id_that_cannot_be_looked_up_is_refused() -> None:
    refuse_plan("request_id must be hashable", [(["a"], 1)])


def test_a_number_of_tokens_may_be_any_integer_on_every_path() -> None:
    driver = Driver(make_manager())
    driver.add("a", PROMPT)
    driver.step([("a", np.int64(50))])
    for one in (1, np.int64(1), np.uint8(1), 1):
        driver.step([("a", one)])


@pytest.mark.parametrize("count", [True, 1.0, np.True_, np.float32(1), np.ones(1, int)])
def test_what_only_equals_one_is_refused_also_the_second_time(count: Any) -> None:
    driver = Driver(make_manager())
    driver.add("a", PROMPT)
    driver.prefill("a")
    for _ in range(2):
        driver.step([("a", 1)])
        with pytest.raises(ValueError, match="must give request 'a' at least 1 token"):
            driver.manager.plan([("a", count)])


def test_pairs_may_be_lists_and_arrays() -> None:
    driver = Driver(make_manager())
    driver.add(0, PROMPT)
    driver.prefill(0)
    for item in ([0, 1], np.array([0, 1]), [0, 1], (0, 1), np.array([0, 1])):
        driver.manager.abandon(driver.manager.plan([item]))  # type: ignore[list-item]


def test_a_manager_without_requests_is_true() -> None:
    assert make_manager()


def test_a_plan_past_the_largest_bucket_is_refused() -> None:
    buckets = make_buckets(max_prefill_seqs=1)
    manager = make_manager(buckets=buckets)
    manager.add("a", PROMPT)
    manager.add("b", PROMPT)
    before = describe(manager._core)
    with pytest.raises(ValueError, match="at most max_prefill_seqs = 1, got 2"):
        manager.plan([("a", 5), ("b", 5)])
    assert describe(manager._core) == before


def test_a_request_of_max_tokens_cannot_go_on() -> None:
    driver = Driver(make_manager(max_tokens=50))
    driver.add("a", PROMPT)
    driver.prefill("a")
    with pytest.raises(ValueError, match="'a' has max_tokens = 50 tokens; finish it"):
        driver.plan([("a", 1)])
    driver.finish("a")


class Policy:
    """Gives what it is told to."""

    response = True

    def __init__(self, given: Any) -> None:
        self.given = given

    def points(self, *about: int) -> Any:
        del about
        return self.given


@pytest.mark.parametrize(
    "given", [None, 3, [16], [("boundary", 16)], [(16, 3)], [(1.5, "boundary")]]
)
def test_a_policy_that_gives_no_points_is_refused(given: Any) -> None:
    driver = Driver(make_manager(policy=Policy(given)))
    driver.add("a", PROMPT)
    before = describe(driver.manager._core)
    with pytest.raises(ValueError, match="policy must give points, each an integer"):
        driver.manager.plan([("a", 5)])
    assert describe(driver.manager._core) == before


def test_a_policy_may_give_points_of_its_own_kind() -> None:
    driver = Driver(make_manager(policy=Policy([Point(20, "mine")])))
    driver.serve("a", PROMPT.tolist())
    assert driver.manager.stats.snapshots["mine"] == 1


class FailsAtTheEnd(Learned):
    """Fails when a request ends."""

    def wants_response(self, *about: Any) -> bool:
        del about
        raise ZeroDivisionError


@pytest.mark.parametrize("policy", [auto(), response()])
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_policy_that_fails_at_the_end_leaks_nothing(
    policy: SnapshotPolicy, *, in_flight: bool
) -> None:
    driver = Driver(make_manager(policy=policy, eviction=FailsAtTheEnd))
    manager = driver.manager
    for request_id in ("a", "b"):
        driver.add(request_id, PROMPT)
        driver.prefill(request_id)
    if in_flight:
        plan = driver.plan([("a", 1), ("b", 1)])
        manager.finish("a")
        manager.finish("b")
        with pytest.raises(ZeroDivisionError):
            driver.complete(plan)
    else:
        for request_id in ("a", "b"):
            with pytest.raises(ZeroDivisionError):
                manager.finish(request_id)
    assert len(manager) == manager.stats.running == 0
    manager.check()
    for use in (*manager.stats.pages, manager.stats.rows):
        assert use.free + use.evictable == use.total


# -- completing ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        ([1], r"must be integers of shape \(2,\), one for each entry, got int64"),
        ([1.0, 2.0], r"must be integers of shape \(2,\), .*got float64"),
        ([[1, 2]], r"of shape \(1, 2\)"),
        ([-1, 5], "token ids >= 0 where an entry samples, got -1 to -1"),
        ([1 << 31, 5], "must be int32 token ids"),
        ([[1], [1, 2]], r"next_tokens must be an array of shape \(2,\)"),
    ],
)
def test_tokens_that_cannot_be_are_refused(tokens: Any, match: str) -> None:
    driver = Driver(make_manager())
    driver.add("a", PROMPT)
    driver.add("b", PROMPT)
    plan = driver.plan([("a", 50), ("b", 20)])
    before = describe(driver.manager._core)
    with pytest.raises(ValueError, match=match):
        driver.manager.complete(plan, tokens)
    assert describe(driver.manager._core) == before
    driver.complete(plan)


def test_what_an_entry_without_a_sample_brings_is_ignored() -> None:
    manager = make_manager()
    manager.add("a", PROMPT)
    plan = manager.plan([("a", 20)])
    manager.complete(plan, [-7])
    assert manager.tokens("a").tolist() == PROMPT.tolist()


def test_only_plans_can_be_completed() -> None:
    manager = make_manager()
    with pytest.raises(ValueError, match="plan must be a StepPlan, got 3"):
        manager.complete(3, [])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="plan must be a StepPlan, got 3"):
        manager.abandon(3)  # type: ignore[arg-type]


def test_a_stale_plan_is_refused_with_what_became_of_it() -> None:
    manager = make_manager()
    manager.add("a", PROMPT)
    plan = manager.plan([("a", 20)])
    manager.abandon(plan)
    with pytest.raises(StalePlan, match=r"StepPlan\(1, abandoned: .* was abandoned"):
        manager.complete(plan, [0])


# -- asking ----------------------------------------------------------------------------


def test_questions_about_ended_requests_say_how_they_ended() -> None:
    manager = make_manager()
    manager.add("a", PROMPT)
    manager.cancel("a")
    for ask in (manager.explain, manager.history, manager.remaining, manager.tokens):
        with pytest.raises(UnknownRequest, match="maps to nothing: it was cancelled"):
            ask("a")
    with pytest.raises(UnknownRequest, match="'b' was never added"):
        manager.finish("b")


def test_a_waiting_request_has_no_seat_and_no_row() -> None:
    manager = make_manager()
    manager.add("a", PROMPT)
    with pytest.raises(ValueError, match="'a' waits: it has no seat yet"):
        manager.seats_of(["a"])
    with pytest.raises(ValueError, match="'a' waits: it has no seat yet"):
        manager.rows_of(["a"])


def test_the_worst_case_is_only_known_for_lengths_that_can_be() -> None:
    manager = make_manager(max_tokens=64)
    assert manager.worst_case_pages(33) == (3,)
    for length in (0, 65):
        with pytest.raises(ValueError, match="from 1 to max_tokens = 64, got"):
            manager.worst_case_pages(length)
