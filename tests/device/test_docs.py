"""The tables of docs/in_place.md are what the code on that page prints."""

import dataclasses
import pathlib
import re
from typing import Any

import pytest

from jaxcache.device.proof import PoolCopied, StepReport
from jaxcache.device.step import jit_step
from tests.device.proofs import TARGETS

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs" / "in_place.md"
BLOCK = re.compile(r"```(python|text)\n(.*?)```", re.DOTALL)


def blocks(kind: str) -> list[str]:
    return [text for name, text in BLOCK.findall(PAGE.read_text()) if name == kind]


def rows(table: str) -> list[str]:
    """A table without what may differ: compile time, and bytes of temporaries."""
    return [
        re.sub(r" in [\d.]+ s$", "", line)
        for line in table.strip().splitlines()
        if not line.startswith("temporaries")
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_page_shows_what_its_code_prints(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    printed: list[Any] = []
    names: dict[str, Any] = {"print": printed.append}
    count = 1 if target == "cpu" else 2
    for code in blocks("python")[:count]:
        exec(code, names)
    report = printed[-1]
    assert isinstance(report, StepReport)
    assert report.temp_share < 0.05
    assert rows(blocks("text")[count - 1]) == rows(str(report))


def test_page_shows_what_a_refusal_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {"print": lambda _: None, "dataclasses": dataclasses}
    setup, _, refused = blocks("python")
    # The table is the other test's.
    exec(setup.replace("print(explain_step(", "(lambda *_: None)(("), names)
    exec(refused, names)
    step = jit_step(names["reads_out"], state_argnum=0)
    with pytest.raises(PoolCopied) as error:
        step.compile(names["state"], names["bucket"])
    assert rows(blocks("text")[2]) == rows(str(error.value))
