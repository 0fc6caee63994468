"""The scheduler divides a step's budget and never starts what could starve."""

from hypothesis import given, strategies as st

from jaxcache.engine.schedule import Limits, Need, may_start, schedule

WIDE = Limits(token_budget=64, decode_seqs=8, prefill_seqs=4, prefill_tokens=64)


def test_requests_that_decode_go_first_with_one_token_each() -> None:
    step = schedule(["a", "b"], [("c", 100)], WIDE)
    assert step.work == [("a", 1), ("b", 1), ("c", 62)]
    assert step.tokens_left == 0


def test_prompts_share_the_rest_in_order_of_arrival() -> None:
    step = schedule([], [("a", 40), ("b", 40), ("c", 40)], WIDE)
    assert step.work == [("a", 40), ("b", 24)]


def test_no_more_prompts_than_the_step_has_entries_for() -> None:
    step = schedule([], [(name, 1) for name in "abcdef"], WIDE)
    assert [request_id for request_id, _ in step.work] == list("abcd")
    assert not may_start(Need(1, 1, (1,)), Need(9, 9, (9,)), step)


def test_the_prefill_bucket_bounds_prompts_even_with_budget_left() -> None:
    limits = Limits(token_budget=64, decode_seqs=8, prefill_seqs=4, prefill_tokens=16)
    step = schedule(["a"], [("b", 30), ("c", 30)], limits)
    assert step.work == [("a", 1), ("b", 16)]


def test_a_budget_below_the_number_of_decodes_serves_the_first_in_line() -> None:
    limits = Limits(token_budget=2, decode_seqs=8, prefill_seqs=4, prefill_tokens=64)
    step = schedule(["a", "b", "c"], [("d", 5)], limits)
    assert step.work == [("a", 1), ("b", 1)]


def test_a_request_starts_only_if_its_worst_case_fits_every_pool() -> None:
    step = schedule([], [], WIDE)
    need = Need(seats=1, rows=1, pages=(3, 2))
    assert may_start(need, Need(1, 1, (3, 2)), step)
    for room in (Need(0, 1, (3, 2)), Need(1, 0, (3, 2)), Need(1, 1, (2, 2))):
        assert not may_start(need, room, step)
    assert not may_start(need, Need(1, 1, (3, 1)), step)


def test_nothing_starts_in_a_step_without_budget() -> None:
    step = schedule(["a", "b"], [("c", 62)], WIDE)
    assert not may_start(Need(1, 0, (1,)), Need(9, 9, (9,)), step)


@given(
    decodes=st.integers(0, 12),
    prompts=st.lists(st.integers(1, 50), max_size=8),
    budget=st.integers(1, 64),
    decode_seqs=st.integers(1, 8),
    prefill_seqs=st.integers(1, 4),
    prefill_tokens=st.integers(1, 64),
)
def test_a_schedule_keeps_every_limit_and_wastes_no_room(
    decodes: int,
    prompts: list[int],
    budget: int,
    decode_seqs: int,
    prefill_seqs: int,
    prefill_tokens: int,
) -> None:
    limits = Limits(budget, decode_seqs, prefill_seqs, prefill_tokens)
    prefilling = list(enumerate(prompts, start=100))
    step = schedule(list(range(decodes)), prefilling, limits)
    decode = [n for request_id, n in step.work if request_id < 100]  # type: ignore[operator]
    prefill = [n for request_id, n in step.work if request_id >= 100]  # type: ignore[operator]
    assert step.work[: len(decode)] == [(i, 1) for i in range(len(decode))]
    assert len(decode) == min(decodes, budget, decode_seqs)
    assert len(prefill) <= prefill_seqs
    assert sum(prefill) <= min(prefill_tokens, budget - len(decode))
    assert sum(decode) + sum(prefill) + step.tokens_left == budget
    # Prompts are served in order, whole but for the last.
    assert prefill[:-1] == prompts[: max(0, len(prefill) - 1)]
    if len(prefill) < min(len(prompts), prefill_seqs):
        assert step.room == 0
    # Whatever runs, something runs.
    assert step.work or not (decodes or prompts)
