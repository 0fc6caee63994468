"""Float32 contractions at full precision on every backend.

A GPU or TPU may round the operands of a float32 matrix product to fewer bits by
default. Tokens that must not depend on how a prompt was cut cannot afford that.
"""

import jax
import jax.numpy as jnp


def contract(spec: str, *operands: jax.Array) -> jax.Array:
    """Contracts float32 operands as `jnp.einsum` does, at the highest precision."""
    return jnp.einsum(spec, *operands, precision=jax.lax.Precision.HIGHEST)


def expand_units(values: jax.Array, num_units: int, *, axis: int) -> jax.Array:
    """Repeats each unit for as many neighbours as the cache keeps of it.

    Args:
        values: Any array whose `axis` counts the model's own units.
        num_units: Units wanted: a multiple of what is there.
        axis: The unit axis.

    Returns:
        The array with `num_units` units; unit `u` is the old unit
        `u // (num_units / old)`.
    """
    repeats = _repeats(values.shape[axis], num_units)
    return values if repeats == 1 else jnp.repeat(values, repeats, axis=axis)


def fold_units(values: jax.Array, num_units: int, *, axis: int) -> jax.Array:
    """Undoes `expand_units`: keeps one of each run of equal units."""
    repeats = _repeats(num_units, values.shape[axis])
    if repeats == 1:
        return values
    return jax.lax.slice_in_dim(values, 0, None, stride=repeats, axis=axis)


def _repeats(few: int, many: int) -> int:
    if many % few:
        raise ValueError(f"{many} units is not a multiple of {few} units")
    return many // few
