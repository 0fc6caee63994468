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

The table is as long as the worst step of the bucket needs, but only blocks of chunks
that hold tokens are worked on.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxcache.device.step_inputs import StepInputs

DEFAULT_CHUNK_SIZE = 64

# Chunks that are worked on together: enough for matrix units, little to waste.
BLOCK_CHUNKS = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ChunkTable:
    """Chunks of the prefill section of one step.

    N prefill tokens, P prefill entries, M snapshots, C chunks (a bound: chunks past
    the last real one are empty), Q tokens a chunk. Token and entry indices count from
    the start of the prefill section. What is kept are the final states of the entries,
    then the states of the snapshots: P + M of them.

    Attributes:
        entry: `i32[C]` the entry that the chunk belongs to.
        opens_entry: `bool[C]` whether the chunk is its entry's first in this step.
        tokens: `i32[C, Q]` token of each place, 0 where the place is padding.
        positions: `i32[C, Q]` absolute position of each place, -1 for padding.
        valid: `bool[C, Q]` whether the place holds a token.
        kept_slot: `i32[C]` where the state at the chunk's end is kept among those that
            are; P + M for a chunk whose end nobody asked for.
        num_blocks: `i32[]` blocks of `BLOCK_CHUNKS` chunks that hold tokens.
        token_chunk: `i32[N]` chunk of each token.
        token_place: `i32[N]` place of each token in its chunk.
        token_valid: `bool[N]` whether the token is real.
        token_entry: `i32[N]` entry of each token.
        token_offset: `i32[N]` tokens of the entry before this one in this step.
        entry_token: `i32[P]` first token of each entry.
        kept_chunk: `i32[P + M]` the chunk whose end it is.
        kept_entry: `i32[P + M]` the entry.
        kept_count: `i32[P + M]` tokens of the entry up to there in this step.
    """

    entry: jax.Array
    opens_entry: jax.Array
    tokens: jax.Array
    positions: jax.Array
    valid: jax.Array
    kept_slot: jax.Array
    num_blocks: jax.Array
    token_chunk: jax.Array
    token_place: jax.Array
    token_valid: jax.Array
    token_entry: jax.Array
    token_offset: jax.Array
    entry_token: jax.Array
    kept_chunk: jax.Array
    kept_entry: jax.Array
    kept_count: jax.Array

    @property
    def num_chunks(self) -> int:
        """The bound on the number of chunks, a multiple of `BLOCK_CHUNKS`."""
        return self.tokens.shape[0]

    @property
    def chunk_size(self) -> int:
        """The most tokens a chunk holds."""
        return self.tokens.shape[1]

    @property
    def num_kept(self) -> int:
        """Final states and snapshots together."""
        return self.kept_chunk.shape[0]


def max_chunks(
    num_tokens: int, num_entries: int, num_snapshots: int, chunk_size: int
) -> int:
    """Returns how many chunks a step of these sizes can have at most.

    An entry of `l` tokens starts one chunk, has at most `ceil((l - 1) / chunk_size)`
    multiples of the chunk size after its first token, and one more start per snapshot.
    """
    inside = (num_tokens + num_entries * (chunk_size - 2)) // chunk_size
    return min(num_tokens, num_entries + inside + num_snapshots)


