"""What does a step cost the host beyond running the compiled program?

Decode steps of the engine, one request a seat. Each turn plans, runs and completes one
step, which gives the cost of planning (the manager decides) and completing (the manager
is told). Then it does three things some more times in a row, as a busy loop does them:
packing (one array is filled), the call (arguments are flattened and checked, the
program is dispatched), and, as the baseline, the same program started by the runtime
alone with every argument on the device. All are timed until they return;

    overhead = packing + call - program

is what jaxcache adds to a step. On CPU a program runs partly before the call returns,
in both. So that its noise does not cover what is measured, the program computes next
to nothing by default: it has all arguments and results of the tiny model's step, cache
and weights, but only looks at each (`--model tiny` computes).

`--check` exits with 1 if the median overhead misses its target at 256 requests a step.
"""

import argparse
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcache.device.state import CacheState
from jaxcache.device.step_inputs import StepInputs
from jaxcache.engine import Engine, ModelStep, Request
from jaxcache.engine.pipeline import Pipeline
from jaxcache.inputs.buckets import Buckets
from jaxcache.inputs.packing import DecodeForm, PackedInputs, Packer
from jaxcache.layouts import ModelLayout
from jaxcache.models import TINY_CONFIG, HybridModel, random_model

PARTS = ("planning", "packing", "call", "program", "completing")

# The most microseconds that jaxcache may add to a step of so many requests.
TARGET_US = 60.0
TARGET_BATCH = 256


class Hollow(nnx.Module):
    """A model's weights and cache without its computation."""

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
    ) -> tuple[CacheState, jax.Array]:
        # An argument that the program does not use would be left out of it.
        used = [jnp.ravel(w)[0] for w in jax.tree.leaves(nnx.state(self.model))]
        total = sum(x.astype(jnp.float32) for x in used)
        return state, jnp.full((*inputs.token_ids.shape, 2), total, jnp.float32)

    def logits(self, hidden: jax.Array) -> jax.Array:
        return hidden


class Packing:
    """Times the packing of every step from here on, and keeps how the last one went."""

    # A steady decode step is packed by the form that its run keeps, others by a packer.
    WAYS = ((Packer, "pack_unchecked"), (DecodeForm, "pack"))

    def __init__(self) -> None:
        self.us = 0.0
        self._last: Callable[[], PackedInputs]
        self._originals = [getattr(owner, name) for owner, name in self.WAYS]
        for (owner, name), pack in zip(self.WAYS, self._originals, strict=True):
            setattr(owner, name, self._timed(pack))

    def _timed(self, pack: Callable[..., PackedInputs]) -> Callable[..., PackedInputs]:
        def timed(owner: Packer | DecodeForm, *arguments: Any) -> PackedInputs:
            self._last = functools.partial(pack, owner, *arguments)
            began = time.perf_counter()
            packed = pack(owner, *arguments)
            self.us = 1e6 * (time.perf_counter() - began)
            return packed

        return timed

    def again(self, times: int) -> float:
        """Packs the last step again; returns microseconds for each time."""
        began = time.perf_counter()
        for _ in range(times):
            self._last()
        return 1e6 * (time.perf_counter() - began) / times

    def stop(self) -> None:
        for (owner, name), pack in zip(self.WAYS, self._originals, strict=True):
            setattr(owner, name, pack)


def call_again(
    model: ModelStep, pipeline: Pipeline, packed: PackedInputs, times: int
) -> float:
    """Calls a step again; returns microseconds until each call returned."""
    state, last_tokens = pipeline.state, pipeline.last_tokens
    began = time.perf_counter()
    for _ in range(times):
        state, sampled = model(state, packed, last_tokens)
        last_tokens = sampled.last_tokens
    us = 1e6 * (time.perf_counter() - began) / times
    pipeline.state = state
    jax.block_until_ready(state)
    return us


def run_again(
    model: ModelStep, pipeline: Pipeline, packed: PackedInputs, times: int
) -> float:
    """Starts the program by the runtime; returns microseconds until it was started."""
    # The only way to the program that a Step runs is through its own table.
    compiled: Any = model._step._latest[packed.bucket]
    executable = compiled.runtime_executable()
    kept = sorted(compiled._executable._kept_var_idx)
    leaves, structure = jax.tree.flatten(pipeline.state)
    others = [jax.device_put(packed.packed), *model.weights, pipeline.last_tokens]
    jax.block_until_ready(others)
    spent = 0.0
    for _ in range(times):
        arguments = [(*leaves, *others)[index] for index in kept]
        began = time.perf_counter()
        results = executable.execute_sharded(arguments)
        spent += time.perf_counter() - began
        arrays = [parts[0] for parts in results.disassemble_into_single_device_arrays()]
        leaves = arrays[: len(leaves)]
    pipeline.state = jax.tree.unflatten(structure, leaves)
    jax.block_until_ready(pipeline.state)
    return 1e6 * spent / times


