"""`jaxcache demo` proves that reuse changes no token, and says so when one changes."""

import dataclasses
import functools
import json
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from jaxcache.cli import app
from jaxcache.demo.prepare import Speaker, random_speaker
from jaxcache.device.state import READ, WRITE, CacheState
from jaxcache.engine import ModelStep
from jaxcache.inputs.packing import PackedInputs
from jaxcache.layouts import NULL_SLOT

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "hf_golden"
KEYS = [
    "tokens_identical",
    "requests",
    "prompt_tokens",
    "computed_tokens_cold",
    "computed_tokens_cached",
    "reuse_ratio",
    "ttft_ms_cold_median",
    "ttft_ms_cached_median",
    "snapshots",
    "snapshots_skipped",
    "bytes_copied_for_snapshots",
    "bytes_copied_for_pages",
    "compilations",
]
# One prefill shape: three compilations.
SMALL = ["--limit", "2", "--max-new-tokens", "6", "--token-budget", "64"]


def invoke(*arguments: str, speaker: Speaker | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["demo", *arguments], obj=speaker)
    assert result.exception is None or isinstance(result.exception, SystemExit), (
        result.exception
    )
    return result.exit_code, result.stdout, " ".join(result.stderr.split())


@pytest.fixture
def talks(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "talks.jsonl"
    lines = [
        {"turns": ["Tell me about pages and rows.", "And about snapshots?"]},
        {"turns": ["Tell me about pages and seats.", "Why?", "Go on."]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


@functools.cache
def speaker() -> Speaker:
    """The model of the demo's default, whose compiled steps the tests share."""
    return random_speaker(0, None)


@pytest.fixture(scope="module")
def served() -> tuple[int, str, str]:
    return invoke("--json", *SMALL, speaker=speaker())


def test_json_is_one_object_with_identical_tokens(served: tuple[int, str, str]) -> None:
    status, out, err = served
    report = json.loads(out)
    assert status == 0
    assert list(report) == KEYS
    assert report["tokens_identical"] is True
    assert report["requests"] == 6
    assert report["computed_tokens_cold"] == report["prompt_tokens"] > 5000
    saved = report["prompt_tokens"] - report["computed_tokens_cached"]
    assert report["reuse_ratio"] == pytest.approx(saved / report["prompt_tokens"])
    assert report["reuse_ratio"] > 0.6
    # Which time is shorter depends on what else the machine does.
    assert report["ttft_ms_cached_median"] > 0
    assert report["ttft_ms_cold_median"] > 0
    assert report["computed_tokens_cached"] < report["computed_tokens_cold"]
    assert report["snapshots"] >= 6
    assert report["bytes_copied_for_snapshots"] == 0
    assert report["bytes_copied_for_pages"] > 0
    assert report["compilations"] == 3
    assert "a tiny random model (seed 0), bytes as tokens" in err


class Forgetful(ModelStep):
    """A step with the bug of the hour: what another row holds is read as nothing.

    The program is the one that is right; its inputs are changed on the way.
    """

    def __init__(self, right: ModelStep) -> None:
        self.__dict__.update(vars(right))
        self.own: dict[int, int] = {}

    def __call__(
        self, state: CacheState, packed: PackedInputs, last_tokens: jax.Array
    ) -> Any:
        inputs = np.array(packed.packed)
        extra = packed.extra_updates
        tables = [inputs[packed.bucket.sections["updates"]].reshape(4, -1)]
        if extra is not None:
            tables.append(extra := np.array(extra))
        row_index = len(packed.size.num_pages)
        for updates in tables:
            written = (updates[0] == row_index) & (updates[2] == WRITE)
            seats, rows = updates[1, written], updates[3, written]
            self.own.update(zip(seats.tolist(), rows.tolist(), strict=True))
        for updates in tables:
            for at in np.flatnonzero((updates[0] == row_index) & (updates[2] == READ)):
                if updates[3, at] != self.own[int(updates[1, at])]:
                    updates[3, at] = NULL_SLOT
        packed = dataclasses.replace(packed, packed=inputs, extra_updates=extra)
        return super().__call__(state, packed, last_tokens)


def test_a_changed_token_is_named_and_fails(served: tuple[int, str, str]) -> None:
    forgetful = dataclasses.replace(
        speaker(), step=Forgetful(speaker().step), description="a model that forgets"
    )
    status, out, err = invoke("--json", *SMALL, speaker=forgetful)
    report = json.loads(out)
    assert status == 1
    assert report["tokens_identical"] is False
    # Nothing else is different: the program is that of the run without a difference.
    assert report["compilations"] == 0
    assert report["prompt_tokens"] > 5000
    assert "Model: a model that forgets" in err
    named = r"request '.*, turn \d' differs at position \d of its answer: "
    assert re.search(named + r"token \d+ without reuse, token \d+ with it", err)


def test_the_command_serves_a_checkpoint_on_two_devices(talks: pathlib.Path) -> None:
    """The real command line, from the arguments to the exit status."""
    arguments = f"--conversations {talks} --rows 8 --tensor-parallel 2"
    run = subprocess.run(
        [
            *(sys.executable, "-m", "jaxcache.cli", "demo"),
            *("--checkpoint", str(GOLDEN / "bamba"), *arguments.split(), *SMALL),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=talks.parent,
    )
    assert run.returncode == 0, run.stderr
    assert "bytes as tokens, since it has no tokenizer.json" in " ".join(
        run.stderr.split()
    )
    table = " ".join(run.stdout.replace("│", " ").split())
    for line in (
        "5 requests, served twice",
        "prompt tokens",
        "prompt tokens computed",
        "reuse ratio",
        "time to first token, median,",
        "waiting in line included",
        "snapshots taken",
        "snapshots skipped",
        "bytes of rows copied",
        "bytes of pages copied",
        "step shapes compiled",
        "identical",
    ):
        assert line in table
    # Where nobody looks, a phase has a line or two, and a short one none.
    assert len(run.stderr.splitlines()) <= 8


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--checkpoint", "nowhere"], "Error: nowhere is not a folder"),
        (["--checkpoint", "."], "Error: cannot load .: there is no file config.json"),
        (["--text", "nowhere.txt"], "Error: cannot read nowhere.txt: No such file"),
        (["--rows", "3"], "Error: --rows must be at least --max-seqs = 8"),
        (["--pages", "3"], "Error: --pages of group 0 must be at least"),
        (["--tensor-parallel", "5"], "needs as many devices, JAX has 4 (cpu)"),
        (["--tensor-parallel", "3"], "Error: --tensor-parallel must divide"),
        (["--rows", "1000000000"], "1000000000 rows, and"),
        (["--pages", "1000000000"], "bytes for 1000000000 pages and"),
        (["--max-seqs", "100000000"], "give smaller --pages, --rows or --max-seqs"),
        (["--max-seqs", "10000000000"], "Error: --max-seqs must be at most 2147483647"),
        (["--rows", "10000000000"], "Error: --rows must be at most 2147483647"),
        (["--limit", "0"], "Invalid value for '--limit'"),
        (["--conversations", "a", "--text", "b"], "Error: give either --conversations"),
    ],
)
def test_bad_input_says_what_to_do_and_exits_2(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = invoke(*arguments)
    assert complaint in err
    assert (status, out) == (2, "")


@pytest.mark.parametrize(
    ("field", "value"),
    [("rope_parameters", 5), ("num_hidden_layers", "x"), ("hidden_size", -1)],
)
def test_a_senseless_config_is_named_with_its_file(
    tmp_path: pathlib.Path, field: str, value: object
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / "bamba", folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    status, out, err = invoke("--checkpoint", str(folder))
    assert (status, out) == (2, "")
    assert f"{path}: {field} of a bamba must be" in err


def test_half_a_character_in_a_conversation_is_bad_input(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps({"turns": ["fine", "a\ud800"]}))
    status, out, err = invoke("--conversations", str(path))
    assert (status, out) == (2, "")
    assert "line 1: turn 2 must be Unicode text, got the lone surrogate" in err


def test_help_lists_the_options() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for option in ("--checkpoint", "--conversations", "--text", "--json", "--seed"):
        assert option in result.stdout
