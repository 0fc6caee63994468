"""Step functions of the shapes that models have, for proofs and refusals."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxcache.device.pools import (
    LayerId,
    after_read,
    emit_snapshots,
    read_pages,
    read_rows,
    write_rows,
    write_tokens,
)
from jaxcache.device.state import CacheState
from jaxcache.device.step_inputs import StepInputs
from jaxcache.layouts import CacheLayout

PAGES_A_BLOCK = 2


def attend(
    state: CacheState, inputs: StepInputs, layer_id: LayerId, group_id: int, x: Any
) -> tuple[CacheState, Any]:
    """Writes a layer's tokens, then reads its pages block by block in a loop."""
    state = write_tokens(state, inputs, layer_id, {"key": x, "value": x + 1})
    tables = inputs.page_tables[group_id]

    def block(i: Any, total: Any) -> Any:
        ids = lax.dynamic_slice_in_dim(tables, i * PAGES_A_BLOCK, PAGES_A_BLOCK, 1)
        keys = read_pages(state, layer_id, "key", ids)
        values = read_pages(state, layer_id, "value", ids)
        return total + (keys * values).astype(jnp.float32).sum((1, 2, 3, 4))

    num_blocks = tables.shape[1] // PAGES_A_BLOCK
    total = jnp.zeros(tables.shape[0], jnp.float32)
    # The next layer writes this pool again, and nothing it writes needs the total.
    return after_read(state, lax.fori_loop(0, num_blocks, block, total))


def recur(
    state: CacheState, inputs: StepInputs, layer_id: LayerId
) -> tuple[CacheState, Any]:
    """Reads a layer's rows, changes them, emits states on the way and writes them."""
    state, rows = read_rows(state, layer_id, inputs.state_read)
    new = {role: row + jnp.ones((), row.dtype) for role, row in rows.items()}
    emitted = {role: row[inputs.snapshot_entry] for role, row in new.items()}
    state = emit_snapshots(state, inputs, layer_id, emitted)
    state = write_rows(state, layer_id, inputs.state_write, new)
    return state, sum(row.astype(jnp.float32).sum() for row in rows.values())


def unrolled(layout: CacheLayout) -> Callable[..., tuple[CacheState, Any]]:
    """A model's step: every layer, one after the other."""

    def step(
        params: jax.Array, state: CacheState, inputs: StepInputs
    ) -> tuple[CacheState, Any]:
        out = []
        for layer in layout.model.layers:
            i = layer.layer_id
            if layer.kind.retention.is_recurrent:
                state, y = recur(state, inputs, i)
            else:
                units = layout.units(i, "key")
                dim = layout.buffer_spec(i, "key").unit_shape[-1]
                x = params[inputs.token_ids][:, None, None]
                x = jnp.broadcast_to(x, (x.shape[0], units, dim))
                state, y = attend(state, inputs, i, layout.group_of(i, "key"), x)
            out.append(y.sum())
        return state, jnp.stack(out)

    return step


def scanned(
    params: jax.Array, state: CacheState, inputs: StepInputs
) -> tuple[CacheState, Any]:
    """The step of a model whose layers all have one attention and one recurrence."""
    layout = state.layout
    spec = layout.pool_of(0, "key")
    x = params[inputs.token_ids][:, None, None]
    x = jnp.broadcast_to(x, (x.shape[0], spec.model_units, spec.unit_shape[-1]))

    def layer(state: CacheState, layer_id: jax.Array) -> tuple[CacheState, Any]:
        state, y = attend(state, inputs, layer_id, 0, x)
        state, z = recur(state, inputs, layer_id)
        return state, y.sum() + z

    return lax.scan(layer, state, jnp.arange(len(layout.model.layer_ids)))


def with_pool(state: CacheState, index: int, pool: jax.Array) -> CacheState:
    pools = (*state.pools[:index], pool, *state.pools[index + 1 :])
    return dataclasses.replace(state, pools=pools)


# Steps that copy a pool: each indexes pools by itself, as nothing in the package does.


def reads_then_overwrites(
    state: CacheState, inputs: StepInputs
) -> tuple[CacheState, Any]:
    """Rows are read out and overwritten, without a barrier."""
    pool = state.pools[0]
    rows = pool[inputs.seat]
    written = pool.at[inputs.seat].set(jnp.zeros((), pool.dtype))
    return with_pool(state, 0, written), rows


def kernel_then_update(state: CacheState, inputs: StepInputs) -> tuple[CacheState, Any]:
    """A kernel reads the pool, and nothing orders that before the update."""
    out = _kernel(state.pools[0])
    rows = state.pools[0][inputs.seat]
    pool = state.pools[0].at[inputs.seat].set(rows * jnp.full((), 2, rows.dtype))
    return with_pool(state, 0, pool), out


def kernel_then_ordered_update(
    state: CacheState, inputs: StepInputs
) -> tuple[CacheState, Any]:
    """The same with `after_read`, which is what the error advises."""
    state, out = after_read(state, _kernel(state.pools[0]))
    state, rows = after_read(state, state.pools[0][inputs.seat])
    pool = state.pools[0].at[inputs.seat].set(rows * jnp.full((), 2, rows.dtype))
    return with_pool(state, 0, pool), out


def _kernel(pool: jax.Array) -> jax.Array:
    """Something that reads the whole pool."""
    return pool.sum()


def scatters_into_a_reshape(
    state: CacheState, inputs: StepInputs
) -> tuple[CacheState, Any]:
    """Rows are read from the pool and written to a reshaped pool."""
    pool = state.pools[0]
    flat = pool.reshape(pool.shape[0], -1)
    rows = flat[inputs.seat]
    written = flat.at[inputs.state_write].set(rows * 2)
    return with_pool(state, 0, written.reshape(pool.shape)), None


def bitcasts_the_pool(state: CacheState, inputs: StepInputs) -> tuple[CacheState, Any]:
    """The pool is written as integers."""
    pool = state.pools[0]
    kind = jnp.dtype(f"uint{8 * pool.dtype.itemsize}")
    view = lax.bitcast_convert_type(pool, kind)
    rows = view[inputs.seat]
    view = view.at[inputs.state_write].set(rows ^ jnp.ones((), kind))
    return with_pool(state, 0, lax.bitcast_convert_type(view, pool.dtype)), None


def scans_pools_of_layers(
    state: CacheState, inputs: StepInputs
) -> tuple[CacheState, Any]:
    """The pool goes through a scan as one pool a layer, xs -> ys."""
    pool, axis = state.pools[0], state.layout.pools[0].buffer_axis

    def layer(total: Any, own: jax.Array) -> tuple[Any, jax.Array]:
        rows = own[inputs.seat]
        return total + rows.astype(jnp.float32).sum(), own.at[inputs.seat].set(rows * 2)

    total, pools = lax.scan(layer, jnp.float32(0), jnp.moveaxis(pool, axis, 0))
    return with_pool(state, 0, jnp.moveaxis(pools, 0, axis)), total


def gathers_before_it_scatters(
    state: CacheState, inputs: StepInputs
) -> tuple[CacheState, Any]:
    """Each layer of a scan reads rows out before it overwrites them."""

    def layer(pool: jax.Array, i: jax.Array) -> tuple[jax.Array, Any]:
        at = pool.at[inputs.seat, :, i]
        return at.set(jnp.zeros((), pool.dtype)), at.get()

    steps = jnp.arange(state.layout.pools[0].num_buffers)
    pool, rows = lax.scan(layer, state.pools[0], steps)
    return with_pool(state, 0, pool), rows