def build_chunk_table(inputs: StepInputs, chunk_size: int) -> ChunkTable:
    """Cuts the prefill section of a step into chunks, on the device.

    Args:
        inputs: The step's inputs; the bucket must have prefill tokens.
        chunk_size: Tokens a chunk holds at most, a power of two.
    """
    bucket, num_decode = inputs.bucket, inputs.bucket.decode
    num_tokens, num_entries = bucket.prefill_tokens, bucket.prefill_seqs
    # The last entry is always padding.
    bound = max_chunks(num_tokens, num_entries - 1, bucket.snapshots, chunk_size)
    bound += -bound % BLOCK_CHUNKS

    position = inputs.positions[num_decode:]
    token_valid = inputs.token_valid[num_decode:]
    token_entry = inputs.token_entry[num_decode:] - num_decode
    entry_start = inputs.context_lens[num_decode:]
    entry_token = inputs.query_starts[num_decode:] - num_decode
    entry_length = inputs.query_lens[num_decode:]
    snapshot_entry = inputs.snapshot_entry - num_decode
    after_snapshot = jnp.any(
        (token_entry[:, None] == snapshot_entry[None, :])
        & (position[:, None] == inputs.snapshot_position[None, :]),
        axis=1,
    )
    opens_entry = position == entry_start[token_entry]
    starts = token_valid & (opens_entry | (position % chunk_size == 0) | after_snapshot)

    num_valid = jnp.sum(token_valid, dtype=jnp.int32)
    first_token = jnp.nonzero(starts, size=bound, fill_value=num_tokens)[0]
    first_token = first_token.astype(jnp.int32)
    next_start = jnp.append(first_token[1:], jnp.int32(num_tokens))
    length = jnp.maximum(jnp.minimum(next_start, num_valid) - first_token, 0)
    token_chunk = jnp.maximum(jnp.cumsum(starts, dtype=jnp.int32) - 1, 0)
    place = jnp.arange(chunk_size, dtype=jnp.int32)[None, :]
    valid = place < length[:, None]
    here = jnp.minimum(first_token, num_tokens - 1)
    num_chunks = jnp.sum(starts, dtype=jnp.int32)

    # A state is kept at the end of the chunk that the last token before it closes.
    snapshot_entry = jnp.clip(snapshot_entry, 0, num_entries - 1)
    kept_entry = jnp.append(jnp.arange(num_entries, dtype=jnp.int32), snapshot_entry)
    kept_count = jnp.append(
        entry_length, inputs.snapshot_position - entry_start[snapshot_entry]
    )
    kept_token = entry_token[kept_entry] + kept_count - 1
    kept_chunk = token_chunk[jnp.clip(kept_token, 0, num_tokens - 1)]
    ends_kept = jnp.where(kept_count > 0, kept_chunk, bound)
    is_kept = jnp.zeros((bound,), bool).at[ends_kept].set(True, mode="drop")
    rank = jnp.cumsum(is_kept, dtype=jnp.int32) - 1
    return ChunkTable(
        entry=token_entry[here],
        opens_entry=opens_entry[here] & (length > 0),
        tokens=jnp.where(valid, first_token[:, None] + place, 0),
        positions=jnp.where(valid, position[here][:, None] + place, -1),
        valid=valid,
        kept_slot=jnp.where(is_kept, rank, kept_entry.shape[0]),
        num_blocks=(num_chunks + BLOCK_CHUNKS - 1) // BLOCK_CHUNKS,
        token_chunk=token_chunk,
        token_place=jnp.arange(num_tokens, dtype=jnp.int32) - first_token[token_chunk],
        token_valid=token_valid,
        token_entry=token_entry,
        token_offset=position - entry_start[token_entry],
        entry_token=entry_token,
        kept_chunk=kept_chunk,
        kept_entry=kept_entry,
        kept_count=kept_count,
    )


def block_of(values: jax.Array, block: jax.Array) -> jax.Array:
    """Cuts block number `block` out of `[C, ...]`: `[BLOCK_CHUNKS, ...]`."""
    start = block * BLOCK_CHUNKS
    return jax.lax.dynamic_slice_in_dim(values, start, BLOCK_CHUNKS)


def chunk_tokens(table: ChunkTable, values: jax.Array, block: jax.Array) -> jax.Array:
    """Lays the `[N, ...]` values of a block's tokens out by chunk.

    Returns:
        `[BLOCK_CHUNKS, Q, ...]`, zeros where padded, whatever padding tokens hold.
    """
    gathered = values[block_of(table.tokens, block)]
    valid = _expand_dims(block_of(table.valid, block), gathered.ndim)
    return jnp.where(valid, gathered, jnp.zeros((), values.dtype))


def unchunk_tokens(table: ChunkTable, values: jax.Array) -> jax.Array:
    """Brings `[C, Q, ...]` values back to `[N, ...]`, zeros at padding tokens."""
    place = jnp.clip(table.token_place, 0, table.chunk_size - 1)
    gathered = values[table.token_chunk, place]
    valid = _expand_dims(table.token_valid, gathered.ndim)
    return jnp.where(valid, gathered, jnp.zeros((), values.dtype))


def _expand_dims(mask: jax.Array, ndim: int) -> jax.Array:
    return jax.lax.expand_dims(mask, range(mask.ndim, ndim))
