"""`jaxcache demo` proves that reuse changes no token, and says so when one changes."""

import dataclasses
import json
import pathlib
import re

import jax.numpy as jnp
import pytest
from flax import nnx
from typer.testing import CliRunner

from jaxcache.cli import app
from jaxcache.demo.prepare import Speaker, random_speaker
from jaxcache.device.state import CacheState
from jaxcache.device.step_inputs import StepInputs
from jaxcache.layouts import NULL_SLOT, ModelLayout
from jaxcache.models import TINY_CONFIG, HybridModel, random_model

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


def test_json_is_one_object_with_identical_tokens() -> None:
    status, out, err = invoke("--json", *SMALL)
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
    assert report["compilations"] == 3
    assert "a tiny random model (seed 0), bytes as tokens" in err


class Forgetful(nnx.Module):
    """A model with the bug of the hour: what another row holds is read as nothing."""

    def __init__(self, model: HybridModel) -> None:
        self.model = model

    @property
    def layout(self) -> ModelLayout:
        return self.model.layout

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def __call__(
        self, state: CacheState, inputs: StepInputs
    ) -> tuple[CacheState, jnp.ndarray]:
        own = inputs.state_read == inputs.state_write
        read = jnp.where(own, inputs.state_read, NULL_SLOT)
        return self.model(state, dataclasses.replace(inputs, state_read=read))

    def logits(self, hidden: jnp.ndarray) -> jnp.ndarray:
        return self.model.logits(hidden)


def test_a_changed_token_is_named_and_fails(talks: pathlib.Path) -> None:
    speaker = dataclasses.replace(
        random_speaker(0, None),
        model=Forgetful(random_model(TINY_CONFIG, 0)),
        description="a model that forgets",
    )
    status, out, err = invoke(
        "--json", "--conversations", str(talks), *SMALL, speaker=speaker
    )
    assert status == 1
    assert json.loads(out)["tokens_identical"] is False
    assert "Model: a model that forgets" in err
    named = r"request 'line \d, turn \d' differs at position \d of its answer: "
    assert re.search(named + r"token \d+ without reuse, token \d+ with it", err)


def test_a_checkpoint_on_two_devices_fills_the_table(talks: pathlib.Path) -> None:
    status, out, err = invoke(
        "--checkpoint",
        str(GOLDEN / "bamba"),
        "--conversations",
        str(talks),
        "--rows",
        "8",
        "--tensor-parallel",
        "2",
        *SMALL,
    )
    assert status == 0
    assert "bytes as tokens, since it has no tokenizer.json" in err
    for line in (
        "5 requests, served twice",
        "prompt tokens",
        "prompt tokens computed",
        "reuse ratio",
        "time to first token, median",
        "snapshots taken",
        "snapshots skipped",
        "bytes copied for snapshots",
        "step shapes compiled",
        "identical",
    ):
        assert line in out
    assert "with reuse" in err


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--checkpoint", "nowhere"], "Error: nowhere is not a folder"),
        (["--checkpoint", "."], "Error: cannot load .: there is no file config.json"),
        (["--text", "nowhere.txt"], "Error: cannot read nowhere.txt: No such file"),
        (["--rows", "3"], "Error: num_rows must be at least max_seqs = 8"),
        (["--pages", "3"], "Error: num_pages of group 0 must be at least"),
        (["--tensor-parallel", "5"], "needs as many devices, JAX has 4 (cpu)"),
        (["--tensor-parallel", "3"], "Error: num_shards must divide"),
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


def test_help_lists_the_options() -> None:
    result = CliRunner().invoke(app, ["demo", "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    for option in ("--checkpoint", "--conversations", "--text", "--json", "--seed"):
        assert option in result.stdout
