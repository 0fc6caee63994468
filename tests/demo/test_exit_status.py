"""Status 1 means that a token differs; a program that fails says so otherwise."""

import subprocess
import sys

FAILING = """
import sys
from jaxcache import cli

@cli.app.command()
def fail() -> None:
    raise ZeroDivisionError("on purpose")

sys.argv = ["jaxcache", "fail"]
cli.main()
"""


def test_a_program_that_fails_exits_with_3() -> None:
    run = subprocess.run(
        [sys.executable, "-c", FAILING], capture_output=True, text=True, check=False
    )
    assert run.returncode == 3
    assert "ZeroDivisionError: on purpose" in run.stderr
