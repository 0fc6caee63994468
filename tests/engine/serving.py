"""Golden checkpoints, and engines of one cache size that share compiled steps."""

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jaxcache.engine import Engine, ModelStep
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
