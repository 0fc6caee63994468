"""The Mamba-2 layer: rows in, chunked scan or one step, rows and snapshots out."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcache.device import pools
from jaxcache.device.state import CacheState
from jaxcache.layouts.roles import CONV_B, CONV_C, CONV_X, SSM
from jaxcache.models.checkpoint import Weights
from jaxcache.models.contractions import contract, expand_units, fold_units
from jaxcache.models.mamba2 import mamba2_token, mamba2_tokens
from jaxcache.models.normalization import normalize
from jaxcache.models.parameters import parameter
from jaxcache.models.projection import ConvolvedProjection
from jaxcache.models.step_context import StepContext


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Shape:
    """Sizes of a Mamba-2 layer.

    Attributes:
        dim: Hidden size of the model.
        num_heads: SSM heads.
        head_dim: Channels of a head.
        num_groups: Groups of heads that share B and C.
        state_dim: State elements of a channel.
        conv_kernel: Taps of the convolution.
        has_conv_bias: Whether the convolution adds a bias.
        dt_limit: Smallest and largest step size.
        prefill_dt_limit: The same for prefill tokens. It differs only to compare with
            an implementation that has two.
        norm_groups: Groups of heads that the gated normalization treats apart.
        norm_eps: Added to its mean square.
    """

    dim: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    conv_kernel: int
    has_conv_bias: bool
    dt_limit: tuple[float, float]
    prefill_dt_limit: tuple[float, float]
    norm_groups: int
    norm_eps: float


class Mamba2(nnx.Module):
    """A Mamba-2 mixer, its fused projections split by section and head."""

    def __init__(
        self, layer_id: int, shape: Mamba2Shape, weights: Weights, name: str
    ) -> None:
        """Reads the weights of one layer.

        Args:
            layer_id: The layer's id in the cache layout.
            shape: Sizes.
            weights: Where the tensors come from.
            name: What the names of the layer's tensors start with.
        """
        dim, heads, head_dim = shape.dim, shape.num_heads, shape.head_dim
        inner, grouped = heads * head_dim, shape.num_groups * shape.state_dim
        channels = inner + 2 * grouped
        fused = weights.read(f"{name}.in_proj.weight", inner + channels + heads, dim)
        conv = weights.read(
            f"{name}.conv1d.weight", channels, 1, shape.conv_kernel
        ).reshape(channels, shape.conv_kernel)
        bias = None
        if shape.has_conv_bias:
            bias = weights.read(f"{name}.conv1d.bias", channels)
        gate, x, b, c, dt = np.split(fused, np.cumsum((inner, inner, grouped, grouped)))
        at_x, at_b, at_c = (
            slice(0, inner),
            slice(inner, inner + grouped),
            slice(inner + grouped, channels),
        )

        def section(
            weight: np.ndarray[Any, Any], at: slice, units: int
        ) -> ConvolvedProjection:
            return ConvolvedProjection(
                weight.reshape(units, -1, dim),
                conv[at].reshape(units, -1, shape.conv_kernel),
                None if bias is None else bias[at].reshape(units, -1),
            )

        norm = weights.read(f"{name}.norm.weight", inner)
        out = weights.read(f"{name}.out_proj.weight", dim, inner)
        self.layer_id = layer_id
        self.shape = shape
        self.x = section(x, at_x, heads)
        self.b = section(b, at_b, shape.num_groups)
        self.c = section(c, at_c, shape.num_groups)
        self.gate = parameter(gate.reshape(heads, head_dim, dim), split_axis=0)
        self.dt = parameter(dt, split_axis=0)
        self.dt_bias = parameter(weights.read(f"{name}.dt_bias", heads), split_axis=0)
        self.a_log = parameter(weights.read(f"{name}.A_log", heads), split_axis=0)
        self.skip = parameter(weights.read(f"{name}.D", heads), split_axis=0)
        self.norm = parameter(norm.reshape(heads, head_dim), split_axis=0)
        self.out = parameter(out.reshape(dim, heads, head_dim), split_axis=1)

    def __call__(
        self, state: CacheState, step: StepContext, hidden: jax.Array
    ) -> tuple[CacheState, jax.Array]:
        """Mixes `f32[T, dim]` along each sequence and moves its row on."""
        state, rows = pools.read_rows(state, self.layer_id, step.inputs.state_read)
        x = self.x(step, hidden, rows[CONV_X])
        b = self.b(step, hidden, rows[CONV_B])
        c = self.c(step, hidden, rows[CONV_C])
        dt = contract("td,hd->th", hidden, self.dt[...]) + self.dt_bias[...][None]
        dt = jax.nn.softplus(dt)
        num_decode, table = step.num_decode, step.chunks
        decode_dt = jnp.clip(dt[:num_decode], *self.shape.dt_limit)
        prefill_dt = jnp.clip(dt[num_decode:], *self.shape.prefill_dt_limit)

        # The cache may hold more heads than the model, each then a copy.
        num_units = rows[SSM].shape[1]
        decode_dt = expand_units(decode_dt, num_units, axis=1)
        prefill_dt = expand_units(prefill_dt, num_units, axis=1)
        a = expand_units(-jnp.exp(self.a_log[...]), num_units, axis=0)
        skip = expand_units(self.skip[...], num_units, axis=0)[None, :, None]
        initial = rows[SSM].astype(jnp.float32)

        x_, b_, c_ = (part.tokens[:num_decode] for part in (x, b, c))
        y, states = mamba2_token(x_, decode_dt, a, b_, c_, initial[:num_decode])
        if table is not None:
            x_, b_, c_ = (part.tokens[num_decode:] for part in (x, b, c))
            y_prefill, kept = mamba2_tokens(
                x_, prefill_dt, a, b_, c_, initial[num_decode:], table
            )
            y = jnp.concatenate([y, y_prefill])
            states = jnp.concatenate([states, kept])
        y = y + skip * x.tokens
        values = {CONV_X: x.windows, CONV_B: b.windows, CONV_C: c.windows, SSM: states}
        state = pools.write_rows(state, self.layer_id, step.rows_written, values)

        y = fold_units(y, self.shape.num_heads, axis=1)
        gate = contract("td,hkd->thk", hidden, self.gate[...])
        y = self._normalize(y * jax.nn.silu(gate))
        return state, contract("thk,dhk->td", y, self.out[...])

    def _normalize(self, y: jax.Array) -> jax.Array:
        """Normalizes groups of heads of `f32[T, heads, head_dim]`."""
        num_tokens, _, head_dim = y.shape
        grouped = y.reshape(num_tokens, self.shape.norm_groups, -1, head_dim)
        grouped = normalize(grouped, self.shape.norm_eps, axes=(-2, -1))
        return grouped.reshape(y.shape) * self.norm[...][None]
