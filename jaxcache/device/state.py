"""The cache state: pools, page tables and row index as one immutable pytree."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxcache.layouts import NULL_SLOT, CacheLayout, CacheSize
from jaxcache.layouts.arguments import check_kind, check_name
from jaxcache.layouts.cache_size import check_layout

# Rows of `CacheState.row_index`.
READ, WRITE = 0, 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CacheState:
    """All device memory of a cache. Every update returns a new state.

    A jitted step is given the state to keep (it is donated) and returns it as the same
    memory, so hold one reference and rebind it in the statement that calls the step.

    Attributes:
        pools: One array for each of `layout.pools`, in that order and of their shapes.
        page_table: `i32[page groups, num_seats, max_pages]`, the page that holds the
            tokens from `column * tokens_per_page` on, of the request in a seat.
        row_index: `i32[2, num_seats]`, the row that the next step reads and the row
            that it writes, of the request in a seat.
        layout: What bytes lie where. Static.
        size: How many slots and seats there are. Static.
        mesh: The devices that the units are split over, or `None`. Static.
        tensor_axis: The mesh axis that they are split over. Static.
    """

    pools: tuple[jax.Array, ...]
    page_table: jax.Array
    row_index: jax.Array
    layout: CacheLayout = dataclasses.field(metadata={"static": True})
    size: CacheSize = dataclasses.field(metadata={"static": True})
    mesh: Mesh | None = dataclasses.field(metadata={"static": True})
    tensor_axis: str = dataclasses.field(metadata={"static": True})

    def pool_sharding(self, pool: int) -> NamedSharding | None:
        """Returns the sharding of a pool: its unit axis over the tensor axis."""
        if self.mesh is None:
            return None
        axis = self.layout.pools[pool].unit_axis
        spec = PartitionSpec(*[None] * axis, self.tensor_axis)
        return NamedSharding(self.mesh, spec)

    @property
    def replicated(self) -> NamedSharding | None:
        """The sharding of page tables, row index and step inputs."""
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())


def constrain(array: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Fixes the sharding of a traced array, on a mesh of automatic or explicit axes."""
    if sharding is None:
        return array
    if AxisType.Explicit in sharding.mesh.axis_types:
        array = jax.sharding.reshard(array, sharding)
    else:
        array = lax.with_sharding_constraint(array, sharding)
    return array


def abstract_cache(
    layout: CacheLayout,
    size: CacheSize,
    mesh: Mesh | None = None,
    *,
    tensor_axis: str = "tensor",
) -> CacheState:
    """Returns the state that `init_cache` would make, without its memory.

    Its leaves are `jax.ShapeDtypeStruct`: what `explain_step` and `jax.eval_shape` need
    to reason about a cache that is larger than this machine.

    Args:
        layout: The layout.
        size: Slots and seats.
        mesh: The devices, also ones that are not attached; `None` is a single device.
        tensor_axis: The axis of `mesh` that the units are split over.

    Raises:
        ValueError: if `mesh` does not have `layout.num_shards` devices along the axis.
    """
    check_layout(layout)
    check_kind("size", size, CacheSize)
    if len(size.num_pages) != layout.num_page_groups:
        raise ValueError(
            f"size must have pages for {layout.num_page_groups} attention groups, "
            f"got num_pages = {size.num_pages}"
        )
    if size.tokens_per_page != layout.tokens_per_page:
        raise ValueError(
            f"size must have tokens_per_page = {layout.tokens_per_page}, "
            f"got {size.tokens_per_page}"
        )
    _check_mesh(layout, mesh, tensor_axis)
    # Shardings are a property of the state, so a state without arrays knows them.
    empty = CacheState(
        pools=(),
        page_table=None,  # type: ignore[arg-type]
        row_index=None,  # type: ignore[arg-type]
        layout=layout,
        size=size,
        mesh=mesh,
        tensor_axis=tensor_axis,
    )
    pools = tuple(
        jax.ShapeDtypeStruct(
            spec.shape(size.group_slots(spec.group_id)),
            spec.numpy_dtype,
            sharding=empty.pool_sharding(pool),
        )
        for pool, spec in enumerate(layout.pools)
    )
    page_table = jax.ShapeDtypeStruct(
        (layout.num_page_groups, size.num_seats, size.max_pages),
        jnp.int32,
        sharding=empty.replicated,
    )
    row_index = jax.ShapeDtypeStruct(
        (2, size.num_seats), jnp.int32, sharding=empty.replicated
    )
    return dataclasses.replace(
        empty,
        pools=pools,  # type: ignore[arg-type]
        page_table=page_table,  # type: ignore[arg-type]
        row_index=row_index,  # type: ignore[arg-type]
    )


