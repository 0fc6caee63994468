"""Attention over pages, read block by block with an online softmax.

Keys and values of the step's own tokens are written to their pages first, so that every
query reads everything it may see from the pages, by absolute position. Each trip of the
loop gathers the same number of tokens for every row of queries and stops after the
longest row, so memory does not grow with the context, and a row's result depends
neither on the batch it is in nor on how its prompt was cut.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxcache.models.contractions import contract

BLOCK_TOKENS = 128

# Below every real score, and finite: the difference of two of them is not a NaN.
_MASKED = -1e30

ReadPages = Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def attend_pages(
    queries: jax.Array,
    positions: jax.Array,
    row_table: jax.Array,
    *,
    read_pages: ReadPages,
    page_table: jax.Array,
    tokens_per_page: int,
    value_dim: int,
) -> jax.Array:
    """Attends rows of queries to the pages of the sequence that each row belongs to.

    A query at position `p` sees the tokens at positions `0 ... p`. What lies in a page
    past the sequence's end is never used, whatever bits it holds.

    Args:
        queries: `f32[R, Q, units, heads, dim]`, scaled; `heads` query heads share each
            unit of the cache.
        positions: `i32[R, Q]`; -1 for padding, whose result is zero.
        row_table: `i32[R]`, which row of the page table.
        read_pages: Takes `i32[R, pages]` and returns keys and values, each
            `[R, pages, units, tokens_per_page, dim]`.
        page_table: `i32[E, max_pages]`.
        tokens_per_page: Tokens of one page.
        value_dim: Elements of one value.

    Returns:
        `f32[R, Q, units, heads, value_dim]`.
    """
    num_rows, num_queries, num_units, num_heads, _ = queries.shape
    block_pages = max(1, BLOCK_TOKENS // tokens_per_page)
    block_tokens = block_pages * tokens_per_page
    lengths = jnp.max(positions, axis=1) + 1
    padding = -page_table.shape[1] % block_pages
    page_table = jnp.pad(page_table, ((0, 0), (0, padding)))

    def body(
        block: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        top, norm, total = carry
        pages = jax.lax.dynamic_slice_in_dim(
            page_table, block * block_pages, block_pages, axis=1
        )
        keys, values = map(_by_token, read_pages(pages[row_table]))
        place = block * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
        written = place[None, :] < lengths[:, None]
        values = jnp.where(written[:, None, :, None], values, 0.0)
        seen = written[:, None, :] & (place[None, None, :] <= positions[:, :, None])
        seen = seen[:, :, None, None, :]

        scores = contract("rquhd,rutd->rquht", queries, keys)
        scores = jnp.where(seen, scores, _MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        weights = jnp.where(seen, jnp.exp(scores - new_top[..., None]), 0.0)
        scale = jnp.exp(top - new_top)
        norm = norm * scale + jnp.sum(weights, axis=-1)
        added = contract("rquht,rutv->rquhv", weights, values)
        return new_top, norm, total * scale[..., None] + added

    shape = (num_rows, num_queries, num_units, num_heads)
    start = (
        jnp.full(shape, _MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, value_dim), jnp.float32),
    )
    num_blocks = (jnp.max(lengths) + block_tokens - 1) // block_tokens
    _, norm, total = jax.lax.fori_loop(0, num_blocks, body, start)
    attended: jax.Array = total / jnp.where(norm > 0, norm, 1.0)[..., None]
    return attended


def _by_token(pages: jax.Array) -> jax.Array:
    """`[R, pages, units, tokens, dim]` to `f32[R, units, pages * tokens, dim]`."""
    num_rows, num_pages, num_units, num_tokens, dim = pages.shape
    by_unit = jnp.swapaxes(pages, 1, 2).astype(jnp.float32)
    return by_unit.reshape(num_rows, num_units, num_pages * num_tokens, dim)


def rotate(
    values: jax.Array, positions: jax.Array, theta: float, dim: int
) -> jax.Array:
    """Applies rotary position embedding to the first `dim` elements of each head.

    Element `i` is paired with element `i + dim / 2`.

    Args:
        values: `f32[T, heads, head_dim]`.
        positions: `i32[T]`.
        theta: Base of the frequencies.
        dim: Even number of elements to rotate, at most `head_dim`.
    """
    half = jnp.arange(0, dim, 2, dtype=jnp.float32) / dim
    angles = positions.astype(jnp.float32)[:, None] / jnp.power(theta, half)[None, :]
    cos, sin = (f(angles)[:, None, :] for f in (jnp.cos, jnp.sin))
    low, high, rest = jnp.split(values, (dim // 2, dim), axis=-1)
    return jnp.concatenate(
        [low * cos - high * sin, high * cos + low * sin, rest], axis=-1
    )
