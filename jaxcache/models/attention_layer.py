"""The attention layer: keys and values to pages, then attention over the pages."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxcache.device import pools
from jaxcache.device.state import CacheState
from jaxcache.layouts.roles import KEY, VALUE
from jaxcache.models.attention import attend_pages, rotate
from jaxcache.models.checkpoint import Weights
from jaxcache.models.chunks import block_of, chunk_tokens, unchunk_tokens
from jaxcache.models.contractions import contract
from jaxcache.models.normalization import RMSNorm
from jaxcache.models.parameters import parameter
from jaxcache.models.step_context import StepContext


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of part of a head.

    Attributes:
        theta: Base of the frequencies.
        dim: Elements of a head that are rotated.
        restarts: Whether decode tokens are rotated as if they were first tokens. Only
            ever to compare with an implementation that does so.
    """

    theta: float
    dim: int
    restarts: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of an attention layer, and what its architecture adds.

    Attributes:
        dim: Hidden size of the model.
        num_heads: Query heads.
        kv_heads: Heads of keys and values.
        head_dim: Elements of a head.
        rotary: How queries and keys are rotated, if they are.
        is_gated: Whether the query projection holds, after each head's query, a gate on
            what the head returns.
        norm_eps: Queries and keys are normalized with this; None if they are not.
    """

    dim: int
    num_heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary | None = None
    is_gated: bool = False
    norm_eps: float | None = None


class Attention(nnx.Module):
    """Grouped-query attention."""

    def __init__(
        self, layer_id: int, shape: AttentionShape, weights: Weights, name: str
    ) -> None:
        """Reads the weights of one layer.

        Args:
            layer_id: The layer's id in the cache layout.
            shape: Sizes and variants.
            weights: Where the tensors come from.
            name: What the names of the layer's tensors start with.
        """
        dim, head_dim = shape.dim, shape.head_dim

        def read(leaf: str, num_heads: int, size: int) -> np.ndarray[Any, Any]:
            weight = weights.read(f"{name}.{leaf}.weight", num_heads * size, dim)
            return weight.reshape(num_heads, size, dim)

        query = read("q_proj", shape.num_heads, head_dim * (1 + shape.is_gated))
        out = weights.read(f"{name}.o_proj.weight", dim, shape.num_heads * head_dim)
        self.layer_id = layer_id
        self.shape = shape
        self.query = parameter(query[:, :head_dim], split_axis=0)
        self.key = parameter(read("k_proj", shape.kv_heads, head_dim), split_axis=0)
        self.value = parameter(read("v_proj", shape.kv_heads, head_dim), split_axis=0)
        self.out = parameter(out.reshape(dim, -1, head_dim), split_axis=1)
        gate = query[:, head_dim:] if shape.is_gated else None
        self.gate = None if gate is None else parameter(gate, split_axis=0)
        self.query_norm = self._read_norm(weights, f"{name}.q_norm")
        self.key_norm = self._read_norm(weights, f"{name}.k_norm")

    def _read_norm(self, weights: Weights, name: str) -> RMSNorm | None:
        eps = self.shape.norm_eps
        if eps is None:
            return None
        return RMSNorm.read_centred(weights, eps, name, self.shape.head_dim)

    def __call__(
        self, state: CacheState, step: StepContext, hidden: jax.Array
    ) -> tuple[CacheState, jax.Array]:
        """Writes the tokens' keys and values, then attends: `f32[T, dim]` to the same.

        Raises:
            ValueError: if the query heads cannot be shared out over the cache's units.
        """
        queries, keys, values = (
            contract("td,hkd->thk", hidden, weight[...])
            for weight in (self.query, self.key, self.value)
        )
        if self.query_norm is not None and self.key_norm is not None:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        if self.shape.rotary is not None:
            theta, dim = self.shape.rotary.theta, self.shape.rotary.dim
            positions = step.inputs.positions
            if self.shape.rotary.restarts:
                positions = positions.at[: step.num_decode].set(0)
            queries = rotate(queries, positions, theta, dim)
            keys = rotate(keys, positions, theta, dim)
        state = pools.write_tokens(
            state, step.inputs, self.layer_id, {KEY: keys, VALUE: values}
        )
        attended = self._attend(state, step, queries, values.shape[-1])
        state, attended = pools.after_read(state, attended)
        if self.gate is not None:
            gate = contract("td,hkd->thk", hidden, self.gate[...])
            attended = attended * jax.nn.sigmoid(gate)
        return state, contract("thk,dhk->td", attended, self.out[...])

    def _attend(
        self, state: CacheState, step: StepContext, queries: jax.Array, value_dim: int
    ) -> jax.Array:
        """Attends `f32[T, heads, head_dim]`: decode by entry, others by chunk."""
        layout, layer_id, inputs = state.layout, self.layer_id, step.inputs
        num_tokens, num_heads, head_dim = queries.shape
        num_units = layout.cache_units(layer_id, KEY)
        if num_heads % num_units:
            raise ValueError(
                f"the {num_heads} query heads of layer {layer_id} cannot be shared out "
                f"over the {num_units} KV units of the cache; use fewer shards"
            )
        by_unit = (num_units, num_heads // num_units, head_dim)
        queries = (queries * head_dim**-0.5).reshape(num_tokens, *by_unit)
        page_table = inputs.page_tables[layout.group_of(layer_id, KEY)]

        def read_pages(page_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            return (
                pools.read_pages(state, layer_id, KEY, page_ids),
                pools.read_pages(state, layer_id, VALUE, page_ids),
            )

        attend = functools.partial(
            attend_pages,
            read_pages=read_pages,
            page_table=page_table,
            tokens_per_page=layout.tokens_per_page,
            value_dim=value_dim,
        )
        num_decode, table = step.num_decode, step.chunks
        parts = []
        if num_decode:
            valid = inputs.token_valid[:num_decode]
            positions = jnp.where(valid, inputs.context_lens[:num_decode], -1)
            rows = jnp.arange(num_decode, dtype=jnp.int32)
            attended = attend(queries[:num_decode, None], positions[:, None], rows)
            parts.append(attended[:, 0])
        if table is not None:
            prefilled = queries[num_decode:]

            def attend_block(block: jax.Array, attended: jax.Array) -> jax.Array:
                rows = attend(
                    chunk_tokens(table, prefilled, block),
                    block_of(table.positions, block),
                    block_of(table.entry, block) + num_decode,
                )
                start = block * rows.shape[0]
                return jax.lax.dynamic_update_slice_in_dim(attended, rows, start, 0)

            shape = (table.num_chunks, table.chunk_size, *by_unit[:2], value_dim)
            attended = jax.lax.fori_loop(
                0, table.num_blocks, attend_block, jnp.zeros(shape, jnp.float32)
            )
            parts.append(unchunk_tokens(table, attended))
        return jnp.concatenate(parts).reshape(num_tokens, num_heads, value_dim)