def init_cache(
    layout: CacheLayout,
    num_pages: int | Sequence[int],
    num_rows: int,
    mesh: Mesh | None = None,
    *,
    max_seqs: int,
    max_tokens: int,
    num_sinks: int = 1,
    tensor_axis: str = "tensor",
) -> CacheState:
    """Allocates a cache: all pools zero, every seat on the null page and on a sink row.

    Args:
        layout: What bytes lie where.
        num_pages: Pages of each attention group, or one number for all of them.
        num_rows: Rows: at least one for each running request, the rest for snapshots.
        mesh: The devices; `None` is JAX's default device. Units are split over
            `tensor_axis`, everything else is the same on every device.
        max_seqs: Most requests that run at once.
        max_tokens: Longest history of a request.
        num_sinks: Slots, and seats, reserved for padding and dummies.
        tensor_axis: Name of the mesh axis, of length `layout.num_shards`.

    Returns:
        The state. No other array may share its memory: it is donated by every step.

    Raises:
        ValueError: if the size cannot work (see `CacheSize.create`), the mesh does not
            fit the layout, or the memory is not there.
    """
    size = CacheSize.create(
        layout,
        num_pages,
        num_rows,
        max_seqs=max_seqs,
        max_tokens=max_tokens,
        num_sinks=num_sinks,
    )
    shape = abstract_cache(layout, size, mesh, tensor_axis=tensor_axis)
    try:
        return _allocate(shape)
    except MemoryError as error:
        raise _too_large(layout, size) from error
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise _too_large(layout, size) from error


def _allocate(shape: CacheState) -> CacheState:
    """Returns a state that `abstract_cache` made with its memory."""
    size = shape.size
    # The pools first: where memory is short, it is they that are too large.
    pools = tuple(
        jnp.zeros(pool.shape, pool.dtype, device=pool.sharding) for pool in shape.pools
    )
    # Seat max_seqs + i is a dummy; its pages and its row are sink i.
    sinks = size.sink_slot + np.arange(size.num_sinks)
    page_table = np.full(shape.page_table.shape, NULL_SLOT, np.int32)
    page_table[:, size.max_seqs :] = sinks[:, None]
    row_index = np.full(shape.row_index.shape, NULL_SLOT, np.int32)
    row_index[WRITE] = size.sink_slot
    row_index[WRITE, size.max_seqs :] = sinks
    return dataclasses.replace(
        shape,
        pools=pools,
        # Not device_put: on CPU that lends out NumPy's memory, and a state is donated.
        page_table=jnp.array(page_table, device=shape.replicated),
        row_index=jnp.array(row_index, device=shape.replicated),
    )


def _too_large(layout: CacheLayout, size: CacheSize) -> ValueError:
    return ValueError(
        f"num_pages = {list(size.num_pages)} and num_rows = {size.num_rows}, with "
        f"max_seqs = {size.max_seqs} and max_tokens = {size.max_tokens}, ask for "
        f"{size.total_bytes(layout):,} bytes, and the device has less to give; lower "
        f"one of them"
    )


def _check_mesh(layout: CacheLayout, mesh: Mesh | None, tensor_axis: str) -> None:
    shards = layout.num_shards
    check_name("tensor_axis", tensor_axis)
    if mesh is not None:
        check_kind("mesh", mesh, Mesh)
    if mesh is None:
        if shards != 1:
            raise ValueError(
                f"mesh must have an axis {tensor_axis!r} of length num_shards = "
                f"{shards}, got no mesh"
            )
    elif mesh.shape.get(tensor_axis) != shards:
        raise ValueError(
            f"mesh must have an axis {tensor_axis!r} of length num_shards = {shards}, "
            f"got axes {dict(mesh.shape)}"
        )
