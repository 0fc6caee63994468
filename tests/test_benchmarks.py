"""The benchmarks' `--check` fails when a target is missed, and only then."""

import json
import pathlib
import runpy
import sys
from typing import Any

import numpy as np
import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"


def script(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"{name}.py"))


def test_an_interval_of_the_median_holds_it_in_19_of_20_cases() -> None:
    interval = script("handover")["median_interval"]
    # From the binomial distribution of 10 and of 5 tosses.
    assert interval(range(10)) == (1, 8)
    assert interval([3.0, 1.0, 2.0, 5.0, 4.0]) == (1.0, 5.0)
    rng = np.random.default_rng(0)
    draws = rng.exponential(size=(2000, 61))
    ends = np.array([interval(draw.tolist()) for draw in draws])
    inside = (ends[:, 0] <= np.log(2)) & (np.log(2) <= ends[:, 1])
    assert 0.94 < inside.mean() < 0.99


def test_hand_over_misses_only_if_all_of_its_interval_is_above_the_target() -> None:
    missed = script("handover")["missed"]

    def line(case: str, low: float) -> dict[str, Any]:
        return {"case": case, "order": "units", "ratio_low": low}

    assert missed([line("copies", 2.0), line("handover", 1.05)], 1.05) == []
    (sentence,) = missed([line("handover", 1.051)], 1.05)
    assert sentence == (
        "units: a step with hand-over takes at least 1.051 x one without, "
        "the target is 1.05"
    )


def test_step_overhead_misses_by_the_median_of_its_largest_batch() -> None:
    missed = script("step_overhead")["missed"]

    def line(batch: int, us: float) -> dict[str, Any]:
        return {"case": f"batch {batch}", "batch": batch, "overhead_us_median": us}

    assert missed([line(1, 99.0), line(256, 60.0)], 60.0) == []
    assert len(missed([line(256, 60.1)], 60.0)) == 1


@pytest.mark.parametrize(("target", "status"), [("1000", None), ("0.001", 1)])
def test_the_status_of_hand_over_is_that_of_its_check(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    target: str,
    status: int | None,
) -> None:
    small = "--batch 2 --layers 1 --heads 8 --state-dim 4 --seconds 0 --min-turns 6"
    arguments = [*small.split(), "--warmup", "1", "--check", "--target", target]
    monkeypatch.setattr(sys, "argv", ["handover.py", *arguments])
    main = script("handover")["main"]
    if status is None:
        main()
    else:
        with pytest.raises(SystemExit, match="takes at least"):
            main()
    out = capsys.readouterr().out
    assert [line.split()[1] for line in out.splitlines()] == [
        *("in_place", "control", "handover", "copies"),
        *("in_place", "control", "handover", "copies"),
    ]


def test_step_overhead_cannot_be_checked_without_its_largest_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["step_overhead.py", "--check", "--batch", "1"])
    with pytest.raises(SystemExit) as refusal:
        script("step_overhead")["main"]()
    assert refusal.value.code == 2


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("step_overhead", ["--turns", "2", "--repeat", "1"]),
        ("host_manager", ["--requests", "64", "--pages", "20000", "--generated", "3"]),
    ],
)
def test_a_benchmark_prints_a_line_of_json_a_case(
    name: str,
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--json", *options])
    main = script(name)["main"]
    if name == "host_manager":
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
    else:
        main()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines
    assert all(line["benchmark"] == name for line in lines)
