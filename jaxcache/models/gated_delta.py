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

from jaxcache.models.chunk_scan import scan_chunks
from jaxcache.models.chunks import ChunkTable
from jaxcache.models.contractions import contract
from jaxcache.models.decay import segment_sums


def gated_delta_tokens(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial: jax.Array,
    table: ChunkTable,
) -> tuple[jax.Array, jax.Array]:
    """Runs the recurrence over the prefill tokens, chunk by chunk.

    Args:
        q: `f32[N, key_heads, key_dim]`, scaled.
        k: Like `q`, of unit length.
        v: `f32[N, value_heads, value_dim]`.
        g: `f32[N, value_heads]`, log decay.
        beta: `f32[N, value_heads]`.
        initial: `f32[P, value_heads, key_dim, value_dim]`.
        table: The chunk table.

    Returns:
        `f32[N, value_heads, value_dim]`, and
        `f32[P + M, value_heads, key_dim, value_dim]`: the state at the end of each
        entry, then at each snapshot.
    """
    _, num_heads, value_dim = v.shape
    num_groups, key_dim = k.shape[-2:]
    by_group = (num_groups, num_heads // num_groups)
    causal = jnp.tril(jnp.ones((table.chunk_size, table.chunk_size), bool))
    strict = jnp.tril(causal, -1)

    def by_head(values: jax.Array) -> jax.Array:
        """`[B, Q, value_heads, ...]` to `[B, key_heads, repeats, Q, ...]`."""
        split = values.reshape(*values.shape[:2], *by_group, *values.shape[3:])
        return jnp.moveaxis(split, 1, 3)

    def prepare(
        q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
    ) -> tuple[jax.Array, ...]:
        log_decay, beta, v = by_head(g), by_head(beta), by_head(v)
        between = segment_sums(log_decay)
        into = jnp.exp(log_decay[..., :1] + between[..., :, 0])
        to_end = jnp.exp(between[..., -1, :])
        # Above the diagonal the sums are zero, not the decay.
        ratio = jnp.where(causal[None, None, None], jnp.exp(between), 0.0)
        keys = contract("bqgd,bkgd->bgqk", k, k)[:, :, None]
        lower = beta[..., None] * ratio * keys
        inverse = invert_unit_lower(jnp.where(strict[None, None, None], lower, 0.0))
        added = contract("bgrqk,bgrkv->bgrqv", inverse, beta[..., None] * v)
        taken = contract("bgrqk,bgrk,bkgd->bgrqd", inverse, beta * into, k)
        scores = contract("bqgd,bkgd->bgqk", q, k)[:, :, None] * ratio
        return q, k, added, taken, scores, into, to_end

    def step(
        state: jax.Array, chunk: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, jax.Array]:
        q, k, added, taken, scores, into, to_end = chunk
        u = added - contract("grqd,grdv->grqv", taken, state)
        y = contract("qgd,grdv->grqv", q, state) * into[..., None]
        y = y + contract("grqk,grkv->grqv", scores, u)
        new = contract("qgd,grqv->grdv", k, u * to_end[..., None])
        state = into[..., -1, None, None] * state + new
        return state, jnp.moveaxis(y, 2, 0)

    y, states = scan_chunks(
        table,
        (q, k, v, g, beta),
        initial.reshape(-1, *by_group, key_dim, value_dim),
        (*by_group, value_dim),
        prepare,
        step,
    )
    return y.reshape(v.shape), states.reshape(-1, num_heads, key_dim, value_dim)


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

    Joins inverted blocks of the diagonal, of size 1, 2, 4, ...: with blocks A and B on
    the diagonal and C below A, the inverse has `-B^-1 C A^-1` below. Only products, so
    that it runs on matrix units and is split over a mesh, which a triangular solve is
    not.

    Args:
        lower: `f32[..., Q, Q]`, Q a power of two, zeros on and above the diagonal.
    """
    *batch, size, _ = lower.shape
    inverse = jnp.ones((*batch, size, 1, 1), lower.dtype)
    block = 1
    while block < size:
        pairs = lower.reshape(*batch, -1, 2 * block, size // (2 * block), 2 * block)
        joined = jnp.moveaxis(jnp.diagonal(pairs, axis1=-4, axis2=-2), -1, -3)
        below = joined[..., block:, :block]
        top, bottom = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = contract("...ij,...jk,...kl->...il", bottom, -below, top)
        inverse = jnp.concatenate(
            [
                jnp.concatenate([top, jnp.zeros_like(top)], axis=-1),
                jnp.concatenate([corner, bottom], axis=-1),
            ],
            axis=-2,
        )
        block *= 2
    return inverse.reshape(lower.shape)
