"""What the demo shows: bars while it runs, then a table of what came of it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from jaxcache.demo.compare import Comparison

#: Seconds that a phase takes before a line says so, where no bar can move.
LINE_AFTER_S = 2.0


def to_table(comparison: Comparison) -> Table:
    """Lays a comparison out as a table, one line a quantity, one column a run."""
    cold, cached = comparison.cold, comparison.cached
    identical = comparison.difference is None
    table = Table(title=f"{len(cached.results)} requests, served twice")
    table.add_column("")
    table.add_column("without reuse", justify="right")
    table.add_column("with reuse", justify="right")
    for name, one, other in (
        ("prompt tokens", f"{cold.prompt_tokens:,}", f"{cached.prompt_tokens:,}"),
        (
            "prompt tokens computed",
            f"{cold.computed_tokens:,}",
            f"{cached.computed_tokens:,}",
        ),
        ("reuse ratio", "", f"{comparison.reuse_ratio:.1%}"),
        (
            "time to first token, median,\nwaiting in line included",
            f"{cold.median_ttft_ms:.1f} ms",
            f"{cached.median_ttft_ms:.1f} ms",
        ),
        ("snapshots taken", _counts(cold.snapshots), _counts(cached.snapshots)),
        (
            "snapshots skipped",
            _counts(cold.snapshots_skipped),
            _counts(cached.snapshots_skipped),
        ),
        (
            "bytes of rows copied",
            f"{cold.bytes_copied_for_snapshots:,}",
            f"{cached.bytes_copied_for_snapshots:,}",
        ),
        (
            "bytes of pages copied",
            f"{cold.bytes_copied_for_pages:,}",
            f"{cached.bytes_copied_for_pages:,}",
        ),
        ("step shapes compiled", "", f"{comparison.compilations}"),
        ("tokens", "", "identical" if identical else "[bold red]different[/]"),
    ):
        table.add_row(name, one, other)
    return table


Show = Callable[[str, int, int], None]


def progress_of(console: Console) -> contextlib.AbstractContextManager[Show]:
    """Shows what goes on: bars where they can move, else a line now and then."""
    if console.is_terminal:
        return _bars(console)
    return progress_lines(
        lambda line: console.print(line, markup=False, soft_wrap=True)
    )


@contextlib.contextmanager
def progress_lines(
    write: Callable[[str], None], after_s: float = LINE_AFTER_S
) -> Iterator[Show]:
    """Writes a line when a phase begins and one when it ends, for a file to keep.

    Args:
        write: Takes a line.
        after_s: A phase that is over before is not worth a line.
    """
    began: dict[str, float] = {}
    timers: dict[str, threading.Timer] = {}

    def show(name: str, done: int, total: int) -> None:
        if name not in began:
            began[name] = time.perf_counter()
            timers[name] = threading.Timer(after_s, write, [f"{name} ..."])
            timers[name].daemon = True
            timers[name].start()
        if done >= total:
            timer = timers.pop(name)
            timer.cancel()
            timer.join()
            seconds = time.perf_counter() - began.pop(name)
            if seconds >= after_s:
                write(f"{name}: {done} of {total} in {seconds:.1f} s")

    try:
        yield show
    finally:
        for timer in timers.values():
            timer.cancel()


@contextlib.contextmanager
def _bars(console: Console) -> Iterator[Show]:
    """Shows a bar for each thing that goes on; call with its name, done and total."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield show


def _counts(counts: Mapping[str, int]) -> str:
    """`3 (branch 1, response 2)`, or `0`."""
    total = sum(counts.values())
    parts = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
    return f"{total} ({parts})" if total else "0"
