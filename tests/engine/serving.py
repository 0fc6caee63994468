"""Golden checkpoints, and engines of one cache size that share compiled steps."""

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jaxcache.engine import Engine, ModelStep, Request, Result
from jaxcache.inputs.buckets import Buckets
from jaxcache.models import load_model

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "hf_golden"
MODELS = ("bamba", "nemotron_h", "qwen3_next")
# transformers treats a token of this one alike in prefill and in decode, so that the
# golden tokens hold where answers are reused, too.
EXACT = "qwen3_next"

# Two golden requests fit side by side (13 pages each), three do not; what was served
# is evicted soon. A prefill shape of 160 tokens holds the golden prompt whole.
SIZE = {"num_pages": 36, "num_rows": 10, "max_seqs": 4, "max_tokens": 208}
BUCKETS = Buckets(
    decode=(4,), prefill_tokens=(16, 160), max_prefill_seqs=4, max_snapshots=8
)


@dataclasses.dataclass(frozen=True, eq=False)
class Golden:
    """A checkpoint and what transformers computes with it."""

    name: str
    prompt: np.ndarray
    generated: tuple[int, ...]
    step: ModelStep

    def engine(self, **options: Any) -> Engine:
        settings = {**SIZE, "buckets": BUCKETS, "token_budget": 160, **options}
        return Engine(self.step, **settings)


@functools.cache
def load_golden(name: str) -> Golden:
    """One `ModelStep` a checkpoint and session: at most five compilations each."""
    tensors = load_file(GOLDEN / name / "golden.safetensors")
    return Golden(
        name,
        tensors["prompt"],
        tuple(tensors["generated"].tolist()),
        ModelStep(load_model(GOLDEN / name, match_transformers=True)),
    )


def make_prompt(seed: int, length: int) -> np.ndarray:
    """A prompt of random bytes."""
    return np.random.default_rng(seed).integers(0, 256, length, np.int32)


def serve_and_watch(engine: Engine, request: Request) -> tuple[Result, list[int], int]:
    """Serves one request; returns also the pages and the row that it wrote last.

    What they hold stays until the engine has need of them.
    """
    engine.submit(request)
    finished: tuple[Result, ...] = ()
    while not finished:
        if request.id in engine.manager:
            (seat,) = engine.manager.seats_of([request.id])
        finished = engine.step().finished
    (result,) = finished
    state = engine.pipeline.state
    (pages,) = np.asarray(state.page_table)[:, seat]
    num_tokens = result.prompt_tokens + len(result.tokens) - 1
    num_pages = -(-num_tokens // state.layout.tokens_per_page)
    return result, pages[:num_pages].tolist(), int(state.row_index[1, seat])
