"""Each model's whole step works in place, for a CPU and for an H200."""

from typing import Any

import jax
import pytest

from jaxcache.inputs.buckets import Bucket
from jaxcache.layouts import CacheLayout
from jaxcache.models import load_model, parameter_shardings
from tests.device.proofs import TARGETS, large_cache, mesh, prove
from tests.models.driver import BUCKETS, step_function
from tests.models.golden import FOLDER, NAMES

MIXED = BUCKETS.select(1, 1, 1)
DECODE = BUCKETS.select(1, 0, 0)


# The mixed step holds all that the decode step does, so one model's will do for that.
@pytest.mark.parametrize(
    ("name", "bucket"),
    [*((name, MIXED) for name in NAMES), ("nemotron_h", DECODE)],
    ids=[*NAMES, "nemotron_h-decode"],
)
@pytest.mark.parametrize("target", TARGETS)
def test_a_step_of_the_model_copies_no_pool(
    name: str, bucket: Bucket, target: str
) -> None:
    model = load_model(FOLDER / name)
    state = large_cache(CacheLayout(model.layout), max_seqs=4, max_tokens=4096)
    params, step = step_function(model)
    prove(step, abstract(params), state, bucket, target=target)


@pytest.mark.parametrize("target", TARGETS)
def test_a_step_split_over_four_devices_copies_no_pool(target: str) -> None:
    devices = mesh(target, 4)
    model = load_model(FOLDER / "bamba")
    layout = CacheLayout(model.layout, num_shards=4)
    state = large_cache(layout, devices, max_seqs=4)
    params, step = step_function(model)
    shardings = parameter_shardings(model, devices)
    split = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        params,
        shardings,
    )
    prove(step, split, state, MIXED, target=target)


def abstract(params: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
