"""Depthwise causal convolution over ragged chunks, its window kept per unit.

The window of a sequence holds its last `K - 1` inputs, oldest first. It belongs to a
token position just as the recurrent state does, and reaches into the window the
sequence came with while the sequence has fewer than `K - 1` tokens in this step.
"""

import jax
import jax.numpy as jnp

from jaxcache.models.chunks import ChunkTable, chunk_tokens


def convolve_chunks(
    inputs: jax.Array,
    initial: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    table: ChunkTable,
) -> tuple[jax.Array, jax.Array]:
    """Convolves the prefill tokens and emits the windows that are kept.

    Args:
        inputs: `f32[N, units, dim]`, one row a prefill token.
        initial: `f32[P, units, dim, K - 1]`, each entry's window before this step.
        weight: `f32[units, dim, K]`, oldest tap first.
        bias: `f32[units, dim]` or None.
        table: The chunk table.

    Returns:
        `f32[C, Q, units, dim]` by chunk, and the windows
        `f32[P + M, units, dim, K - 1]` at the end of each entry, then at each snapshot.
    """
    num_taps = weight.shape[-1]
    history = num_taps - 1
    chunk_size = table.chunk_size

    # Where the `history` inputs before each chunk are: earlier tokens of the entry in
    # this step, or columns of the window that the entry came with.
    back = jnp.arange(-history, 0, dtype=jnp.int32)
    into_entry = (table.first_token - table.entry_token)[:, None] + back[None, :]
    token = jnp.clip(table.first_token[:, None] + back[None, :], 0, inputs.shape[0] - 1)
    column = jnp.clip(into_entry + history, 0, max(history - 1, 0))
    window = jnp.moveaxis(initial, -1, 1)[table.entry[:, None], column]
    before = jnp.where((into_entry >= 0)[:, :, None, None], inputs[token], window)
    extended = jnp.concatenate([before, chunk_tokens(table, inputs)], axis=1)

    outputs = sum(
        extended[:, tap : tap + chunk_size] * weight[None, None, :, :, tap]
        for tap in range(num_taps)
    )
    assert isinstance(outputs, jax.Array)
    if bias is not None:
        outputs = outputs + bias[None, None]

    chunk = table.emitting_chunk
    columns = table.length[chunk][:, None] + jnp.arange(history, dtype=jnp.int32)[None]
    windows = jnp.moveaxis(extended[chunk[:, None], columns], 1, -1)
    return outputs, windows


def convolve_token(
    inputs: jax.Array, initial: jax.Array, weight: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Convolves one token a sequence: the recurrent form of `convolve_chunks`.

    Args:
        inputs: `f32[D, units, dim]`.
        initial: `f32[D, units, dim, K - 1]`.
        weight: `f32[units, dim, K]`.
        bias: `f32[units, dim]` or None.

    Returns:
        `f32[D, units, dim]` and the windows after the token, `f32[D, units, dim, K-1]`.
    """
    window = jnp.concatenate([initial, inputs[..., None]], axis=-1)
    outputs = jnp.sum(window * weight[None], axis=-1)
    if bias is not None:
        outputs = outputs + bias[None]
    return outputs, window[..., 1:]
