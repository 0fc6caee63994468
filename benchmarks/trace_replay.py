"""Which share of a production trace's prompt tokens does the manager serve from cache?

Requests come strictly one after the other, in the order of their timestamps, through
the real manager, without a model. All of `--memory` is pages and rows, the running
request's included; the split is one row for `--tokens-per-row` tokens of pages. A
prompt is prefilled in chunks of 8,192 tokens; every generated token is one step.

The trace is JSON lines with `timestamp`, `input_length`, `output_length` and
`hash_ids`, one id for each 512 tokens of the prompt. Hash id h stands for the tokens
`default_rng(h).integers(3, 2**17, 512)`; the answer of request i for
`default_rng(10**9 + i).integers(3, 2**17, n)`. Read plainly, no later prompt contains
generated tokens, since the hash of a conversation's last block changes when the next
turn fills it. `--linked` repairs that: where a prompt leaves an earlier one exactly at
that one's last, partial block, its new blocks begin with the earlier prompt's partial
tokens and its answer. `--thin N` keeps one in N sessions.
"""

import argparse
import functools
import json
import pathlib
import resource
import sys
import time
from typing import Any

import numpy as np

from jaxcache import Buckets, CacheManager, Learned, Lru, PolicyMaker
from jaxcache.layouts import (
    CacheLayout,
    CacheSize,
    FullAttention,
    GatedDeltaNet,
    Layer,
    Mamba2,
    ModelLayout,
)

BLOCK = 512
PAGE = 16
CHUNK = 8192
GIB = 2**30

POLICIES: dict[str, PolicyMaker] = {"learned": Learned, "lru": Lru}


def nemotron() -> ModelLayout:
    """4 attention layers of 8 heads of 128, 24 Mamba-2 layers."""
    mamba = Mamba2(
        num_heads=128, head_dim=64, num_groups=8, state_dim=128, conv_kernel=4
    )
    attention = FullAttention(kv_heads=8, head_dim=128)
    kinds = [attention] * 4 + [mamba] * 24
    return ModelLayout("nemotron", tuple(map(Layer, range(len(kinds)), kinds)))


def qwen() -> ModelLayout:
    """12 attention layers of one head of 256, 36 gated delta nets."""
    delta = GatedDeltaNet(
        num_key_heads=4,
        num_value_heads=8,
        key_head_dim=128,
        value_head_dim=128,
        conv_kernel=4,
    )
    attention = FullAttention(kv_heads=1, head_dim=256)
    kinds = [attention] * 12 + [delta] * 36
    return ModelLayout("qwen", tuple(map(Layer, range(len(kinds)), kinds)))


MODELS = {"nemotron": nemotron, "qwen": qwen}


class Trace:
    """Requests of a trace, as tokens."""

    def __init__(self, path: pathlib.Path, *, linked: bool, thin: int) -> None:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows.sort(key=lambda row: row["timestamp"])
        for index, row in enumerate(rows):
            row["index"] = index
        if thin > 1:
            # The second block names the session; the first is a common beginning.
            rows = [
                row
                for row in rows
                if row["hash_ids"][min(1, len(row["hash_ids"]) - 1)] % thin == 0
            ]
        self.rows = rows
        self._blocks = functools.cache(_block)
        self._linked: dict[int, np.ndarray] = {}
        if linked:
            self._link()

    def _link(self) -> None:
        """Lets prompts that go on from an earlier one contain its answer."""
        seen: set[int] = set()
        last: dict[int, int] = {}
        for number, row in enumerate(self.rows):
            ids, length = row["hash_ids"], row["input_length"]
            new = next((at for at, h in enumerate(ids) if h not in seen), len(ids))
            before = last.get(ids[new - 1]) if 2 <= new < len(ids) else None
            if before is not None:
                earlier = self.rows[before]
                if earlier["input_length"] + earlier["output_length"] <= length:
                    begin = self.prompt(before)[new * BLOCK :]
                    self._begin_with(ids[new:], begin, self.answer(before))
            seen.update(ids)
            full = length // BLOCK
            if full and length % BLOCK:
                last[ids[full - 1]] = number

    def _begin_with(self, ids: list[int], *parts: np.ndarray) -> None:
        head = np.concatenate(parts)
        if not len(head):
            return
        flat = np.concatenate([self._tokens_of(h) for h in ids])
        flat[: len(head)] = head
        for h, block in zip(ids, flat.reshape(-1, BLOCK), strict=True):
            self._linked[h] = block

    def _tokens_of(self, hash_id: int) -> np.ndarray:
        linked = self._linked.get(hash_id)
        return self._blocks(hash_id) if linked is None else linked

    def prompt(self, number: int) -> np.ndarray:
        row = self.rows[number]
        blocks = [self._tokens_of(hash_id) for hash_id in row["hash_ids"]]
        return np.concatenate(blocks)[: row["input_length"]]

    def answer(self, number: int) -> np.ndarray:
        row = self.rows[number]
        return _draw(10**9 + row["index"], row["output_length"])


