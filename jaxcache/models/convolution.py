"""Depthwise causal convolution over packed sequences, its window kept per unit.

The window of a sequence holds its last `K - 1` inputs, oldest first. It belongs to a
token position just as the recurrent state does, and reaches into the window that the
sequence came with while the sequence has fewer than `K - 1` tokens in this step.
"""

import jax
import jax.numpy as jnp

from jaxcache.models.chunks import ChunkTable


def convolve_tokens(
    inputs: jax.Array,
    initial: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    table: ChunkTable,
) -> tuple[jax.Array, jax.Array]:
    """Convolves the prefill tokens and gives the windows that are kept.

    Args:
        inputs: `f32[N, units, dim]`.
        initial: `f32[P, units, dim, K - 1]`, each entry's window before this step.
        weight: `f32[units, dim, K]`, oldest tap first.
        bias: `f32[units, dim]` or None.
        table: The chunk table.

    Returns:
        `f32[N, units, dim]`, and the windows `f32[P + M, units, dim, K - 1]` at the end
        of each entry, then at each snapshot. Those of padding are arbitrary.
    """
    history = weight.shape[-1] - 1
    windows = jnp.moveaxis(initial, -1, 1)
    # A tap is the same number whether it comes from this step or from the window, and
    # taps are added in one order: where a prompt was cut changes no bit.
    outputs = inputs * weight[None, :, :, history]
    for back in range(1, history + 1):
        earlier = jnp.pad(inputs, ((back, 0), (0, 0), (0, 0)))[: inputs.shape[0]]
        column = jnp.clip(history + table.token_offset - back, 0, history - 1)
        before = windows[table.token_entry, column]
        is_here = (table.token_offset >= back)[:, None, None]
        tap = jnp.where(is_here, earlier, before)
        outputs = outputs + tap * weight[None, :, :, history - back]
    if bias is not None:
        outputs = outputs + bias[None]

    offset = (
        table.kept_count[:, None] - jnp.arange(history, 0, -1, dtype=jnp.int32)[None]
    )
    token = table.entry_token[table.kept_entry][:, None] + offset
    token = jnp.clip(token, 0, inputs.shape[0] - 1)
    column = jnp.clip(history + offset, 0, max(history - 1, 0))
    kept = jnp.where(
        (offset >= 0)[:, :, None, None],
        inputs[token],
        windows[table.kept_entry[:, None], column],
    )
    return outputs, jnp.moveaxis(kept, 1, -1)


def convolve_token(
    inputs: jax.Array, initial: jax.Array, weight: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Convolves one token a sequence: the recurrent form of `convolve_tokens`.

    Args:
        inputs: `f32[D, units, dim]`.
        initial: `f32[D, units, dim, K - 1]`.
        weight: `f32[units, dim, K]`.
        bias: `f32[units, dim]` or None.

    Returns:
        `f32[D, units, dim]` and the windows after the token, `f32[D, units, dim, K-1]`.
    """
    window = jnp.concatenate([initial, inputs[..., None]], axis=-1)
    outputs = window[..., -1] * weight[None, :, :, -1]
    for tap in range(weight.shape[-1] - 2, -1, -1):
        outputs = outputs + window[..., tap] * weight[None, :, :, tap]
    if bias is not None:
        outputs = outputs + bias[None]
    return outputs, window[..., 1:]
