"""The recurrent scan over the chunks of a step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcache.models.chunks import (
    ChunkTable,
    block_of,
    chunk_tokens,
    unchunk_tokens,
)


def scan_chunks[X](
    table: ChunkTable,
    tokens: tuple[jax.Array, ...],
    initial: jax.Array,
    output_shape: tuple[int, ...],
    prepare: Callable[..., X],
    step: Callable[[jax.Array, X], tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    """Carries the state through the chunks and keeps the states that are asked for.

    What needs no state is done for a block of chunks at once, by `prepare`; `step` then
    goes from chunk to chunk. Only the kept states are stored, never one a chunk, and
    the work follows the tokens there are, not the bound of the bucket.

    Args:
        table: The chunk table.
        tokens: Arrays `[N, ...]`.
        initial: `f32[P, *state]`, each entry's state before this step.
        output_shape: Shape of one token's output.
        prepare: Takes the tokens of a block, each `[B, Q, ...]` with zeros where
            padded, and returns a pytree of arrays `[B, ...]`.
        step: Takes the state at a chunk's start and the chunk's slice of that pytree;
            returns the state at its end (the same if the chunk is empty) and
            `f32[Q, *output_shape]`.

    Returns:
        `f32[N, *output_shape]`, zeros at padding tokens, and `f32[P + M, *state]`: the
        final state of each entry, then of each snapshot. That of padding is arbitrary.
    """
    per_chunk = (table.entry, table.opens_entry, table.kept_slot)

    def next_chunk(carry: Any, chunk: Any) -> tuple[Any, jax.Array]:
        state, kept = carry
        (entry, opens_entry, slot), x = chunk
        state = jnp.where(opens_entry, initial[entry], state)
        state, output = step(state, x)
        return (state, kept.at[slot].set(state)), output

    def next_block(block: jax.Array, carry: Any) -> Any:
        *states, outputs = carry
        xs = prepare(*(chunk_tokens(table, values, block) for values in tokens))
        of_block = tuple(block_of(values, block) for values in per_chunk)
        states, rows = jax.lax.scan(next_chunk, tuple(states), (of_block, xs))
        start = block * rows.shape[0]
        outputs = jax.lax.dynamic_update_slice_in_dim(outputs, rows, start, axis=0)
        return (*states, outputs)

    shape = (table.num_chunks, table.chunk_size, *output_shape)
    start = (
        jnp.zeros_like(initial[0]),
        jnp.zeros((table.num_kept + 1, *initial.shape[1:]), initial.dtype),
        jnp.zeros(shape, initial.dtype),
    )
    _, kept, outputs = jax.lax.fori_loop(0, table.num_blocks, next_block, start)
    return unchunk_tokens(table, outputs), kept[table.kept_slot[table.kept_chunk]]
