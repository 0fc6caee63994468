"""The ragged chunk table: how the prefill tokens of a step are cut for the kernels.

Every chunk belongs to one entry. A chunk starts where its entry starts in this step,
at every absolute position that is a multiple of the chunk size, and wherever a
snapshot is to be emitted:

    position      30        48          64   70              96     101
    entry 0       |---------|-----------|----|---------------|------|
                  start     snapshot    32k  snapshot        32k    end

So the state at the end of an entry, the state of a snapshot and the carry from chunk
to chunk are one thing, and the cuts of the absolute grid do not move when the prompt
is prefilled in other pieces. Padding inside a chunk is the identity of the recurrence.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxcache.inputs import StepInputs

DEFAULT_CHUNK_SIZE = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ChunkTable:
    """Chunks of the prefill section of one step.

    N prefill tokens, P prefill entries, M snapshots, C chunks (a bound: chunks past
    the last real one are empty), Q tokens a chunk. Token and entry indices count from
    the start of the prefill section.

    Attributes:
        first_token: `i32[C]` index of the chunk's first token; N for an empty chunk.
        length: `i32[C]` tokens in the chunk, 0 for an empty one.
        entry: `i32[C]` the entry that the chunk belongs to.
        opens_entry: `bool[C]` whether the chunk is its entry's first in this step.
        tokens: `i32[C, Q]` token of each place, 0 where the place is padding.
        positions: `i32[C, Q]` absolute positions, 0 where the place is padding.
        valid: `bool[C, Q]` whether the place holds a token.
        token_chunk: `i32[N]` chunk of each token.
        token_place: `i32[N]` place of each token in its chunk.
        token_valid: `bool[N]` whether the token is real.
        entry_token: `i32[C]` first token of the chunk's entry.
        emitting_chunk: `i32[P + M]` the chunk whose end is the final state of each
            entry, then the state of each snapshot.
        emission_slot: `i32[C]` place of the chunk's end state among the kept states;
            P + M for a chunk whose end is kept by nobody.
    """

    first_token: jax.Array
    length: jax.Array
    entry: jax.Array
    opens_entry: jax.Array
    tokens: jax.Array
    positions: jax.Array
    valid: jax.Array
    token_chunk: jax.Array
    token_place: jax.Array
    token_valid: jax.Array
    entry_token: jax.Array
    emitting_chunk: jax.Array
    emission_slot: jax.Array

    @property
    def num_chunks(self) -> int:
        """The bound on the number of chunks."""
        return self.tokens.shape[0]

    @property
    def chunk_size(self) -> int:
        """The most tokens a chunk holds."""
        return self.tokens.shape[1]

    @property
    def num_emissions(self) -> int:
        """Final states and snapshots together."""
        return self.emitting_chunk.shape[0]


def max_chunks(
    num_tokens: int, num_entries: int, num_snapshots: int, chunk_size: int
) -> int:
    """Returns how many chunks any step of these sizes can have at most.

    An entry of `l` tokens starts one chunk, holds at most `ceil(l / chunk_size)`
    multiples of the chunk size and one more start per snapshot.
    """
    bound = num_tokens // chunk_size + 2 * num_entries + num_snapshots
    return min(num_tokens, bound)


def build_chunk_table(inputs: StepInputs, chunk_size: int) -> ChunkTable:
    """Cuts the prefill section of a step into chunks, on the device.

    Args:
        inputs: The step's inputs; the bucket must have prefill tokens.
        chunk_size: Tokens a chunk holds at most, a power of two.
    """
    bucket = inputs.bucket
    num_decode = bucket.decode
    num_tokens = bucket.prefill_tokens
    num_entries = bucket.prefill_seqs
    bound = max_chunks(num_tokens, num_entries, bucket.snapshots, chunk_size)

    position = inputs.positions[num_decode:]
    token_valid = inputs.token_valid[num_decode:]
    token_entry = inputs.token_entry[num_decode:] - num_decode
    token_entry = jnp.clip(token_entry, 0, num_entries - 1)
    entry_start = inputs.context_lens[num_decode:]
    entry_token = inputs.query_starts[num_decode:] - num_decode
    entry_length = inputs.query_lens[num_decode:]
    snapshot_entry = inputs.snapshot_entry - num_decode

    opens_entry = position == entry_start[token_entry]
    on_grid = position % chunk_size == 0
    after_snapshot = jnp.any(
        (token_entry[:, None] == snapshot_entry[None, :])
        & (position[:, None] == inputs.snapshot_position[None, :]),
        axis=1,
    )
    starts = token_valid & (opens_entry | on_grid | after_snapshot)

    first_token = jnp.nonzero(starts, size=bound, fill_value=num_tokens)[0]
    first_token = first_token.astype(jnp.int32)
    next_start = jnp.append(first_token[1:], jnp.int32(num_tokens))
    num_valid = jnp.sum(token_valid, dtype=jnp.int32)
    length = jnp.maximum(jnp.minimum(next_start, num_valid) - first_token, 0)
    token_chunk = jnp.maximum(jnp.cumsum(starts, dtype=jnp.int32) - 1, 0)
    here = jnp.minimum(first_token, num_tokens - 1)
    entry = token_entry[here]

    place = jnp.arange(chunk_size, dtype=jnp.int32)
    valid = place[None, :] < length[:, None]
    tokens = jnp.where(valid, first_token[:, None] + place[None, :], 0)
    positions = jnp.where(valid, position[here][:, None] + place[None, :], 0)

    # The last token of each entry and of each snapshot ends the chunk we keep.
    final_token = entry_token + entry_length - 1
    snapshot_entry = jnp.clip(snapshot_entry, 0, num_entries - 1)
    snapshot_token = (
        entry_token[snapshot_entry]
        + inputs.snapshot_position
        - entry_start[snapshot_entry]
        - 1
    )
    kept_token = jnp.concatenate([final_token, snapshot_token])
    kept_valid = jnp.concatenate([entry_length > 0, inputs.snapshot_position >= 0])
    kept_token = jnp.clip(kept_token, 0, num_tokens - 1)
    emitting_chunk = jnp.where(kept_valid, token_chunk[kept_token], bound)
    num_emissions = num_entries + bucket.snapshots
    emits = jnp.zeros((bound,), bool).at[emitting_chunk].set(True, mode="drop")
    rank = jnp.cumsum(emits, dtype=jnp.int32) - 1
    return ChunkTable(
        first_token=first_token,
        length=length,
        entry=entry,
        opens_entry=opens_entry[here] & (length > 0),
        tokens=tokens,
        positions=positions,
        valid=valid,
        token_chunk=token_chunk,
        token_place=jnp.arange(num_tokens, dtype=jnp.int32) - first_token[token_chunk],
        token_valid=token_valid,
        entry_token=entry_token[entry],
        emitting_chunk=jnp.minimum(emitting_chunk, bound - 1),
        emission_slot=jnp.where(emits, rank, num_emissions),
    )


def chunk_tokens(table: ChunkTable, values: jax.Array) -> jax.Array:
    """Lays `[N, ...]` token values out as `[C, Q, ...]`, zeros where padded."""
    gathered = values[table.tokens]
    valid = _expand_dims(table.valid, gathered.ndim)
    return jnp.where(valid, gathered, jnp.zeros((), values.dtype))


def unchunk_tokens(table: ChunkTable, values: jax.Array) -> jax.Array:
    """Brings `[C, Q, ...]` values back to `[N, ...]`, zeros at padding tokens."""
    place = jnp.clip(table.token_place, 0, table.chunk_size - 1)
    gathered = values[table.token_chunk, place]
    valid = _expand_dims(table.token_valid, gathered.ndim)
    return jnp.where(valid, gathered, jnp.zeros((), values.dtype))


def scan_chunks[X, Y](
    table: ChunkTable,
    initial: jax.Array,
    step: Callable[[jax.Array, X], tuple[jax.Array, Y]],
    xs: X,
) -> tuple[jax.Array, Y]:
    """Carries the state through the chunks and keeps the states that are asked for.

    Only the kept states are stored, never one a chunk: memory is P + M states.

    Args:
        table: The chunk table.
        initial: `f32[P, *state]`, each entry's state before this step.
        step: Takes the state at a chunk's start and the chunk's slice of `xs`; returns
            the state at its end (the same state for an empty chunk) and its output.
        xs: A pytree of arrays with a leading axis C.

    Returns:
        `f32[P + M, *state]`, the final state of each entry, then of each snapshot, and
        the outputs stacked over chunks. The state of a padding entry is arbitrary but
        finite.
    """
    kept = jnp.zeros((table.num_emissions + 1, *initial.shape[1:]), initial.dtype)

    def body(carry: Any, chunk: Any) -> tuple[Any, Y]:
        state, kept = carry
        entry, opens_entry, slot, x = chunk
        state = jnp.where(opens_entry, initial[entry], state)
        state, y = step(state, x)
        return (state, kept.at[slot].set(state)), y

    (_, kept), ys = jax.lax.scan(
        body,
        (jnp.zeros_like(initial[0]), kept),
        (table.entry, table.opens_entry, table.emission_slot, xs),
    )
    return kept[table.emission_slot[table.emitting_chunk]], ys


def _expand_dims(mask: jax.Array, ndim: int) -> jax.Array:
    return jax.lax.expand_dims(mask, range(mask.ndim, ndim))
