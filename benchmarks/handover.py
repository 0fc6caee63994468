"""What does it cost to turn every live row into a snapshot at every step?

A decode step reads each request's row and writes it: that is the baseline. With
hand-over it reads the old row and writes a fresh one, so that the old one stays as a
snapshot. With copies each row is copied to the snapshot's row first, then the step runs
as in the baseline. A control is the baseline once more: what its ratio strays from 1,
the noise of the machine does. In each turn all four run once, in an order drawn anew,
and each time is divided by the baseline's of the same turn; a ratio is the median over
the turns, with the 95 % interval of that median.

`--check` exits with 1 if hand-over misses its target: if even the lower end of its
interval is above it.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxcache.device.movers import jit_mover
from jaxcache.device.pools import copy_rows, read_rows, write_rows
from jaxcache.device.state import READ, WRITE, CacheState, init_cache
from jaxcache.device.step import jit_step
from jaxcache.device.step_inputs import StepInputs
from jaxcache.inputs.buckets import Buckets
from jaxcache.inputs.packing import PackedInputs, Packer, StepWork
from jaxcache.layouts import CacheLayout, Layer, Mamba2, ModelLayout

CASES = ("in_place", "control", "handover", "copies")
ORDERS = ("units", "buffers")

# The most that a step with hand-over may take, in steps without.
TARGET = 1.05


def decode(
    decay: jax.Array, state: CacheState, inputs: StepInputs
) -> tuple[CacheState, jax.Array]:
    """The memory traffic of a decode step: every row read and written once."""
    total = jnp.zeros((), jnp.float32)
    for layer in state.layout.model.layers:
        state, rows = read_rows(state, layer.layer_id, inputs.state_read)
        new = {role: row * decay.astype(row.dtype) + 1 for role, row in rows.items()}
        state = write_rows(state, layer.layer_id, inputs.state_write, new)
        total = total + new["ssm"].astype(jnp.float32)[0, 0, 0, 0]
    return state, total


def pack(
    packer: Packer, read: np.ndarray, write: np.ndarray, tell: bool
) -> PackedInputs:
    """A decode step of all seats; `tell` uploads which rows they read and write."""
    count = len(read)
    seats = np.arange(count, dtype=np.int32)
    work = StepWork(
        decode_seats=seats,
        decode_positions=np.zeros(count, np.int32),
        decode_tokens=np.zeros(count, np.int32),
    )
    if tell:
        table = np.full(count, packer.layout.num_page_groups, np.int32)
        columns = [(READ, read), (WRITE, write)]
        work.updates = np.concatenate(
            [np.stack([table, seats, np.full_like(seats, c), v]) for c, v in columns], 1
        )
    return packer.pack(work)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, whatever the distribution of the values is.

    A value is as likely below the median as above it, so that how many of n are below
    is binomial. The interval ends at the k-th smallest and the k-th largest value, with
    the largest k that leaves at most 2.5 % on either side; the first and the last value
    where there are too few for that (below 6).
    """
    ordered = sorted(values)
    count = len(ordered)
    left_out, below = 0, math.ldexp(1.0, -count)
    term = below
    while below <= 0.025:
        left_out += 1
        term *= (count - left_out + 1) / left_out
        below += term
    first = max(0, left_out - 1)
    return ordered[first], ordered[count - 1 - first]


def missed(lines: Iterable[dict[str, Any]], target: float) -> list[str]:
    """What hand-over takes too long, one sentence an order of the pools."""
    return [
        f"{line['order']}: a step with hand-over takes at least {line['ratio_low']:.3f}"
        f" x one without, the target is {target}"
        for line in lines
        if line["case"] == "handover" and line["ratio_low"] > target
    ]


def run(options: argparse.Namespace, order: str) -> list[dict[str, Any]]:
    batch = options.batch
    mamba = Mamba2(
        num_heads=options.heads,
        head_dim=64,
        num_groups=8,
        state_dim=options.state_dim,
        conv_kernel=4,
    )
    model = ModelLayout("rows", tuple(Layer(i, mamba) for i in range(options.layers)))
    layout = CacheLayout(model, order=order)  # type: ignore[arg-type]
    state = init_cache(layout, 0, 2 * batch, max_seqs=batch, max_tokens=16)
    buckets = Buckets(decode=(max(2, batch),), prefill_tokens=())
    packer = Packer(layout, state.size, buckets)
    first = state.size.first_slot
    one = np.arange(first, first + batch, dtype=np.int32)
    other = one + batch
    decay = jnp.float32(0.5)
    step, copy = jit_step(decode), jit_mover(copy_rows)

    times: dict[str, list[float]] = {case: [] for case in CASES}
    rng = np.random.default_rng(0)
    turn, stop = -options.warmup, math.inf
    while turn < options.min_turns or time.perf_counter() < stop:
        if turn == 0:
            stop = time.perf_counter() + options.seconds
        for case in rng.permutation(CASES).tolist():
            # Which rows a seat has is known to the device before the clock starts,
            # except where hand-over is what changes it.
            state, out = step(decay, state, pack(packer, one, one, True))
            jax.block_until_ready((state, out))
            handing_over = case == "handover"
            start = time.perf_counter()
            if case == "copies":
                state = copy(state, one, other)
            packed = pack(packer, one, other if handing_over else one, handing_over)
            state, out = step(decay, state, packed)
            jax.block_until_ready((state, out))
            if turn >= 0:
                times[case].append(1e6 * (time.perf_counter() - start))
        turn += 1
    (report,) = step.reports
    moved = 2 * batch * layout.bytes_per_row
    ratios = {
        case: [a / b for a, b in zip(times[case], times["in_place"], strict=True)]
        for case in CASES
    }
    intervals = {case: median_interval(ratios[case]) for case in CASES}
    return [
        {
            "benchmark": "handover",
            "case": case,
            "order": order,
            "batch": batch,
            "row_bytes": layout.bytes_per_row,
            "pool_bytes": sum(state.size.pool_bytes(layout)),
            "moved_bytes": moved * (2 if case == "copies" else 1),
            "median_us": statistics.median(times[case]),
            "min_us": min(times[case]),
            "ratio_to_in_place": statistics.median(ratios[case]),
            "ratio_low": intervals[case][0],
            "ratio_high": intervals[case][1],
            "turns": turn,
            "compile_s": step.compile_seconds,
            "alias_bytes": report.alias_bytes,
            "temp_bytes": report.temp_bytes,
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
        }
        for case in CASES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON line a case")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--state-dim", type=int, default=64)
    parser.add_argument(
        "--seconds", type=float, default=20, help="to measure each order"
    )
    parser.add_argument("--min-turns", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--check", action="store_true", help="exit with 1 if missed")
    parser.add_argument("--target", type=float, default=TARGET)
    options = parser.parse_args()
    lines = []
    for order in ORDERS:
        for line in run(options, order):
            lines.append(line)
            text = (
                f"{line['order']:8} {line['case']:9} {line['median_us']:10.1f} us "
                f"a step, {line['ratio_to_in_place']:.3f} x in place "
                f"({line['ratio_low']:.3f} to {line['ratio_high']:.3f}, "
                f"{line['turns']} turns)"
            )
            print(json.dumps(line) if options.json else text, flush=True)
    if options.check and (sentences := missed(lines, options.target)):
        sys.exit("\n".join(sentences))


if __name__ == "__main__":
    main()
