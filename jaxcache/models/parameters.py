"""Weights of a model: how they are held, and how a mesh splits them.

A weight keeps its heads, groups or channels on an axis of their own, and says which
axis that is. Tensor parallelism splits that axis where it divides, and repeats the
weight where it does not (two KV heads on four devices).
"""

from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcache.layouts.arguments import check_kind


def parameter(
    value: np.ndarray[Any, Any], *, split_axis: int | None = None
) -> nnx.Param[Any]:
    """Wraps a weight; it stays on the host until `place_model`.

    Args:
        value: The weight.
        split_axis: The axis that tensor parallelism splits; None for a weight that
            every device needs whole.
    """
    return nnx.Param(np.ascontiguousarray(value), split_axis=split_axis)


def parameter_shardings(
    model: nnx.Module, mesh: Mesh, tensor_axis: str = "tensor"
) -> nnx.State[Any, Any]:
    """Returns the sharding of every weight, in the tree of `nnx.split(model)[1]`.

    Args:
        model: The model.
        mesh: Any mesh with the tensor axis; other axes repeat the weights.
        tensor_axis: Name of that axis.

    Raises:
        ValueError: if the mesh has no such axis, or if its axes are of another type
            than Auto: these models leave the splitting of activations to the compiler.
    """
    check_kind("mesh", mesh, Mesh)
    if tensor_axis not in mesh.axis_names:
        raise ValueError(
            f"tensor_axis must be one of the mesh's axes {mesh.axis_names}, "
            f"got {tensor_axis!r}"
        )
    if set(mesh.axis_types) != {AxisType.Auto}:
        raise ValueError(
            "mesh must have axes of type Auto, as jax.sharding.Mesh makes them (and "
            f"jax.make_mesh with axis_types), got {mesh.axis_types}"
        )
    num_shards = mesh.shape[tensor_axis]

    def sharding(variable: Any) -> Any:
        axis = variable.get_metadata("split_axis")
        spec = PartitionSpec()
        if axis is not None and variable.shape[axis] % num_shards == 0:
            spec = PartitionSpec(*[None] * axis, tensor_axis)
        return variable.replace(NamedSharding(mesh, spec))

    shardings: nnx.State[Any, Any] = jax.tree.map(
        sharding, nnx.state(model), is_leaf=_is_variable
    )
    return shardings


def place_model(
    model: nnx.Module, mesh: Mesh | None = None, tensor_axis: str = "tensor"
) -> None:
    """Puts the weights of a model on the device, or splits them over a mesh.

    Args:
        model: The model, updated in place.
        mesh: The mesh that the cache is split over; None for the default device.
        tensor_axis: The axis of the mesh that splits heads.
    """
    weights = nnx.state(model)
    if mesh is None:
        nnx.update(model, jax.device_put(weights))
    else:
        shardings = parameter_shardings(model, mesh, tensor_axis)
        nnx.update(model, jax.device_put(weights, shardings))


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)
