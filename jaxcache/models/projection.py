"""A projection and a depthwise convolution: one section of a recurrent layer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcache.models.contractions import contract, expand_units
from jaxcache.models.convolution import convolve_token, convolve_tokens
from jaxcache.models.parameters import parameter
from jaxcache.models.step_context import StepContext


@dataclasses.dataclass(frozen=True, eq=False)
class Section:
    """What one section of a recurrent layer's inputs became.

    Attributes:
        tokens: `f32[T, units, dim]`.
        windows: `f32[D + P + M, units, dim, K - 1]`, in the order of `rows_written`.
    """

    tokens: jax.Array
    windows: jax.Array


class ConvolvedProjection(nnx.Module):
    """`silu(conv(project(x)))` of one section, for example x, B or C of Mamba-2."""

    def __init__(
        self,
        weight: np.ndarray[Any, Any],
        conv: np.ndarray[Any, Any],
        bias: np.ndarray[Any, Any] | None = None,
    ) -> None:
        """Takes the weights of the section.

        Args:
            weight: `f32[units, unit_dim, dim]`.
            conv: `f32[units, unit_dim, K]`, oldest tap first.
            bias: `f32[units, unit_dim]` or None.
        """
        self.weight = parameter(weight, split_axis=0)
        self.conv = parameter(conv, split_axis=0)
        self.bias = None if bias is None else parameter(bias, split_axis=0)

    def __call__(
        self, step: StepContext, hidden: jax.Array, windows: jax.Array
    ) -> Section:
        """Projects and convolves every token of the step.

        Args:
            step: The step.
            hidden: `f32[T, dim]`.
            windows: `[D + P, units, unit_dim, K - 1]`, as read from the cache; its unit
                count is the one that is computed with.
        """
        inputs = contract("td,ukd->tuk", hidden, self.weight[...])
        # As the cache will hold it, so that a window read back is the window passed on.
        inputs = inputs.astype(windows.dtype).astype(jnp.float32)
        windows = windows.astype(jnp.float32)
        num_units, num_decode = windows.shape[1], step.num_decode
        inputs = expand_units(inputs, num_units, axis=1)
        conv = expand_units(self.conv[...], num_units, axis=0)
        bias = None
        if self.bias is not None:
            bias = expand_units(self.bias[...], num_units, axis=0)

        outputs, written = convolve_token(
            inputs[:num_decode], windows[:num_decode], conv, bias
        )
        if step.chunks is not None:
            prefilled, kept = convolve_tokens(
                inputs[num_decode:], windows[num_decode:], conv, bias, step.chunks
            )
            outputs = jnp.concatenate([outputs, prefilled])
            written = jnp.concatenate([written, kept])
        return Section(jax.nn.silu(outputs), written)
