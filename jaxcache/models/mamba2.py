"""The Mamba-2 recurrence: chunked for prefill, one step for decode.

Per head: `h_t = exp(dt_t a) h_{t-1} + dt_t x_t b_t^T` and `y_t = h_t c_t`, with `h` of
`[head_dim, state_dim]` and `a < 0`. Heads share `b` and `c` by groups. With
`G_t = a (dt_1 + ... + dt_t)` counted from the start of a chunk and `S` the state there,

    y_t = exp(G_t) S c_t + sum_{s <= t} exp(G_t - G_s) (c_t . b_s) dt_s x_s
    S'  = exp(G_Q) S + sum_s exp(G_Q - G_s) dt_s x_s b_s^T

and a padding token (`dt = 0`, `x = 0`) is the identity.

Source: Dao and Gu, "Transformers are SSMs" (2024), the state space dual form.
"""

import jax
import jax.numpy as jnp

from jaxcache.models.chunk_scan import scan_chunks
from jaxcache.models.chunks import ChunkTable
from jaxcache.models.contractions import contract
from jaxcache.models.decay import segment_sums


def mamba2_tokens(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    initial: jax.Array,
    table: ChunkTable,
) -> tuple[jax.Array, jax.Array]:
    """Runs the recurrence over the prefill tokens, chunk by chunk.

    Args:
        x: `f32[N, heads, head_dim]`.
        dt: `f32[N, heads]`, step sizes.
        a: `f32[heads]`, negative.
        b: `f32[N, groups, state_dim]`.
        c: Like `b`.
        initial: `f32[P, heads, head_dim, state_dim]`.
        table: The chunk table.

    Returns:
        `f32[N, heads, head_dim]`, and `f32[P + M, heads, head_dim, state_dim]`: the
        state at the end of each entry, then at each snapshot.
    """
    _, num_heads, head_dim = x.shape
    num_groups, state_dim = b.shape[-2:]
    by_group = (num_groups, num_heads // num_groups)
    causal = jnp.tril(jnp.ones((table.chunk_size, table.chunk_size), bool))

    def by_head(values: jax.Array) -> jax.Array:
        """`[B, Q, heads, ...]` to `[B, groups, heads of a group, Q, ...]`."""
        split = values.reshape(*values.shape[:2], *by_group, *values.shape[3:])
        return jnp.moveaxis(split, 1, 3)

    def prepare(
        x: jax.Array, dt: jax.Array, b: jax.Array, c: jax.Array
    ) -> tuple[jax.Array, ...]:
        u = by_head(x * dt[..., None])
        log_decay = by_head(dt * a[None, None])
        between = segment_sums(log_decay)
        into = jnp.exp(log_decay[..., :1] + between[..., :, 0])
        to_end = jnp.exp(between[..., -1, :])
        # Above the diagonal the sums are zero, not the decay.
        weight = jnp.where(causal[None, None, None], jnp.exp(between), 0.0)
        scores = contract("bqgs,bkgs->bgqk", c, b)[:, :, None] * weight
        inside = contract("bgrqk,bgrkp->bgrqp", scores, u)
        return inside, into, u * to_end[..., None], b, c

    def step(
        state: jax.Array, chunk: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        inside, into, u, b, c = chunk
        across = contract("qgs,grps->grqp", c, state) * into[..., None]
        added = contract("grqp,qgs->grps", u, b)
        state = into[..., -1, None, None] * state + added
        return state, jnp.moveaxis(inside + across, 2, 0)

    y, states = scan_chunks(
        table,
        (x, dt, b, c),
        initial.reshape(-1, *by_group, head_dim, state_dim),
        (*by_group, head_dim),
        prepare,
        step,
    )
    return y.reshape(x.shape), states.reshape(-1, num_heads, head_dim, state_dim)


def mamba2_token(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs the recurrence for one token a sequence.

    Args:
        x: `f32[D, heads, head_dim]`.
        dt: `f32[D, heads]`.
        a: `f32[heads]`, negative.
        b: `f32[D, groups, state_dim]`.
        c: Like `b`.
        state: `f32[D, heads, head_dim, state_dim]`.

    Returns:
        `f32[D, heads, head_dim]` and the new state.
    """
    num_seqs, num_heads, head_dim = x.shape
    num_groups, state_dim = b.shape[-2:]
    by_group = (num_seqs, num_groups, num_heads // num_groups)
    grouped = state.reshape(*by_group, head_dim, state_dim)
    u = (x * dt[..., None]).reshape(*by_group, head_dim)
    decay = jnp.exp(dt * a[None]).reshape(by_group)
    grouped = decay[..., None, None] * grouped + contract("ngrp,ngs->ngrps", u, b)
    y = contract("ngrps,ngs->ngrp", grouped, c)
    return y.reshape(x.shape), grouped.reshape(state.shape)
