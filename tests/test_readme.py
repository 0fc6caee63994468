"""The README's Python examples run as they stand, one after the other."""

import pathlib
import re
from typing import Any

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_the_examples_in_the_readme_run() -> None:
    text = README.read_text(encoding="utf-8")
    fence = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
    examples = list(fence.finditer(text))
    assert examples, "the README shows no Python"
    names: dict[str, Any] = {"__name__": "__readme__"}
    for example in examples:
        # Line numbers in a traceback are those of the README.
        line = text.count("\n", 0, example.start(1))
        exec(compile("\n" * line + example[1], str(README), "exec"), names)
