"""Pool access: the only module that indexes pools, and the rules that keep it in place.

Each rule is one that a copy of a whole pool was measured without (JAX 0.12, CPU and
compiled for an H200):

* A scatter goes to the pool in its own shape and dtype: never to a reshaped pool.
* Rows that are read and then overwritten go through `lax.optimization_barrier` together
  with the pool, and so do results of kernels (`after_read`). Otherwise the gather is
  fused into the scatter, and the fusion needs the pool twice.
* Index vectors have two elements or more (see `buckets.MIN_INDICES`).
* A negative index wraps in JAX, so it is mapped out of range before it is dropped.

One more is for speed: written indices are declared unique, since a GPU otherwise writes
16-bit elements one compare-and-swap at a time. Padding is therefore not written to the
sink many times over but dropped, each index past the end and different from the others.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from jaxcache.device.state import CacheState, constrain
from jaxcache.inputs.buckets import MIN_INDICES
from jaxcache.layouts import NULL_SLOT, CacheLayout, PoolSpec

if TYPE_CHECKING:
    from jaxcache.device.step_inputs import StepInputs

# A layer is named by its id, or by a traced id inside a scan over layers.
LayerId = int | jax.Array


def write_tokens(
    state: CacheState,
    inputs: "StepInputs",
    layer_id: LayerId,
    values: Mapping[str, jax.Array],
) -> CacheState:
    """Writes what a layer keeps of this step's tokens into their pages.

    Args:
        state: The state.
        inputs: The step: `page_slots` and `page_offsets` say where each token goes.
            Padding tokens write nothing.
        layer_id: The layer; traced in a scan over layers that share one pool.
        values: By role, `dtype[T, units, *rest]` with the model's units (repeated here
            where shards outnumber them) or the cache's; cast to the pool's dtype.

    Returns:
        The updated state.

    Raises:
        ValueError: if a role is not one of the layer's, or a shape does not fit.
    """
    for role, value in values.items():
        pool, spec, buffer = _locate(state, layer_id, role)
        if spec.group_id >= state.layout.num_page_groups:
            raise ValueError(
                f"role must be kept in pages for write_tokens, got {role!r} of layer "
                f"{layer_id}, kept in rows"
            )
        tokens = inputs.page_offsets.shape
        value = _fit(state, pool, role, value, tokens, spec.unit_shape[1:])
        slots = _writable(state, pool, inputs.page_slots[spec.group_id])
        index = _index(spec, slots, buffer, inputs.page_offsets)
        state = _scatter(state, pool, index, value)
    return state


def read_pages(
    state: CacheState, layer_id: LayerId, role: str, page_ids: jax.Array
) -> jax.Array:
    """Gathers pages of one buffer. It may stand inside a loop over pages.

    Tokens past the end of a sequence hold whatever the last owner of the page left,
    also NaN: mask the values as well as the scores.

    Args:
        state: The state. If its pools are written later in the same step with something
            that does not depend on the result, pass both through `after_read`.
        layer_id: The layer; traced in a scan over layers that share one pool.
        role: What to read.
        page_ids: `i32[...]`. An id outside the pool reads the null page, all zeros.

    Returns:
        `dtype[..., cache_units, tokens_per_page, *rest]`.
    """
    pool, _, buffer = _locate(state, layer_id, role)
    return _gather(state, pool, page_ids, buffer)


def after_read[T](state: CacheState, value: T) -> tuple[CacheState, T]:
    """Orders a value that was read from the pools before every later write to them.

    Args:
        state: The state that was read.
        value: A pytree of what was read, or of what a kernel made of the pools.

    Returns:
        The state and the value, to be used in place of the arguments.
    """
    value, pools = lax.optimization_barrier((value, state.pools))
    return dataclasses.replace(state, pools=pools), value


def read_rows(
    state: CacheState, layer_id: LayerId, rows: jax.Array
) -> tuple[CacheState, dict[str, jax.Array]]:
    """Reads the recurrent state of one layer; the barrier of `after_read` included.

    Args:
        state: The state.
        layer_id: The layer; traced in a scan over layers that share their pools.
        rows: `i32[K]`, usually `inputs.state_read`. A row outside the pool reads the
            null row, all zeros.

    Returns:
        The state, and by role `dtype[K, cache_units, *unit_shape]`.

    Raises:
        ValueError: if the layer keeps nothing in rows.
    """
    values = {}
    for role in row_roles(state.layout, layer_id):
        pool, _, buffer = _locate(state, layer_id, role)
        values[role] = _gather(state, pool, rows, buffer)
    return after_read(state, values)


def write_rows(
    state: CacheState,
    layer_id: LayerId,
    rows: jax.Array,
    values: Mapping[str, jax.Array],
) -> CacheState:
    """Writes the recurrent state of one layer.

    Args:
        state: The state.
        layer_id: The layer; traced in a scan over layers that share their pools.
        rows: `i32[K]`, usually `inputs.state_write`; no live row twice. The null row,
            the sinks and rows outside the pool are not written.
        values: By role, `dtype[K, units, *unit_shape]` with the model's units or the
            cache's; cast to the pool's dtype.

    Returns:
        The updated state.

    Raises:
        ValueError: if a role is not one of the layer's, or a shape does not fit.
    """
    known = row_roles(state.layout, layer_id)
    for role, value in values.items():
        if role not in known:
            raise ValueError(
                f"values must have roles of {', '.join(known)} for layer {layer_id}, "
                f"got {role!r}"
            )
        pool, spec, buffer = _locate(state, layer_id, role)
        value = _fit(state, pool, role, value, rows.shape, spec.unit_shape)
        index = _index(spec, _writable(state, pool, rows), buffer)
        state = _scatter(state, pool, index, value)
    return state


def emit_snapshots(
    state: CacheState,
    inputs: "StepInputs",
    layer_id: LayerId,
    values: Mapping[str, jax.Array],
) -> CacheState:
    """Writes the states that a layer passed through inside the step's chunks.

    Args:
        state: The state.
        inputs: The step: emission m is the state of entry `snapshot_entry[m]` after
            `snapshot_position[m]` tokens and goes to row `snapshot_slot[m]`.
        layer_id: The layer.
        values: By role, `dtype[M, units, *unit_shape]`.

    Returns:
        The updated state.
    """
    return write_rows(state, layer_id, inputs.snapshot_slot, values)


def copy_pages(
    state: CacheState, group_id: int, source: jax.Array, destination: jax.Array
) -> CacheState:
    """Copies whole pages of an attention group: all layers, all roles.

    Args:
        state: The state.
        group_id: The attention group.
        source: `i32[K]`, K at least 2. All are read before any is written.
        destination: `i32[K]`, none twice. Reserved pages and pages outside the pool are
            not written, which is how a padded vector is passed.

    Returns:
        The updated state.
    """
    return _copy_slots(state, _page_pools(state, group_id), source, destination)


def copy_rows(
    state: CacheState, source: jax.Array, destination: jax.Array
) -> CacheState:
    """Copies whole rows: all layers, all roles. Arguments as in `copy_pages`."""
    return _copy_slots(state, _row_pools(state), source, destination)


def clear_pages(state: CacheState, group_id: int, pages: jax.Array) -> CacheState:
    """Zeroes whole pages of an attention group.

    Args:
        state: The state.
        group_id: The attention group.
        pages: `i32[K]`, K at least 2. Reserved pages and pages outside the pool are not
            written.

    Returns:
        The updated state.
    """
    return _clear_slots(state, _page_pools(state, group_id), pages)


def clear_rows(state: CacheState, rows: jax.Array) -> CacheState:
    """Zeroes whole rows: all layers, all roles. Arguments as in `clear_pages`."""
    return _clear_slots(state, _row_pools(state), rows)


def row_roles(layout: CacheLayout, layer_id: LayerId) -> tuple[str, ...]:
    """Returns the roles that a layer keeps in rows.

    For a traced layer id these are the roles of the first recurrent layer.

    Raises:
        ValueError: if the layer keeps nothing in rows.
    """
    group = layout.recurrent_group
    if group is None:
        raise ValueError(f"layer_id must be a recurrent layer, got {layer_id}: none is")
    first = group.layer_ids[0]
    roles = layout.row_roles(first if isinstance(layer_id, jax.Array) else layer_id)
    if not roles:
        raise ValueError(
            f"layer_id must be one of the recurrent layers {group.layer_ids}, "
            f"got {layer_id}"
        )
    return roles


def update_tables(state: CacheState, updates: jax.Array) -> CacheState:
    """Brings page tables and row index up to date.

    Args:
        state: The state.
        updates: `i32[4, U]`, columns (table, seat, column, value) as in `StepWork`; no
            element twice. Updates of a table, seat or column that does not exist are
            dropped, which is how padding is passed.

    Returns:
        The updated state.

    Raises:
        ValueError: if `updates` has another shape or dtype.
    """
    if updates.ndim != 2 or updates.shape[0] != 4 or updates.dtype != jnp.int32:
        raise ValueError(
            f"updates must be int32[4, U], got {updates.dtype}{list(updates.shape)}"
        )
    table, seat, column, value = updates
    groups = state.layout.num_page_groups
    exists = (table >= 0) & (seat >= 0) & (column >= 0)
    page_table, row_index = state.page_table, state.row_index
    if groups:
        index = (jnp.where(exists, table, groups), seat, column)
        page_table = page_table.at[index].set(value, mode="drop")
    row_column = jnp.where(exists & (table == groups), column, row_index.shape[0])
    row_index = row_index.at[row_column, seat].set(value, mode="drop")
    return dataclasses.replace(state, page_table=page_table, row_index=row_index)


def _page_pools(state: CacheState, group_id: int) -> tuple[int, ...]:
    groups = state.layout.page_groups
    if not 0 <= group_id < len(groups):
        raise ValueError(
            f"group_id must be an attention group below {len(groups)}, got {group_id}"
        )
    return groups[group_id].pools


def _row_pools(state: CacheState) -> tuple[int, ...]:
    group = state.layout.recurrent_group
    if group is None:
        raise ValueError(
            f"state must have rows, got {state.layout.model.name} without recurrent "
            f"layers"
        )
    return group.pools


def _locate(
    state: CacheState, layer_id: LayerId, role: str
) -> tuple[int, PoolSpec, LayerId]:
    """Returns pool, spec and (maybe traced) buffer index of a (layer, role)."""
    layout = state.layout
    if not isinstance(layer_id, jax.Array):
        location = layout.locate(layer_id, role)
        return location.pool, layout.pools[location.pool], location.buffer
    holders = [
        pool
        for pool, spec in enumerate(layout.pools)
        if any(name == role for _, name in spec.buffers)
    ]
    if len(holders) != 1:
        raise ValueError(
            f"layer_id must be an int for role {role!r}, which lives in {len(holders)} "
            f"pools, got a traced value"
        )
    spec = layout.pools[holders[0]]
    # Layers without the role are past the end: read as zeros, never written.
    table = [spec.num_buffers] * (max(layer for layer, _ in spec.buffers) + 1)
    for buffer, (layer, name) in enumerate(spec.buffers):
        if name == role:
            table[layer] = buffer
    buffers = jnp.array(table, jnp.int32)
    buffer_index = buffers.at[layer_id].get(mode="fill", fill_value=spec.num_buffers)
    return holders[0], spec, buffer_index


def _index(spec: PoolSpec, slots: jax.Array, buffer: LayerId, *rest: Any) -> Any:
    """Returns the index of some slots, all units, one buffer (and token) of a pool."""
    units = slice(None)
    inner = (units, buffer) if spec.order == "units" else (buffer, units)
    return (slots, *inner, *rest)


def _writable(state: CacheState, pool: int, slots: jax.Array) -> jax.Array:
    """Maps slots that must not be written past the end, each to an index of its own."""
    (count,) = slots.shape
    if 0 < count < MIN_INDICES:
        raise ValueError(
            f"slots to write must be none or at least {MIN_INDICES}, got {count}: pad "
            f"them with -1, which is not written"
        )
    num_slots = state.pools[pool].shape[0]
    live = (slots >= state.size.first_slot) & (slots < num_slots)
    return jnp.where(live, slots, num_slots + lax.iota(jnp.int32, count))


def _gather(
    state: CacheState, pool: int, slots: jax.Array, buffer: LayerId
) -> jax.Array:
    slots = _readable(state, pool, slots)
    index = _index(state.layout.pools[pool], slots, buffer)
    at = state.pools[pool].at[index]
    if isinstance(buffer, int):
        return at.get(mode="promise_in_bounds")
    return at.get(mode="fill", fill_value=0)


def _readable(state: CacheState, pool: int, slots: jax.Array) -> jax.Array:
    """Maps slots outside the pool to the null slot."""
    inside = (slots >= NULL_SLOT) & (slots < state.pools[pool].shape[0])
    return jnp.where(inside, slots, NULL_SLOT)


def _fit(
    state: CacheState,
    pool: int,
    role: str,
    value: jax.Array,
    lead: tuple[int, ...],
    rest: tuple[int, ...],
) -> jax.Array:
    """Returns a value in the pool's dtype, with the pool's units, sharded like it."""
    spec = state.layout.pools[pool]
    shapes = {(*lead, units, *rest): units for units in (spec.units, spec.model_units)}
    if value.shape not in shapes:
        wanted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{role} must have shape {wanted}, got {value.shape}")
    value = value.astype(spec.numpy_dtype)
    if shapes[value.shape] != spec.units:
        value = jnp.repeat(value, spec.repeats, axis=1)
    if state.mesh is None:
        return value
    spread = PartitionSpec(None, state.tensor_axis)
    return constrain(value, NamedSharding(state.mesh, spread))


def _scatter(state: CacheState, pool: int, index: Any, value: jax.Array) -> CacheState:
    array = state.pools[pool].at[index].set(value, mode="drop", unique_indices=True)
    array = constrain(array, state.pool_sharding(pool))
    pools = (*state.pools[:pool], array, *state.pools[pool + 1 :])
    return dataclasses.replace(state, pools=pools)


def _copy_slots(
    state: CacheState,
    pools: tuple[int, ...],
    source: jax.Array,
    destination: jax.Array,
) -> CacheState:
    for pool in pools:
        slots = _readable(state, pool, source)
        # Pool by pool, so that only one pool's slots are held at a time.
        array = state.pools[pool].at[slots].get(mode="promise_in_bounds")
        state, array = after_read(state, array)
        index = _writable(state, pool, destination)
        state = _scatter(state, pool, index, array)
    return state


def _clear_slots(
    state: CacheState, pools: tuple[int, ...], slots: jax.Array
) -> CacheState:
    for pool in pools:
        index = _writable(state, pool, slots)
        zero = jnp.zeros((), state.pools[pool].dtype)
        state = _scatter(state, pool, index, zero)
    return state