def _block(hash_id: int) -> np.ndarray:
    return _draw(hash_id, BLOCK)


def _draw(seed: int, count: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    tokens: np.ndarray = rng.integers(3, 2**17, count, dtype=np.int32)
    return tokens


def make_manager(options: argparse.Namespace, trace: Trace) -> CacheManager:
    layout = CacheLayout(MODELS[options.model](), PAGE)
    row, page = layout.bytes_per_row, layout.bytes_per_page(0)
    memory = int(options.memory * GIB)
    share = row / (row + options.tokens_per_row * page / PAGE)
    num_rows = int(memory * share) // row
    num_pages = (memory - num_rows * row) // page
    longest = max(r["input_length"] + r["output_length"] for r in trace.rows)
    size = CacheSize.create(
        layout, num_pages, num_rows, max_seqs=1, max_tokens=longest + 1
    )
    buckets = Buckets(
        (2,), (CHUNK,), max_prefill_seqs=2, max_snapshots=32, max_copies=2
    )
    return CacheManager(layout, size, buckets, eviction=POLICIES[options.policy])


def serve(manager: CacheManager, number: int, trace: Trace) -> int:
    """Serves one request; returns the tokens that it reused."""
    prompt, answer = trace.prompt(number), trace.answer(number)
    reused = manager.add(number, prompt).reused_tokens
    while manager.remaining(number):
        plan = manager.plan([(number, CHUNK)])
        manager.complete(plan, answer[:1])
    work = [(number, 1)]
    for at in range(1, len(answer)):
        manager.complete(manager.plan(work), answer[at : at + 1])
    manager.finish(number)
    return reused


def run(options: argparse.Namespace) -> dict[str, Any]:
    trace = Trace(options.trace, linked=options.linked, thin=options.thin)
    manager = make_manager(options, trace)
    reused = prompt_tokens = 0
    began = shown = time.perf_counter()
    spent = 0.0
    for number, row in enumerate(trace.rows):
        start = time.perf_counter()
        reused += serve(manager, number, trace)
        spent += time.perf_counter() - start
        prompt_tokens += row["input_length"]
        if not options.json and time.perf_counter() - shown > 2:
            shown = time.perf_counter()
            print(
                f"\r{number + 1}/{len(trace.rows)} requests, token hit "
                f"{100 * reused / prompt_tokens:.2f} %",
                end="",
                file=sys.stderr,
            )
    manager.check()
    stats = manager.stats
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "benchmark": "trace_replay",
        "trace": options.trace.stem,
        "model": options.model,
        "memory_gib": options.memory,
        "thin": options.thin,
        "linked": options.linked,
        "policy": options.policy,
        "requests": len(trace.rows),
        "prompt_tokens": prompt_tokens,
        "token_hit_percent": 100 * reused / prompt_tokens,
        "snapshots_taken": dict(stats.snapshots),
        "snapshots_evicted": stats.snapshots_evicted,
        "snapshots_skipped": dict(stats.snapshots_skipped),
        "rows": stats.rows.total,
        "pages": stats.pages[0].total,
        "tokens_per_row": options.tokens_per_row,
        "host_seconds": spent,
        "seconds": time.perf_counter() - began,
        "peak_memory_mib": peak / 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace", type=pathlib.Path, required=True)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--memory", type=float, required=True, metavar="GIB")
    parser.add_argument("--thin", type=int, default=1, help="one in so many sessions")
    parser.add_argument("--linked", action="store_true", help="answers come back")
    parser.add_argument("--policy", choices=POLICIES, default="learned")
    parser.add_argument("--tokens-per-row", type=int, default=16_384)
    parser.add_argument("--json", action="store_true", help="one JSON line")
    options = parser.parse_args()
    line = run(options)
    if options.json:
        print(json.dumps(line))
    else:
        print(file=sys.stderr)
        for name, value in line.items():
            print(f"{name:20} {value}")


if __name__ == "__main__":
    main()
