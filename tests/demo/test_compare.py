"""A comparison finds the first difference and adds up what was saved."""

import pytest

from jaxcache.demo import Comparison, Difference, Run
from jaxcache.engine import Finish, Result


def result(name: str, tokens: tuple[int, ...], reused: int, ttft_s: float) -> Result:
    return Result(
        id=name,
        tokens=tokens,
        finish=Finish.LENGTH,
        prompt_tokens=100,
        reused_tokens=reused,
        computed_tokens=100 - reused,
        time_to_first_token_s=ttft_s,
        total_s=1.0,
    )


def run(*tokens: tuple[int, ...], reused: int = 0, ttft_s: float = 0.5) -> Run:
    return Run(
        results=tuple(
            result(f"talk, turn {turn + 1}", answer, reused, ttft_s + turn)
            for turn, answer in enumerate(tokens)
        ),
        snapshots={"boundary": 2, "response": 3} if reused else {},
        snapshots_skipped={"no row": 1} if reused else {},
        bytes_copied_for_snapshots=0,
        bytes_copied_for_pages=512 if reused else 0,
    )


def compared(cold: Run, cached: Run) -> Comparison:
    return Comparison(cold=cold, cached=cached, compilations=5)


def test_identical_answers_differ_nowhere() -> None:
    assert compared(run((1, 2), (3,)), run((1, 2), (3,))).difference is None


@pytest.mark.parametrize(
    ("cached", "difference"),
    [
        (run((1, 9), (8,), (4,)), Difference("talk, turn 1", 1, 2, 9)),
        (run((1, 2), (8,), (5,)), Difference("talk, turn 2", 0, 3, 8)),
        (run((1, 2), (3, 7), (4,)), Difference("talk, turn 2", 1, None, 7)),
        (run((1,), (3,), (4,)), Difference("talk, turn 1", 1, 2, None)),
    ],
)
def test_the_first_difference_is_named(cached: Run, difference: Difference) -> None:
    assert compared(run((1, 2), (3,), (4,)), cached).difference == difference


def test_a_difference_reads_as_a_sentence() -> None:
    assert str(Difference("a, turn 2", 3, None, 7)) == (
        "request 'a, turn 2' differs at position 3 of its answer: the end without "
        "reuse, token 7 with it"
    )


def test_the_summary_adds_up() -> None:
    summary = compared(
        run((1,), (2,), (3,)), run((1,), (2,), (3,), reused=75, ttft_s=0.25)
    ).summary()
    assert summary == {
        "tokens_identical": True,
        "requests": 3,
        "prompt_tokens": 300,
        "computed_tokens_cold": 300,
        "computed_tokens_cached": 75,
        "reuse_ratio": 0.75,
        "ttft_ms_cold_median": 1500.0,
        "ttft_ms_cached_median": 1250.0,
        "snapshots": 5,
        "snapshots_skipped": 1,
        "bytes_copied_for_snapshots": 0,
        "bytes_copied_for_pages": 512,
        "compilations": 5,
    }
