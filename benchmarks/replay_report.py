"""A table and a plot of what `benchmarks/trace_replay.py` found.

    python -m benchmarks.replay_report RESULTS.jsonl --plot docs/policy_hits.svg

reads its JSON lines, prints a Markdown table beside the peers and the clairvoyant
reference of `replay_reference.json`, and draws token hit against memory, one panel for
each model and reading of the trace. Runs that are missing leave a gap.
"""

import argparse
import json
import pathlib
import statistics
from collections.abc import Iterable
from typing import Any

Key = tuple[int, bool, str]
Series = dict[str, list[float | None]]

COLOURS = {
    "clairvoyant": "#888888",
    "learned": "#0b6e4f",
    "lru": "#c8553d",
    "best peer": "#3d5a98",
}
WIDTH, HEIGHT, MARGIN = 260, 190, 42


def read_reference() -> dict[Key, dict[str, Any]]:
    path = pathlib.Path(__file__).with_name("replay_reference.json")
    cells = json.loads(path.read_text())["cells"]
    return {(cell["thin"], cell["linked"], cell["model"]): cell for cell in cells}


def read_results(
    paths: Iterable[pathlib.Path], reference: dict[Key, dict[str, Any]]
) -> dict[Key, Series]:
    """Returns the hits of each panel by policy, in the order of the memory sizes."""
    hits: dict[Key, Series] = {}
    for path in paths:
        for line in path.read_text().splitlines():
            run = json.loads(line)
            key = (run["thin"], run["linked"], run["model"])
            sizes = reference[key]["memory"]
            series = hits.setdefault(key, {}).setdefault(
                run["policy"], [None] * len(sizes)
            )
            series[sizes.index(run["memory_gib"])] = run["token_hit_percent"]
    return hits


def name_of(key: Key) -> str:
    thin, linked, model = key
    trace = "full" if thin == 1 else f"thin {thin}"
    return f"{model}, {trace}, {'linked' if linked else 'plain'}"


def table(reference: dict[Key, dict[str, Any]], hits: dict[Key, Series]) -> list[str]:
    lines = ["| trace | | hit, % | of clairvoyant |", "|---|---|---|---|"]
    fractions: dict[str, list[float]] = {}
    for key, cell in reference.items():
        best = cell["clairvoyant"]
        rows = {
            **hits.get(key, {}),
            "best peer": cell["best peer"],
            "clairvoyant": best,
        }
        sizes = ", ".join(str(size) for size in cell["memory"])
        for number, (policy, series) in enumerate(rows.items()):
            shown = " / ".join("-" if hit is None else f"{hit:.2f}" for hit in series)
            share = [
                hit / most
                for hit, most in zip(series, best, strict=True)
                if hit is not None
            ]
            fractions.setdefault(policy, []).extend(share)
            where = f"{name_of(key)}, {sizes} GiB" if number == 0 else ""
            mean = f"{statistics.mean(share):.3f}" if share else "-"
            lines.append(f"| {where} | {policy} | {shown} | {mean} |")
    for policy, share in fractions.items():
        lines.append(
            f"| mean of {len(share)} cells | {policy} | "
            f"| {statistics.mean(share):.3f} |"
        )
    return lines


def plot(reference: dict[Key, dict[str, Any]], hits: dict[Key, Series]) -> str:
    """Returns an SVG with one panel for each model and reading of the trace."""
    columns = 4
    rows = -(-len(reference) // columns)
    body = [
        panel(key, cell, hits.get(key, {}), number % columns, number // columns)
        for number, (key, cell) in enumerate(reference.items())
    ]
    width, height = columns * (WIDTH + 10), rows * (HEIGHT + 10) + 24
    legend = "".join(
        f'<circle cx="{14 + 130 * n}" cy="{height - 10}" r="4" fill="{colour}"/>'
        f'<text x="{24 + 130 * n}" y="{height - 6}">{name}</text>'
        for n, (name, colour) in enumerate(COLOURS.items())
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>'
        f"{''.join(body)}{legend}</svg>\n"
    )


def panel(key: Key, cell: dict[str, Any], hits: Series, column: int, row: int) -> str:
    x0, y0 = column * (WIDTH + 10) + MARGIN, row * (HEIGHT + 10) + HEIGHT - 30
    across, up = WIDTH - MARGIN - 10, HEIGHT - 60
    sizes = cell["memory"]
    parts = [f'<text x="{x0}" y="{y0 - up - 10}">{name_of(key)}</text>']
    for percent in (0, 10, 20, 30, 40):
        y = y0 - up * percent / 40
        parts.append(
            f'<path d="M{x0} {y:.1f}h{across}" stroke="#ddd"/>'
            f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>'
        )
    places = [x0 + 12 + n * (across - 24) / (len(sizes) - 1) for n in range(len(sizes))]
    for place, size in zip(places, sizes, strict=True):
        parts.append(
            f'<text x="{place:.1f}" y="{y0 + 15}" text-anchor="middle">{size} GiB'
            f"</text>"
        )
    series = {
        "clairvoyant": cell["clairvoyant"],
        "best peer": cell["best peer"],
        **hits,
    }
    for name, values in series.items():
        points = [
            (place, y0 - up * value / 40)
            for place, value in zip(places, values, strict=True)
            if value is not None
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        colour = COLOURS[name]
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" '
            f'stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
            for x, y in points
        ]
    return "".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=pathlib.Path, nargs="+")
    parser.add_argument("--plot", type=pathlib.Path, help="where to draw, an .svg")
    options = parser.parse_args()
    reference = read_reference()
    hits = read_results(options.results, reference)
    print("\n".join(table(reference, hits)))
    if options.plot is not None:
        options.plot.write_text(plot(reference, hits))


if __name__ == "__main__":
    main()
