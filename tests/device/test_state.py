"""The state is a pytree that owns its arrays; a size that cannot work is refused."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxcache.device.state import READ, WRITE, CacheState, abstract_cache, init_cache
from jaxcache.device.step_inputs import StepInputs, begin_step
from jaxcache.inputs.packing import Packer
from jaxcache.layouts import NULL_SLOT, CacheLayout, CacheSize
from tests.device.caches import (
    BUCKETS,
    FULL,
    MAMBA,
    ORDERS,
    WINDOW,
    cache,
    hybrid,
    mesh_of,
    model,
    work,
)

STATES: dict[str, Callable[[], CacheState]] = {
    "hybrid-units": lambda: cache(hybrid("units")),
    "hybrid-buffers": lambda: cache(hybrid("buffers")),
    "attention": lambda: cache(CacheLayout(model(FULL, WINDOW), 4)),
    "recurrent": lambda: cache(CacheLayout(model(MAMBA), 4)),
    "sharded": lambda: cache(hybrid("units", 2), mesh_of(2)),
}


def inputs() -> StepInputs:
    state = cache(hybrid())
    packer = Packer(state.layout, state.size, BUCKETS)
    todo = work(decode_seats=[0], decode_positions=[0], decode_tokens=[1])
    made: StepInputs = jax.jit(begin_step)(state, packer.pack(todo))[1]
    return made


TREES: dict[str, Callable[[], Any]] = {**STATES, "inputs": inputs}


@pytest.mark.parametrize("name", TREES)
def test_pytree_keeps_structure_and_owns_its_arrays(name: str) -> None:
    tree = TREES[name]()
    leaves, structure = jax.tree.flatten(tree)
    again = [TREES[name](), jax.eval_shape(lambda: TREES[name]())]
    assert [jax.tree.structure(other) for other in again] == [structure] * 2
    assert all(leaf is None for leaf in jax.tree.map(lambda x: None, leaves))
    hash(structure)
    assert type(jax.tree.unflatten(structure, leaves)) is type(tree)
    if isinstance(tree, CacheState):
        # A buffer in two leaves cannot be donated.
        places = [
            shard.data.unsafe_buffer_pointer()
            for leaf in leaves
            for shard in leaf.addressable_shards
            if leaf.size
        ]
        assert len(places) == len(set(places))


@pytest.mark.parametrize("name", STATES)
def test_state_can_be_donated_whole(name: str) -> None:
    state = STATES[name]()
    places = pointers(state)
    state = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
    assert pointers(state) == places


def pointers(state: CacheState) -> list[int]:
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(state)
        for shard in leaf.addressable_shards
        if leaf.size
    ]


@pytest.mark.parametrize("order", ORDERS)
def test_fresh_cache_is_zero_and_points_at_nothing_live(order: Any) -> None:
    state = cache(hybrid(order))
    size = state.size
    for spec, pool in zip(state.layout.pools, state.pools, strict=True):
        assert pool.shape == spec.shape(size.group_slots(spec.group_id))
        assert pool.dtype == spec.dtype
        assert not np.asarray(pool).any()
    table, rows = np.asarray(state.page_table), np.asarray(state.row_index)
    assert (table[:, : size.max_seqs] == NULL_SLOT).all()
    assert (rows[READ] == NULL_SLOT).all()
    # What is written is a sink: never the null slot, never a slot of a request.
    assert (rows[WRITE, : size.max_seqs] == size.sink_slot).all()
    for dummy in range(size.num_sinks):
        assert (table[:, size.max_seqs + dummy] == size.sink_slot + dummy).all()
        assert rows[WRITE, size.max_seqs + dummy] == size.sink_slot + dummy
    assert size.sink_slot + size.num_sinks == size.first_slot


def test_equal_layouts_share_one_compilation() -> None:
    traced = []

    @jax.jit
    def touch(state: CacheState) -> jax.Array:
        traced.append(state.layout)
        return state.row_index.sum()

    touch(cache(hybrid()))
    touch(cache(hybrid()))
    assert len(traced) == 1
    touch(cache(hybrid("buffers")))
    assert len(traced) == 2


def test_abstract_cache_is_the_shape_of_a_cache() -> None:
    for make in STATES.values():
        state = make()
        shape = abstract_cache(state.layout, state.size, state.mesh)
        structures = [jax.tree.structure(tree) for tree in (shape, state)]
        assert structures[:1] == structures[1:]
        for leaf, array in zip(
            jax.tree.leaves(shape), jax.tree.leaves(state), strict=True
        ):
            assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype)
            if state.mesh is not None:
                assert leaf.sharding.is_equivalent_to(array.sharding, array.ndim)


def test_units_are_split_over_the_mesh_and_nothing_else_is() -> None:
    for shards, order in ((2, "units"), (4, "units"), (4, "buffers")):
        layout = hybrid(order, shards)  # type: ignore[arg-type]
        state = cache(layout, mesh_of(shards))
        for spec, pool in zip(layout.pools, state.pools, strict=True):
            local = pool.addressable_shards[0].data.shape
            assert local == spec.shard.shape(pool.shape[0])
            assert len(pool.addressable_shards) == shards
        for table in (state.page_table, state.row_index):
            assert table.sharding.is_fully_replicated


@pytest.mark.parametrize(
    ("shards", "mesh", "message"),
    [
        (2, None, "mesh must have an axis 'tensor' of length num_shards = 2, got no"),
        (2, (4, "tensor"), "of length num_shards = 2, got axes {'tensor': 4}"),
        (2, (2, "model"), "mesh must have an axis 'tensor' of length num_shards = 2"),
    ],
)
def test_mesh_that_does_not_fit_is_refused(
    shards: int, mesh: tuple[int, str] | None, message: str
) -> None:
    made = None
    if mesh is not None:
        count, name = mesh
        made = Mesh(np.array(jax.devices()[:count]), (name,))
    with pytest.raises(ValueError, match=re.escape(message)):
        cache(hybrid("units", shards), made)


def test_size_that_cannot_work_is_refused() -> None:
    with pytest.raises(ValueError, match="num_rows must be at least max_seqs = 4"):
        init_cache(hybrid(), 16, 3, max_seqs=4, max_tokens=16)
    size = CacheSize.create(
        CacheLayout(model(FULL), 8), 16, 0, max_seqs=4, max_tokens=16
    )
    with pytest.raises(ValueError, match="size must have pages for 2 attention groups"):
        abstract_cache(hybrid(), size)
    with pytest.raises(ValueError, match="size must have tokens_per_page = 4, got 8"):
        abstract_cache(CacheLayout(model(FULL), 4), size)


def test_index_vectors_do_not_borrow_numpy_memory() -> None:
    """A donated array that lends NumPy's memory would be written behind its back."""
    state = cache(hybrid())
    before = np.array(state.row_index)
    state = jax.jit(
        lambda s: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s), donate_argnums=0
    )(state)
    np.testing.assert_array_equal(state.row_index, before + 1)
