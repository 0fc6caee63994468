"""What the demo shows: bars while it runs, then a table of what came of it."""

import contextlib
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
            "time to first token, median",
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
            "bytes copied for snapshots",
            f"{cold.bytes_copied_for_snapshots:,}",
            f"{cached.bytes_copied_for_snapshots:,}",
        ),
        ("step shapes compiled", "", f"{comparison.compilations}"),
        ("tokens", "", "identical" if identical else "[bold red]different[/]"),
    ):
        table.add_row(name, one, other)
    return table


@contextlib.contextmanager
def progress_bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
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
