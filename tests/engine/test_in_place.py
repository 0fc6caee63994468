"""The engine's own step, sampling included, keeps a cache of 1 GiB in place.

It is what `ModelStep` jits. Caches are abstract: nothing is allocated, and the H200 is
compiled for, not run.
"""

import jax
import pytest
from jax.sharding import Mesh

from jaxcache.device.proof import StepReport
from jaxcache.engine import ModelStep
from jaxcache.inputs.buckets import Bucket
from jaxcache.layouts import CacheLayout, Order
from jaxcache.models import TINY_CONFIG, load_model, random_model
from tests.device.proofs import TARGETS, check, devices, large_cache, mesh
from tests.engine.serving import BUCKETS, GOLDEN, MODELS

MIXED, PREFILL, DECODE = (
    BUCKETS.select(decode, prefill, prefill)
    for decode, prefill in ((1, 1), (0, 1), (1, 0))
)


def prove(step: ModelStep, layout: CacheLayout, bucket: Bucket, target: str) -> None:
    state = large_cache(layout, max_seqs=4)
    (device,) = devices(target)
    check_step(step.explain(state, bucket, device=device), target)


def check_step(report: StepReport, target: str) -> None:
    check(report)
    assert ("H200" in report.platform) == (target == "h200")
    # Tokens for the host, `last_tokens`, and nothing else.
    assert report.output_bytes < 2**10


# The mixed step holds all that the others do, so one model's will do for those, and for
# the other slot order.
@pytest.mark.parametrize(
    ("name", "bucket", "order"),
    [
        *((name, MIXED, "units") for name in MODELS),
        ("nemotron_h", MIXED, "buffers"),
        ("bamba", PREFILL, "units"),
        ("nemotron_h", DECODE, "units"),
    ],
    ids=[*MODELS, "nemotron_h-buffers", "bamba-prefill", "nemotron_h-decode"],
)
@pytest.mark.parametrize("target", TARGETS)
def test_the_step_of_a_model_copies_no_pool(
    name: str, bucket: Bucket, order: Order, target: str
) -> None:
    step = ModelStep(load_model(GOLDEN / name))
    prove(step, CacheLayout(step.layout, order=order), bucket, target)


@pytest.mark.parametrize("target", TARGETS)
def test_the_step_split_over_four_devices_copies_no_pool(target: str) -> None:
    cpus = mesh("cpu", 4)
    step = ModelStep(load_model(GOLDEN / "bamba", mesh=cpus), mesh=cpus)
    layout = CacheLayout(step.layout, num_shards=4)
    state = large_cache(layout, mesh(target, 4), max_seqs=4)
    check_step(step.explain(state, MIXED), target)


def test_a_state_on_a_mesh_needs_weights_on_a_mesh() -> None:
    step = ModelStep(random_model(TINY_CONFIG, 3))
    one = Mesh(jax.devices()[:1], ("tensor",))
    state = large_cache(CacheLayout(step.layout), one)
    with pytest.raises(ValueError, match="state must be on one device, like the"):
        step.explain(state, DECODE)
