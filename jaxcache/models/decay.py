"""Sums of log decays inside a chunk, precise where the decay is felt."""

import jax
import jax.numpy as jnp

from jaxcache.models.contractions import contract


def segment_sums(values: jax.Array) -> jax.Array:
    """Sums values over every segment of a chunk.

    Not the difference of two running sums: over a chunk these reach a thousand in a
    gated delta net, whose difference has lost the fourth digit of a decay that is
    close to one. A segment summed by itself is as precise as its own size allows, so
    a state does not depend on where the chunk it went through began.

    Args:
        values: `f32[..., Q]`.

    Returns:
        `f32[..., Q, Q]`: at `[t, s]` the sum over `s < i <= t`; 0 where `s >= t`.
    """
    size = values.shape[-1]
    index = jnp.arange(size)
    after = index[:, None] > index[None, :]
    until = (index[:, None] >= index[None, :]).astype(values.dtype)
    shape = (1,) * (values.ndim - 1) + after.shape
    masked = jnp.where(after.reshape(shape), values[..., None], 0.0)
    return contract("ti,...is->...ts", until, masked)
