"""What does the cache cost where nothing can be reused?

Two engines serve the same prompts, all different: one looks up, takes snapshots,
publishes and evicts, the other has reuse switched off in every request. They share
compiled steps and take turns, round by round; the order within a round alternates. The
ratio of a round is its throughput with the cache over that without.

`--check` exits with 1 if the median misses its target: if its 95 % interval is below.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

from benchmarks.handover import median_interval
from jaxcache import Learned, Lru, PolicyMaker
from jaxcache.engine import Engine, ModelStep, Request
from jaxcache.models import TINY_CONFIG, random_model

POLICIES: dict[str, PolicyMaker] = {"learned": Learned, "lru": Lru}
TARGET = 0.97

# Large enough that a step takes some ten milliseconds on two cores, as a device would.
CONFIG = {
    **TINY_CONFIG,
    "vocab_size": 2048,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "mamba_num_heads": 24,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
}


def make_requests(options: argparse.Namespace, turn: int, reuse: bool) -> list[Request]:
    rng = np.random.default_rng(turn)
    return [
        Request(
            id=number,
            prompt=rng.integers(0, 2048, options.prompt, dtype=np.int32),
            max_new_tokens=options.generated,
            reuse=reuse,
        )
        for number in range(options.requests)
    ]


def run(options: argparse.Namespace) -> dict[str, Any]:
    step = ModelStep(random_model(CONFIG))
    engines = {
        reuse: Engine(
            step,
            max_seqs=options.batch,
            max_tokens=options.prompt + options.generated,
            token_budget=options.budget,
            eviction=POLICIES[options.policy],
        )
        for reuse in (True, False)
    }
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(1 + options.turns):
        for reuse in (True, False) if turn % 2 else (False, True):
            requests = make_requests(options, turn, reuse)
            began = time.perf_counter()
            results = engines[reuse].serve(requests)
            spent = time.perf_counter() - began
            assert not any(result.reused_tokens for result in results)
            # The first turn compiles.
            if turn:
                seconds[reuse].append(spent)
        if not options.json:
            print(f"\rturn {turn} of {options.turns}", end="", file=sys.stderr)
    ratios = [off / on for on, off in zip(seconds[True], seconds[False], strict=True)]
    low, high = median_interval(ratios)
    stats = engines[True].manager.stats
    tokens = options.requests * (options.prompt + options.generated)
    return {
        "benchmark": "cache_cost",
        "policy": options.policy,
        "batch": options.batch,
        "prompt": options.prompt,
        "generated": options.generated,
        "turns": options.turns,
        "tokens_per_s": tokens / statistics.median(seconds[True]),
        "ratio": statistics.median(ratios),
        "ratio_low": low,
        "ratio_high": high,
        "snapshots": sum(stats.snapshots.values()),
        "snapshots_evicted": stats.snapshots_evicted,
        "host_us_per_step": stats.host_us_per_step,
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--check", action="store_true", help="exit 1 below the target")
    parser.add_argument("--policy", choices=POLICIES, default="learned")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=200)
    parser.add_argument("--generated", type=int, default=32)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--turns", type=int, default=12)
    options = parser.parse_args()
    line = run(options)
    if options.json:
        print(json.dumps(line))
    else:
        print(file=sys.stderr)
        for name, value in line.items():
            print(f"{name:20} {value}")
    failed = options.check and line["ratio_high"] < TARGET
    if failed:
        print(f"the ratio is below {TARGET}", file=sys.stderr)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
