"""The gated delta rule: chunked for prefill, one step for decode.

Per value head: `h_t = e^{g_t} (I - b_t k_t k_t^T) h_{t-1} + b_t k_t v_t^T` and
`y_t = q_t^T h_t`, with `h` of `[key_dim, value_dim]`, `g_t <= 0`. Value heads share `q`
and `k` by key heads. In a chunk, with `G_t = g_1 + ... + g_t` and `S` the state at its
start, the values that are really added obey

    (I + L) U = diag(b) V - diag(b e^G) K S
    L_ts = b_t e^{G_t - G_s} (k_t . k_s) for s < t, else 0

so `I + L` is inverted once for all chunks in parallel, and the scan only does products:

    y_t = e^{G_t} q_t S + sum_{s <= t} e^{G_t - G_s} (q_t . k_s) U_s
    S'  = e^{G_Q} S + sum_s e^{G_Q - G_s} k_s U_s^T

A padding token (`k = 0`, `b = 0`, `g = 0`) is the identity.

Source: Yang et al., "Gated Delta Networks" (2024).
"""

import jax
import jax.numpy as jnp

from jaxcache.models.chunks import ChunkTable, scan_chunks
from jaxcache.models.contractions import contract
from jaxcache.models.decay import segment_sums


def gated_delta_chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial: jax.Array,
    table: ChunkTable,
) -> tuple[jax.Array, jax.Array]:
    """Runs the recurrence over the chunks of the prefill section.

    Args:
        q: `f32[C, Q, key_heads, key_dim]`, scaled, zeros where padded.
        k: Like `q`, of unit length.
        v: `f32[C, Q, value_heads, value_dim]`, zeros where padded.
        g: `f32[C, Q, value_heads]`, log decay, zeros where padded.
        beta: `f32[C, Q, value_heads]`, zeros where padded.
        initial: `f32[P, value_heads, key_dim, value_dim]`.
        table: The chunk table.

    Returns:
        `f32[C, Q, value_heads, value_dim]`, and
        `f32[P + M, value_heads, key_dim, value_dim]`: the state at the end of each
        entry, then at each snapshot.
    """
    num_chunks, size, num_heads, value_dim = v.shape
    num_groups, key_dim = k.shape[-2:]
    by_group = (num_groups, num_heads // num_groups)

    def by_head(values: jax.Array) -> jax.Array:
        """`[C, Q, value_heads, ...]` to `[C, key_heads, repeats, Q, ...]`."""
        split = values.reshape(num_chunks, size, *by_group, *values.shape[3:])
        return jnp.moveaxis(split, 1, 3)

    log_decay, beta, v = by_head(g), by_head(beta), by_head(v)
    between = segment_sums(log_decay)
    into = jnp.exp(log_decay[..., :1] + between[..., :, 0])
    to_end = jnp.exp(between[..., -1, :])
    # Above the diagonal the sums are zero, not the decay.
    causal = jnp.tril(jnp.ones((size, size), bool))[None, None, None]
    strict = jnp.tril(jnp.ones((size, size), bool), -1)[None, None, None]
    ratio = jnp.where(causal, jnp.exp(between), 0.0)
    keys = contract("cqgd,ckgd->cgqk", k, k)[:, :, None]
    lower = jnp.where(strict, beta[..., None] * ratio * keys, 0.0)
    inverse = invert_unit_lower(lower)
    added = contract("cgrqk,cgrkv->cgrqv", inverse, beta[..., None] * v)
    taken = contract("cgrqk,cgrk,ckgd->cgrqd", inverse, beta * into, k)
    scores = contract("cqgd,ckgd->cgqk", q, k)[:, :, None] * ratio

    def step(
        state: jax.Array, chunk: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        q_, k_, added_, taken_, scores_, into_, to_end_ = chunk
        u = added_ - contract("grqd,grdv->grqv", taken_, state)
        y = contract("qgd,grdv->grqv", q_, state) * into_[..., None]
        y = y + contract("grqk,grkv->grqv", scores_, u)
        new = contract("qgd,grqv->grdv", k_, u * to_end_[..., None])
        return into_[..., -1, None, None] * state + new, y

    grouped = initial.reshape(-1, *by_group, key_dim, value_dim)
    states, y = scan_chunks(
        table, grouped, step, (q, k, added, taken, scores, into, to_end)
    )
    return (
        jnp.moveaxis(y, 3, 1).reshape(num_chunks, size, num_heads, value_dim),
        states.reshape(-1, num_heads, key_dim, value_dim),
    )


def gated_delta_token(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Runs the recurrence for one token a sequence.

    Args:
        q: `f32[D, key_heads, key_dim]`, scaled.
        k: Like `q`, of unit length.
        v: `f32[D, value_heads, value_dim]`.
        g: `f32[D, value_heads]`, log decay.
        beta: `f32[D, value_heads]`.
        state: `f32[D, value_heads, key_dim, value_dim]`.

    Returns:
        `f32[D, value_heads, value_dim]` and the new state.
    """
    num_seqs, num_heads, value_dim = v.shape
    num_groups, key_dim = k.shape[-2:]
    by_group = (num_seqs, num_groups, num_heads // num_groups)
    grouped = state.reshape(*by_group, key_dim, value_dim)
    grouped = jnp.exp(g).reshape(by_group)[..., None, None] * grouped
    known = contract("ngd,ngrdv->ngrv", k, grouped)
    u = (v.reshape(known.shape) - known) * beta.reshape(by_group)[..., None]
    grouped = grouped + contract("ngd,ngrv->ngrdv", k, u)
    y = contract("ngd,ngrdv->ngrv", q, grouped)
    return y.reshape(v.shape), grouped.reshape(state.shape)


def invert_unit_lower(lower: jax.Array) -> jax.Array:
    """Inverts `I + lower` for strictly lower triangular `lower`.

    Joins inverted diagonal blocks of size 1, 2, 4, ...: with blocks A and B on the
    diagonal and C below, the inverse has `-B^-1 C A^-1` below. Only products, so that
    it runs on matrix units and is split over a mesh, which a triangular solve is not.

    Args:
        lower: `f32[..., Q, Q]`, Q a power of two, zeros on and above the diagonal.
    """
    size = lower.shape[-1]
    index = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    block = 1
    while block < size:
        row, column = index[:, None] // block, index[None, :] // block
        joins = (row % 2 == 1) & (column == row - 1)
        below = jnp.where(joins[(None,) * (lower.ndim - 2)], lower, 0.0)
        correction = contract("...ij,...jk->...ik", below, inverse)
        inverse = inverse - contract("...ij,...jk->...ik", inverse, correction)
        block *= 2
    return inverse
