"""Root mean square normalization."""

from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcache.models.checkpoint import Weights
from jaxcache.models.parameters import parameter


def normalize(
    values: jax.Array, eps: float, axes: int | tuple[int, ...] = -1
) -> jax.Array:
    """Divides by the root of the mean square over `axes`."""
    mean_square = jnp.mean(values * values, axis=axes, keepdims=True)
    return values * jax.lax.rsqrt(mean_square + eps)


class RMSNorm(nnx.Module):
    """Normalizes the last axis and scales it."""

    def __init__(self, scale: np.ndarray[Any, Any], eps: float) -> None:
        """Takes the scale, `f32[dim]`."""
        self.scale = parameter(scale)
        self.eps = eps

    @classmethod
    def read(cls, weights: Weights, eps: float, name: str, dim: int) -> Self:
        """Reads the norm `name`, whose tensor is the scale."""
        return cls(weights.read(f"{name}.weight", dim), eps)

    @classmethod
    def read_centred(cls, weights: Weights, eps: float, name: str, dim: int) -> Self:
        """Reads the norm `name`, whose tensor is the scale less one."""
        return cls(1.0 + weights.read(f"{name}.weight", dim), eps)

    def __call__(self, values: jax.Array) -> jax.Array:
        """Normalizes `f32[..., dim]`."""
        scale = self.scale[...]
        shaped = scale.reshape((1,) * (values.ndim - 1) + scale.shape)
        return normalize(values, self.eps) * shaped
