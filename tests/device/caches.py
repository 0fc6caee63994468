"""Small caches for the device tests, and their pools in one canonical order."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from jaxcache.device.state import CacheState, init_cache
from jaxcache.inputs.buckets import Bucket, Buckets
from jaxcache.inputs.packing import StepWork
from jaxcache.layouts import (
    CacheLayout,
    FullAttention,
    Layer,
    LayerKind,
    Mamba2,
    ModelLayout,
    Order,
    SlidingWindowAttention,
)

Array = npt.NDArray[Any]
ORDERS: tuple[Order, ...] = ("units", "buffers")

FULL = FullAttention(kv_heads=2, head_dim=4)
WINDOW = SlidingWindowAttention(kv_heads=1, head_dim=4, window=5, dtype="float32")
MAMBA = Mamba2(num_heads=4, head_dim=2, num_groups=2, state_dim=3, conv_kernel=4)


def model(*kinds: LayerKind) -> ModelLayout:
    return ModelLayout("toy", tuple(Layer(i, kind) for i, kind in enumerate(kinds)))


def hybrid(order: Order = "units", num_shards: int = 1) -> CacheLayout:
    """Two attention groups and a recurrent one; layers 0, 2 full, 1 window, 3, 4 rows.

    Layer 4 has an attention of its own beside its rows.
    """
    layers = (
        *model(FULL, WINDOW, FULL, MAMBA, MAMBA).layers,
        Layer(4, FULL),
    )
    return CacheLayout(ModelLayout("hybrid", layers), 4, num_shards, order)


def cache(layout: CacheLayout, mesh: Mesh | None = None) -> CacheState:
    """16 pages a group and 12 rows for 4 requests of at most 16 tokens."""
    rows = 12 if layout.has_recurrent else 0
    return init_cache(layout, 16, rows, mesh, max_seqs=4, max_tokens=16, num_sinks=2)


def mesh_of(num_devices: int) -> Mesh | None:
    if num_devices == 1:
        return None
    return Mesh(np.array(jax.devices()[:num_devices]), ("tensor",))


BUCKETS = Buckets((4,), (8,), max_prefill_seqs=3, max_snapshots=2, max_copies=2)
MIXED: Bucket = BUCKETS.select(1, 1, 1)


def ints(*values: int) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def columns(rows: int, values: list[tuple[int, ...]]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32).reshape(-1, rows).T.copy()


def work(**fields: Any) -> StepWork:
    """A step from plain lists."""
    rows = {"updates": 4, "copies": 3}
    return StepWork(
        **{
            name: columns(rows[name], value) if name in rows else ints(*value)
            for name, value in fields.items()
        }
    )


def canonical(state: CacheState) -> list[Array]:
    """The pools as NumPy `[slots, buffers, units, *unit_shape]`, whatever the order."""
    pools = []
    for spec, pool in zip(state.layout.pools, state.pools, strict=True):
        array = np.array(pool)
        pools.append(np.moveaxis(array, spec.buffer_axis, 1).copy())
    return pools


def bits(array: Array) -> Array:
    """The array's bits, so that every NaN is equal to itself alone."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def poisoned(state: CacheState) -> CacheState:
    """The state with NaN in every slot that is not the null slot."""

    def poison(pool: jax.Array) -> jax.Array:
        return pool.at[1:].set(jnp.asarray(jnp.nan, pool.dtype))

    return dataclasses.replace(state, pools=tuple(poison(p) for p in state.pools))


def cast(array: Array, dtype: str) -> Array:
    """Casts as XLA does: to the nearest, ties to even."""
    return array.astype(np.dtype(getattr(ml_dtypes, dtype, dtype)))
