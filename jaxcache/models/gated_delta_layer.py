"""The gated delta net layer: rows in, chunked scan or one step, rows and snapshots."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcache.device import pools
from jaxcache.device.state import CacheState
from jaxcache.layouts.roles import CONV_K, CONV_Q, CONV_V, SSM
from jaxcache.models.checkpoint import Weights
from jaxcache.models.contractions import contract, expand_units, fold_units
from jaxcache.models.gated_delta import gated_delta_token, gated_delta_tokens
from jaxcache.models.normalization import RMSNorm
from jaxcache.models.parameters import parameter
from jaxcache.models.projection import ConvolvedProjection
from jaxcache.models.step_context import StepContext

# As in flash-linear-attention, whose kernels the checkpoints were trained with.
_UNIT_EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedDeltaShape:
    """Sizes of a gated delta net layer.

    Attributes:
        dim: Hidden size of the model.
        key_heads: Heads of queries and keys.
        value_heads: Heads of values and of the state.
        key_dim: Elements of a key.
        value_dim: Elements of a value.
        conv_kernel: Taps of the convolution.
        norm_eps: Added to the mean square of the gated normalization.
    """

    dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    norm_eps: float


class GatedDelta(nnx.Module):
    """A gated delta net mixer, its fused projections split by section and head."""

    def __init__(
        self, layer_id: int, shape: GatedDeltaShape, weights: Weights, name: str
    ) -> None:
        """Reads the weights of one layer.

        Args:
            layer_id: The layer's id in the cache layout.
            shape: Sizes.
            weights: Where the tensors come from.
            name: What the names of the layer's tensors start with.
        """
        dim, taps = shape.dim, shape.conv_kernel
        key_heads, value_heads = shape.key_heads, shape.value_heads
        keys, values = key_heads * shape.key_dim, value_heads * shape.value_dim

        # Both fused projections run over key heads first: a key head's query, key,
        # values and gates, then the next key head's.
        qkvz = weights.read(
            f"{name}.in_proj_qkvz.weight", 2 * keys + 2 * values, dim
        ).reshape(key_heads, -1, dim)
        shared = values // key_heads
        query, key, value, gate = np.split(
            qkvz, np.cumsum((shape.key_dim, shape.key_dim, shared)), axis=1
        )
        ba = weights.read(f"{name}.in_proj_ba.weight", 2 * value_heads, dim)
        beta, decay = np.split(ba.reshape(key_heads, -1, dim), 2, axis=1)
        conv = weights.read(f"{name}.conv1d.weight", 2 * keys + values, 1, taps)
        conv_q, conv_k, conv_v = np.split(conv[:, 0], (keys, 2 * keys))

        def section(
            weight: np.ndarray[Any, Any], conv: np.ndarray[Any, Any], units: int
        ) -> ConvolvedProjection:
            return ConvolvedProjection(
                weight.reshape(units, -1, dim), conv.reshape(units, -1, taps)
            )

        out = weights.read(f"{name}.out_proj.weight", dim, values)
        self.layer_id = layer_id
        self.shape = shape
        self.query = section(query, conv_q, key_heads)
        self.key = section(key, conv_k, key_heads)
        self.value = section(value, conv_v, value_heads)
        self.gate = parameter(gate.reshape(value_heads, -1, dim), split_axis=0)
        self.beta = parameter(beta.reshape(value_heads, dim), split_axis=0)
        self.decay = parameter(decay.reshape(value_heads, dim), split_axis=0)
        self.dt_bias = parameter(
            weights.read(f"{name}.dt_bias", value_heads), split_axis=0
        )
        self.a_log = parameter(weights.read(f"{name}.A_log", value_heads), split_axis=0)
        self.norm = RMSNorm.read(
            weights, shape.norm_eps, f"{name}.norm", shape.value_dim
        )
        self.out = parameter(out.reshape(dim, value_heads, -1), split_axis=1)

    def __call__(
        self, state: CacheState, step: StepContext, hidden: jax.Array
    ) -> tuple[CacheState, jax.Array]:
        """Mixes `f32[T, dim]` along each sequence and moves its row on."""
        state, rows = pools.read_rows(state, self.layer_id, step.inputs.state_read)
        query = self.query(step, hidden, rows[CONV_Q])
        key = self.key(step, hidden, rows[CONV_K])
        value = self.value(step, hidden, rows[CONV_V])
        beta = jax.nn.sigmoid(contract("td,hd->th", hidden, self.beta[...]))
        dt = contract("td,hd->th", hidden, self.decay[...]) + self.dt_bias[...][None]
        log_decay = -jnp.exp(self.a_log[...])[None] * jax.nn.softplus(dt)

        # The cache may hold more heads than the model, each then a copy.
        num_units = rows[SSM].shape[1]
        beta = expand_units(beta, num_units, axis=1)
        log_decay = expand_units(log_decay, num_units, axis=1)
        initial = rows[SSM].astype(jnp.float32)

        num_decode, table = step.num_decode, step.chunks
        q, k, v = _unit(query.tokens), _unit(key.tokens), value.tokens
        q = q * self.shape.key_dim**-0.5
        y, states = gated_delta_token(
            q[:num_decode],
            k[:num_decode],
            v[:num_decode],
            log_decay[:num_decode],
            beta[:num_decode],
            initial[:num_decode],
        )
        if table is not None:
            y_prefill, kept = gated_delta_tokens(
                q[num_decode:],
                k[num_decode:],
                v[num_decode:],
                log_decay[num_decode:],
                beta[num_decode:],
                initial[num_decode:],
                table,
            )
            y = jnp.concatenate([y, y_prefill])
            states = jnp.concatenate([states, kept])
        values = {
            CONV_Q: query.windows,
            CONV_K: key.windows,
            CONV_V: value.windows,
            SSM: states,
        }
        state = pools.write_rows(state, self.layer_id, step.rows_written, values)

        y = fold_units(y, self.shape.value_heads, axis=1)
        gate = contract("td,hkd->thk", hidden, self.gate[...])
        y = self.norm(y) * jax.nn.silu(gate)
        return state, contract("thk,dhk->td", y, self.out[...])


def _unit(values: jax.Array) -> jax.Array:
    """Scales each head to unit length; zeros stay zeros."""
    square = jnp.sum(values * values, axis=-1, keepdims=True)
    return values * jax.lax.rsqrt(square + _UNIT_EPS)