def measure(
    model: ModelStep, options: argparse.Namespace, batch: int
) -> dict[str, Any]:
    turns = options.warmup + options.turns
    # The first to start decode while the last wait for their turn to start.
    new_tokens = turns + batch + 8
    engine = Engine(
        model,
        max_seqs=batch,
        max_tokens=24 + new_tokens,
        num_rows=batch,
        buckets=Buckets(
            decode=(max(2, batch),), prefill_tokens=(64,), max_prefill_seqs=8
        ),
        token_budget=batch + 64,
        overlap=False,
    )
    rng = np.random.default_rng(0)
    for seat in range(batch):
        # Lengths differ, so that some request needs a page in most steps.
        prompt = rng.integers(0, 256, 8 + seat % 16)
        engine.submit(Request(id=seat, prompt=prompt, max_new_tokens=new_tokens))
    while engine.manager.stats.requests < batch:
        engine.step()
    packing = Packing()
    work = [(seat, 1) for seat in range(batch)]
    pipeline, manager = engine.pipeline, engine.manager
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    gc.collect()
    gc.disable()
    for turn in range(turns):
        began = time.perf_counter()
        plan = manager.plan(work)
        planning = 1e6 * (time.perf_counter() - began) - packing.us
        pipeline.launch(plan)
        tokens = pipeline.oldest()[1][plan.entry_rows]
        began = time.perf_counter()
        manager.complete(plan, tokens)
        completing = 1e6 * (time.perf_counter() - began)
        pipeline.landed()
        turn_us = {
            "planning": planning,
            "packing": packing.again(options.repeat),
            "call": call_again(model, pipeline, plan.inputs, options.repeat),
            "program": run_again(model, pipeline, plan.inputs, options.repeat),
            "completing": completing,
        }
        if turn >= options.warmup:
            for part, us in turn_us.items():
                times[part].append(us)
    gc.enable()
    packing.stop()
    engine.abort()
    overhead = [
        packing_us + call - program
        for packing_us, call, program in zip(
            times["packing"], times["call"], times["program"], strict=True
        )
    ]
    return {
        "benchmark": "step_overhead",
        "case": f"batch {batch}",
        "model": options.model,
        "batch": batch,
        "weights": len(model.weights),
        "pools": len(pipeline.state.pools),
        "packed_bytes": plan.inputs.packed.nbytes,
        "overhead_us_median": statistics.median(overhead),
        "overhead_us_min": min(times["packing"])
        + min(times["call"])
        - min(times["program"]),
        **{f"{part}_us_median": statistics.median(times[part]) for part in PARTS},
        **{f"{part}_us_min": min(times[part]) for part in PARTS},
        "turns": options.turns,
        "repeat": options.repeat,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def missed(lines: Iterable[dict[str, Any]], target_us: float) -> list[str]:
    """What takes too long, as sentences."""
    return [
        f"{line['case']}: {line['overhead_us_median']:.1f} us a step are added, the "
        f"target is {target_us:g}"
        for line in lines
        if line["batch"] == TARGET_BATCH and line["overhead_us_median"] > target_us
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON line a case")
    parser.add_argument("--model", choices=["hollow", "tiny"], default="hollow")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=30)
    parser.add_argument("--check", action="store_true", help="exit with 1 if missed")
    parser.add_argument("--target", type=float, default=TARGET_US, help="microseconds")
    options = parser.parse_args()
    if options.check and TARGET_BATCH not in options.batch:
        parser.error(f"--check needs {TARGET_BATCH} among --batch {options.batch}")
    tiny = random_model(TINY_CONFIG)
    model = ModelStep(tiny if options.model == "tiny" else Hollow(tiny))
    lines = []
    for batch in options.batch:
        line = measure(model, options, batch)
        lines.append(line)
        parts = ", ".join(f"{part} {line[f'{part}_us_median']:.1f}" for part in PARTS)
        text = (
            f"{line['case']:>9}: {line['overhead_us_median']:.1f} us a step ({parts})"
        )
        print(json.dumps(line) if options.json else text, flush=True)
    if options.check and (sentences := missed(lines, options.target)):
        sys.exit("\n".join(sentences))


if __name__ == "__main__":
    main()
