"""Step inputs: what a model sees of a step, unpacked inside the jitted step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxcache.device.pools import copy_pages, update_tables
from jaxcache.device.state import READ, WRITE, CacheState, constrain
from jaxcache.inputs.buckets import Bucket
from jaxcache.inputs.packing import NEXT_TOKEN, PackedInputs
from jaxcache.layouts import NULL_SLOT

# Declared here and not in packing.py, which the host side imports without JAX.
jax.tree_util.register_dataclass(
    PackedInputs,
    data_fields=["packed", "extra_updates"],
    meta_fields=["bucket", "size"],
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepInputs:
    """One step, as arrays of the bucket's shapes.

    D decode entries of one token each come first, then P prefill entries whose N tokens
    are packed one entry after the other. Padding stands at the end of each part; the
    last prefill entry is always padding, and padding tokens of the prefill part belong
    to it. E = D + P entries, T = D + N tokens, G attention groups, M emissions.

    Attributes:
        token_ids: `i32[T]`; `NEXT_TOKEN` is filled in by `fill_next_tokens`.
        positions: `i32[T]`, place of the token in its sequence; 0 for padding.
        token_entry: `i32[T]`, entry of the token.
        token_valid: `bool[T]`, false for padding.
        seat: `i32[E]`; padding entries sit in the padding seat.
        context_lens: `i32[E]`, tokens in the cache before this step.
        query_lens: `i32[E]`, tokens that the entry brings; 0 for padding.
        query_starts: `i32[E]`, index of the entry's first token.
        state_read: `i32[E]`, row to read; the null row for padding.
        state_write: `i32[E]`, row to write; a sink for padding.
        snapshot_entry: `i32[M]`, index of a prefill entry among all E.
        snapshot_position: `i32[M]`, tokens absorbed at the emission; -1 for padding.
        snapshot_slot: `i32[M]`, row to write; a sink for padding.
        page_slots: `i32[G, T]`, page each token goes to; a sink for padding.
        page_offsets: `i32[T]`, token inside that page.
        page_tables: `i32[G, E, max_pages]`, pages of each entry, this step's included;
            the null page past the end of its sequence.
        bucket: The shape. Static.
    """

    token_ids: jax.Array
    positions: jax.Array
    token_entry: jax.Array
    token_valid: jax.Array
    seat: jax.Array
    context_lens: jax.Array
    query_lens: jax.Array
    query_starts: jax.Array
    state_read: jax.Array
    state_write: jax.Array
    snapshot_entry: jax.Array
    snapshot_position: jax.Array
    snapshot_slot: jax.Array
    page_slots: jax.Array
    page_offsets: jax.Array
    page_tables: jax.Array
    bucket: Bucket = dataclasses.field(metadata={"static": True})


def begin_step(
    state: CacheState, packed: PackedInputs
) -> tuple[CacheState, StepInputs]:
    """Unpacks a step, brings the tables up to date and copies the pages it asks for.

    Args:
        state: The state before the step.
        packed: The step, packed for a cache of this size.

    Returns:
        The state that the model starts from, and its inputs.

    Raises:
        ValueError: if `packed` belongs to a cache of another size or has a wrong shape
            or dtype.
    """
    bucket, size = packed.bucket, state.size
    if packed.size != size:
        raise ValueError(f"packed must be for size {size}, got one for {packed.size}")
    if packed.packed.shape != (bucket.num_packed,):
        raise ValueError(
            f"packed.packed must have shape {(bucket.num_packed,)}, "
            f"got {packed.packed.shape}"
        )
    array = jnp.asarray(packed.packed)
    if array.dtype != jnp.int32:
        raise ValueError(f"packed.packed must be int32, got {array.dtype}")
    array = constrain(array, state.replicated)
    part = {name: array[where] for name, where in bucket.sections.items()}
    state = update_tables(state, part["updates"].reshape(4, bucket.updates))
    if packed.extra_updates is not None:
        state = update_tables(state, jnp.asarray(packed.extra_updates))
    if bucket.copies:
        group, source, destination = part["copies"].reshape(3, bucket.copies)
        for group_id in range(state.layout.num_page_groups):
            chosen = jnp.where(group == group_id, destination, -1)
            state = copy_pages(state, group_id, source, chosen)
    return state, _inputs(state, bucket, part)


def _inputs(
    state: CacheState, bucket: Bucket, part: dict[str, jax.Array]
) -> StepInputs:
    size, decode = state.size, bucket.decode
    seat, context_lens = part["seat"], part["start"]
    live = (seat[:decode] < size.max_seqs).astype(jnp.int32)
    query_lens = jnp.concatenate((live, part["len"]))
    # Decode entry i is token i; prefill entries follow each other.
    ends = decode + jnp.cumsum(part["len"])
    query_starts = jnp.concatenate(
        (lax.iota(jnp.int32, decode), (ends - part["len"]).astype(jnp.int32))
    )
    token = lax.iota(jnp.int32, bucket.num_tokens)
    # The entries that end at or before a token come before its own; the last entry is
    # padding, so what no entry claims is the last one's.
    before = (ends[None, :-1] <= token[decode:, None]).sum(axis=1, dtype=jnp.int32)
    token_entry = jnp.concatenate((token[:decode], decode + before))
    at = functools.partial(_take, index=token_entry)
    offset = token - at(query_starts)
    token_valid = offset < at(query_lens)
    positions = jnp.where(token_valid, at(context_lens) + offset, 0)
    page, page_offsets = jnp.divmod(positions, size.tokens_per_page)
    pages = state.page_table.at[:, at(seat), page].get(mode="fill", fill_value=-1)
    lens = context_lens + query_lens
    column = lax.iota(jnp.int32, size.max_pages) * size.tokens_per_page
    used = column[None, :] < lens[:, None]
    rows = _take(state.row_index, seat, axis=1)
    return StepInputs(
        token_ids=part["token_ids"],
        positions=positions,
        token_entry=token_entry,
        token_valid=token_valid,
        seat=seat,
        context_lens=context_lens,
        query_lens=query_lens,
        query_starts=query_starts,
        state_read=rows[READ],
        state_write=rows[WRITE],
        snapshot_entry=part["snapshot_entry"],
        snapshot_position=part["snapshot_position"],
        snapshot_slot=part["snapshot_slot"],
        page_slots=jnp.where(token_valid[None], pages, size.sink_slot),
        page_offsets=page_offsets,
        page_tables=jnp.where(
            used[None], _take(state.page_table, seat, axis=1), NULL_SLOT
        ),
        bucket=bucket,
    )


def fill_next_tokens(inputs: StepInputs, last_tokens: jax.Array) -> StepInputs:
    """Puts the token that each seat sampled last where the host said `NEXT_TOKEN`.

    Args:
        inputs: The step.
        last_tokens: `i32[num_seats]`.

    Returns:
        The step with token ids only.
    """
    last = _take(last_tokens, _take(inputs.seat, inputs.token_entry))
    token_ids = jnp.where(inputs.token_ids == NEXT_TOKEN, last, inputs.token_ids)
    return dataclasses.replace(inputs, token_ids=token_ids)


def _take(array: jax.Array, index: jax.Array, axis: int = 0) -> jax.Array:
    """Gathers along an axis; the host has checked every index."""
    return jnp.take(array, index, axis=axis, mode="clip")
