"""How a mesh splits the weights of a model."""

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxcache.models import (
    TINY_CONFIG,
    parameter_shardings,
    place_model,
    random_model,
)


def mesh(num_devices: int, axis: str = "tensor") -> Mesh:
    return Mesh(np.array(jax.devices()[:num_devices]), (axis,))


def test_heads_are_split_where_they_divide_and_repeated_where_not() -> None:
    model = random_model(TINY_CONFIG)
    shardings: Any = parameter_shardings(model, mesh(4))
    attention, mamba = shardings["layers"][2]["mixer"], shardings["layers"][0]["mixer"]
    split, whole = PartitionSpec("tensor"), PartitionSpec()
    assert attention["query"].get_value().spec == split
    assert attention["out"].get_value().spec == PartitionSpec(None, "tensor")
    # Two KV heads and two B/C groups do not divide by four.
    assert attention["key"].get_value().spec == whole
    assert mamba["b"]["weight"].get_value().spec == whole
    assert mamba["x"]["conv"].get_value().spec == split
    assert mamba["a_log"].get_value().spec == split
    assert shardings["embedding"].get_value().spec == whole
    assert shardings["head"].get_value().spec == split


def test_a_placed_model_holds_its_weights_split() -> None:
    model = random_model(TINY_CONFIG)
    attention: Any = model.layers[2].mixer
    before = np.asarray(attention.query[...])
    place_model(model, mesh(2))
    query = attention.query[...]
    assert [shard.data.shape for shard in query.addressable_shards] == [(2, 16, 64)] * 2
    np.testing.assert_array_equal(query, before)
    leaves = jax.tree.leaves(nnx.state(model))
    assert all(len(leaf.sharding.device_set) == 2 for leaf in leaves)


def test_every_weight_but_the_embedding_and_the_norms_can_be_split() -> None:
    flat = nnx.to_flat_state(parameter_shardings(random_model(TINY_CONFIG), mesh(2)))
    whole = {path[-1] for path, v in flat if v.get_value().spec == PartitionSpec()}
    assert whole == {"embedding", "scale"}


def test_a_mesh_that_does_not_fit_is_refused() -> None:
    model = random_model(TINY_CONFIG)
    with pytest.raises(ValueError, match=r"tensor_axis must be one of .*'data'"):
        parameter_shardings(model, mesh(2, "data"))
    explicit = jax.make_mesh(
        (2,), ("tensor",), axis_types=(jax.sharding.AxisType.Explicit,)
    )
    with pytest.raises(ValueError, match="mesh must have axes of type Auto"):
        random_model(TINY_CONFIG, mesh=explicit)
