"""How many requests a second does the host manager keep up with?

No model and no device: the manager adds, plans, is told outcomes, and evicts, with its
whole public API. Prompts come in families that share their beginnings, a few more than
one wave holds, so that siblings meet what was published before them. Room is short, so
that eviction never stops.

    lookup    the prefix tree's search for one prompt, timed apart on the warm tree
    admit     `add`, and the first plan of a wave, by request
    commit    `complete` of the prefill steps, by request
    decode    `plan` and `complete` of decode steps, by token
    finish    `finish`, by request
    step      one decode step: half of them take no longer than p50, most than p99
    events    taking what a wave told, with `--events`, by request

`--check` exits with 1 if a target of `TARGETS` is missed.
"""

import argparse
import json
import sys
import time
from typing import Any

import numpy as np

from jaxcache import (
    Buckets,
    CacheManager,
    Learned,
    Lru,
    PolicyMaker,
)
from jaxcache.layouts import (
    CacheLayout,
    CacheSize,
    FullAttention,
    Layer,
    Mamba2,
    ModelLayout,
)

POLICIES: dict[str, PolicyMaker] = {"learned": Learned, "lru": Lru}
TARGETS = {
    "requests_per_s": (10_000, 1),
    "lookup_us": (6, -1),
    "commit_us": (15, -1),
    "decode_us_per_token": (0.4, -1),
    "finish_us": (10, -1),
    "hit": (0.534, 1),
}


def make_layout() -> CacheLayout:
    mamba = Mamba2(num_heads=8, head_dim=8, num_groups=1, state_dim=8, conv_kernel=4)
    layers = (
        Layer(0, FullAttention(kv_heads=1, head_dim=8)),
        Layer(1, mamba),
    )
    return CacheLayout(ModelLayout("hybrid", layers), 16)


def make_prompts(options: argparse.Namespace) -> list[np.ndarray]:
    """Families share their beginnings; every prompt has an end of its own."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, 32_000, (options.families, options.shared), np.int32)
    prompts = []
    for number in range(options.requests):
        length = options.prompt + int(rng.integers(-options.jitter, options.jitter + 1))
        own = rng.integers(0, 32_000, length - options.shared, np.int32)
        prompts.append(np.concatenate((shared[number % options.families], own)))
    return prompts


class Clock:
    """Adds up seconds by name, and notes how long each decode step took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.steps: list[float] = []
        self.step_bytes = 0
        self._began = time.perf_counter()

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self, name: str) -> None:
        spent = time.perf_counter() - self._began
        self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def step_us(self, percent: float) -> float:
        """Returns how many microseconds a decode step took at most, of so many."""
        return 1e6 * float(np.percentile(self.steps, percent)) if self.steps else 0.0


def serve_wave(
    manager: CacheManager,
    wave: range,
    prompts: list[np.ndarray],
    sampled: np.ndarray,
    options: argparse.Namespace,
    clock: Clock,
) -> None:
    clock.start()
    for number in wave:
        manager.add(number, prompts[number])
    clock.stop("admit")
    waiting = list(wave)
    while waiting:
        clock.start()
        plan = manager.plan([(number, options.chunk) for number in waiting])
        clock.stop("admit")
        clock.start()
        manager.complete(plan, sampled[: len(plan.seats)])
        waiting = [number for number in waiting if manager.remaining(number)]
        clock.stop("commit")
    work = [(number, 1) for number in wave]
    count = len(work)
    clock.start()
    before = time.perf_counter()
    for _ in range(options.generated - 1):
        plan = manager.plan(work)
        clock.step_bytes += plan.inputs.packed.nbytes
        manager.complete(plan, sampled[:count])
        now = time.perf_counter()
        clock.steps.append(now - before)
        before = now
    clock.stop("decode")
    clock.start()
    for number in wave:
        manager.finish(number)
    clock.stop("finish")


def measure_lookup(manager: CacheManager, prompts: list[np.ndarray]) -> float:
    """Microseconds of one search, the prompt's conversion left out."""
    finder = manager._core.finder
    data = [prompt.tobytes() for prompt in prompts]
    best = []
    for _ in range(3):
        began = time.perf_counter()
        for each in data:
            finder.find(None, each, copies=True)
        best.append((time.perf_counter() - began) / len(data))
    return 1e6 * min(best)


def run(options: argparse.Namespace) -> dict[str, Any]:
    layout = make_layout()
    longest = options.prompt + options.jitter + options.generated
    size = CacheSize.create(
        layout,
        options.pages,
        options.rows,
        max_seqs=options.wave,
        max_tokens=longest,
    )
    buckets = Buckets(
        decode=(options.wave,),
        prefill_tokens=(options.wave * options.chunk,),
        max_prefill_seqs=options.wave,
        max_snapshots=8 * options.wave,
        max_copies=options.wave,
    )
    manager = CacheManager(layout, size, buckets, eviction=POLICIES[options.policy])
    stream = manager.listen() if options.events else None
    told = 0
    prompts = make_prompts(options)
    sampled = np.arange(options.wave, dtype=np.int32)
    clock = Clock()
    began = time.perf_counter()
    for first in range(0, options.requests, options.wave):
        wave = range(first, min(first + options.wave, options.requests))
        serve_wave(manager, wave, prompts, sampled, options, clock)
        clock.start()
        if stream is not None and (batch := stream.take()) is not None:
            told += len(batch.events)
        clock.stop("events")
    seconds = time.perf_counter() - began
    stats, count = manager.stats, options.requests
    manager.check()
    spent = {name: 1e6 * value / count for name, value in clock.seconds.items()}
    return {
        "benchmark": "host_manager",
        "policy": options.policy,
        "requests": count,
        "prompt": options.prompt,
        "jitter": options.jitter,
        "pages": options.pages,
        "rows": options.rows,
        "requests_per_s": count / seconds,
        "lookup_us": measure_lookup(manager, prompts[-options.families :]),
        "admit_us": spent["admit"],
        "commit_us": spent["commit"],
        "decode_us_per_token": spent["decode"] / (options.generated - 1),
        "step_us_p50": clock.step_us(50),
        "step_us_p99": clock.step_us(99),
        "bytes_per_step": clock.step_bytes / max(1, len(clock.steps)),
        "finish_us": spent["finish"],
        "events": told,
        "events_us": spent["events"],
        "hit": stats.reuse_ratio,
        "snapshots_evicted": stats.snapshots_evicted,
        "columns_evicted": stats.columns_evicted,
    }


def missed(line: dict[str, Any]) -> list[str]:
    """Returns the targets that a run missed."""
    return [
        f"{name} is {line[name]:.4g}, the target {target}"
        for name, (target, sign) in TARGETS.items()
        if sign * line[name] < sign * target
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    parser.add_argument("--check", action="store_true", help="exit 1 if it is slow")
    parser.add_argument("--events", action="store_true", help="somebody listens")
    parser.add_argument("--policy", choices=POLICIES, default="learned")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--jitter", type=int, default=0, help="tokens more or fewer")
    parser.add_argument("--shared", type=int, default=2304)
    parser.add_argument("--families", type=int, default=50)
    parser.add_argument("--generated", type=int, default=64)
    parser.add_argument("--wave", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--pages", type=int, default=40_960)
    parser.add_argument("--rows", type=int, default=800)
    options = parser.parse_args()
    line = run(options)
    if options.json:
        print(json.dumps(line))
    else:
        for name, value in line.items():
            print(f"{name:20} {value}")
    failures = missed(line)
    for failure in failures if options.check else ():
        print(failure, file=sys.stderr)
    sys.exit(int(options.check and bool(failures)))


if __name__ == "__main__":
    main()
