"""The table says what was copied, and a log gets lines only for what takes long."""

import io
import time

from rich.console import Console

from jaxcache.demo.compare import Comparison
from jaxcache.demo.report import progress_lines, progress_of, to_table
from tests.demo.test_compare import run


def test_the_table_shows_copied_pages_beside_copied_rows() -> None:
    comparison = Comparison(cold=run((1,)), cached=run((1,), reused=75), compilations=3)
    console = Console(file=io.StringIO(), width=200)
    console.print(to_table(comparison))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    (rows,) = (line for line in lines if "bytes of rows copied" in line)
    (pages,) = (line for line in lines if "bytes of pages copied" in line)
    assert rows.replace("│", "").split()[-2:] == ["0", "0"]
    assert pages.replace("│", "").split()[-2:] == ["0", "512"]
    assert any("waiting in line included" in line for line in lines)


def test_a_long_phase_has_a_line_at_its_start_and_its_end() -> None:
    lines: list[str] = []
    with progress_lines(lines.append, after_s=0.05) as show:
        show("compiling", 0, 2)
        time.sleep(0.3)
        assert lines == ["compiling ..."]
        show("compiling", 1, 2)
        assert len(lines) == 1
        show("compiling", 2, 2)
    assert len(lines) == 2
    assert lines[1].startswith("compiling: 2 of 2 in 0.")


def test_a_short_phase_has_no_line() -> None:
    lines: list[str] = []
    with progress_lines(lines.append, after_s=30.0) as show:
        for done in range(3):
            show("compiling", done, 2)
        show("given up", 0, 2)
    assert lines == []


def test_bars_move_only_on_a_terminal() -> None:
    for terminal in (True, False):
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal, width=80)
        with progress_of(console) as show:
            show("serving", 0, 1)
            show("serving", 1, 1)
        assert ("serving" in file.getvalue()) is terminal
