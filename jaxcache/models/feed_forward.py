"""Dense feed-forward layers: gated SiLU and squared ReLU."""

import jax
from flax import nnx

from jaxcache.device.state import CacheState
from jaxcache.models.checkpoint import Weights
from jaxcache.models.contractions import contract
from jaxcache.models.parameters import parameter
from jaxcache.models.step_context import StepContext


class GatedFeedForward(nnx.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, weights: Weights, name: str, dim: int, channels: int) -> None:
        """Reads the layer whose tensors start with `name`."""
        gate = weights.read(f"{name}.gate_proj.weight", channels, dim)
        up = weights.read(f"{name}.up_proj.weight", channels, dim)
        down = weights.read(f"{name}.down_proj.weight", dim, channels)
        self.gate = parameter(gate, split_axis=0)
        self.up = parameter(up, split_axis=0)
        self.down = parameter(down, split_axis=1)

    def __call__(
        self, state: CacheState, step: StepContext, hidden: jax.Array
    ) -> tuple[CacheState, jax.Array]:
        """Transforms `f32[T, dim]`; the cache stays as it is."""
        del step
        gate = contract("td,fd->tf", hidden, self.gate[...])
        up = contract("td,fd->tf", hidden, self.up[...])
        return state, contract("tf,df->td", jax.nn.silu(gate) * up, self.down[...])


class SquaredReluFeedForward(nnx.Module):
    """`down(relu(up(x)) ** 2)`."""

    def __init__(self, weights: Weights, name: str, dim: int, channels: int) -> None:
        """Reads the layer whose tensors start with `name`."""
        up = weights.read(f"{name}.up_proj.weight", channels, dim)
        down = weights.read(f"{name}.down_proj.weight", dim, channels)
        self.up = parameter(up, split_axis=0)
        self.down = parameter(down, split_axis=1)

    def __call__(
        self, state: CacheState, step: StepContext, hidden: jax.Array
    ) -> tuple[CacheState, jax.Array]:
        """Transforms `f32[T, dim]`; the cache stays as it is."""
        del step
        up = jax.nn.relu(contract("td,fd->tf", hidden, self.up[...]))
        return state, contract("tf,df->td", up * up, self.down[...])
