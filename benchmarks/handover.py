"""What does it cost to turn every live row into a snapshot at every step?

A decode step reads each request's row and writes it: that is the baseline. With
hand-over it reads the old row and writes a fresh one, so that the old one stays as a
snapshot. With copies each row is copied to the snapshot's row first, then the step runs
as in the baseline. The three take turns, so that noise hits them alike; the ratios are
medians over the turns.
"""

import argparse
import json
import statistics
import time
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

CASES = ("in_place", "handover", "copies")


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
    for turn in range(options.warmup + options.turns):
        for case in (*CASES[turn % 3 :], *CASES[: turn % 3]):
            # Which rows a seat has is known to the device before the clock starts,
            # except where hand-over is what changes it.
            state, out = step(decay, state, pack(packer, one, one, True))
            state, out = step(decay, state, pack(packer, one, one, False))
            jax.block_until_ready((state, out))
            handing_over = case == "handover"
            start = time.perf_counter()
            if case == "copies":
                state = copy(state, one, other)
            packed = pack(packer, one, other if handing_over else one, handing_over)
            state, out = step(decay, state, packed)
            jax.block_until_ready((state, out))
            if turn >= options.warmup:
                times[case].append(1e6 * (time.perf_counter() - start))
    (report,) = step.reports
    moved = 2 * batch * layout.bytes_per_row
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
            "ratio_to_in_place": statistics.median(
                mine / base
                for mine, base in zip(times[case], times["in_place"], strict=True)
            ),
            "turns": options.turns,
            "compile_s": step.compile_seconds,
            "alias_bytes": report.alias_bytes,
            "temp_bytes": report.temp_bytes,
            "jax": jax.__version__,
            "device": jax.devices()[0].device_kind,
        }
        for case in CASES
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line a case")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--state-dim", type=int, default=64)
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=6)
    options = parser.parse_args()
    for order in ("units", "buffers"):
        for line in run(options, order):
            text = (
                f"{line['order']:8} {line['case']:9} {line['median_us']:10.1f} us "
                f"a step, {line['ratio_to_in_place']:.3f} x in place"
            )
            print(json.dumps(line) if options.json else text, flush=True)


if __name__ == "__main__":
    main()
