"""Addresses and view indices, against the strides and reshapes of NumPy arrays."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from jaxcache.layouts import (
    CacheLayout,
    FullAttention,
    LatentAttention,
    Layer,
    Mamba2,
    ModelLayout,
    Order,
    PoolSpec,
    units_of_shard,
)

MODEL = ModelLayout(
    "m",
    (
        Layer(0, Mamba2(4, 3, 2, 5, 4, conv_dtype="float16")),
        Layer(1, FullAttention(2, 6, value_head_dim=2, dtype="float8_e5m2")),
        Layer(2, LatentAttention(7)),
        Layer(2, Mamba2(4, 3, 2, 5, 4, conv_dtype="float16")),
        Layer(5, FullAttention(2, 6, value_head_dim=2, dtype="float8_e5m2")),
    ),
)
ORDERS: list[Order] = ["units", "buffers"]
NUM_SLOTS = 3


def numbered(pool: PoolSpec) -> np.ndarray:
    """A pool as an array of bytes-wide numbers, with the pool's shape and strides."""
    shape = pool.shape(NUM_SLOTS)
    return np.zeros(shape, pool.numpy_dtype)


def address_in(array: np.ndarray, index: tuple[int, ...]) -> int:
    """Bytes from the start of an array to the element at `index`."""
    inner = array[index]
    start: int = array.__array_interface__["data"][0]
    here: int = inner.__array_interface__["data"][0]
    return here - start


def index_of(pool: PoolSpec, slot: int, unit: int, buffer: int) -> tuple[int, ...]:
    """Index into the pool in its own shape."""
    if pool.order == "units":
        return (slot, unit, buffer)
    return (slot, buffer, unit)


def every_unit(pool: PoolSpec) -> list[tuple[int, int, int]]:
    """All (slot, unit, buffer) of a pool."""
    return list(
        itertools.product(range(NUM_SLOTS), range(pool.units), range(len(pool.buffers)))
    )


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
@pytest.mark.parametrize("order", ORDERS)
def test_addresses_are_those_of_the_array_in_memory(
    order: Order, num_shards: int
) -> None:
    base = 0x7F00_0000_1000
    layout = CacheLayout(MODEL, 4, num_shards, order)
    for pool in layout.pools:
        array = numbered(pool.shard)
        for slot, unit, buffer in every_unit(pool.shard):
            where = address_in(array, index_of(pool.shard, slot, unit, buffer))
            layer_id, role = pool.buffers[buffer]
            assert layout.address(base, slot, unit, layer_id, role) == base + where
            strides = layout.strides(layer_id, role)
            assert where == (
                strides.offset + slot * strides.slot_stride + unit * strides.unit_stride
            )
            assert strides.units == pool.units // num_shards
            assert strides.num_bytes == array[0].nbytes // pool.num_buffers


@pytest.mark.parametrize("order", ORDERS)
def test_strides_are_those_of_the_array(order: Order) -> None:
    for pool in CacheLayout(MODEL, 4, 1, order).pools:
        array = numbered(pool)
        assert pool.slot_stride == array.strides[0]
        assert pool.unit_stride == array.strides[pool.unit_axis]
        assert pool.buffer_stride == array.strides[pool.buffer_axis]
        assert pool.slot_bytes == array[0].nbytes
        assert pool.unit_bytes * pool.units == pool.buffer_bytes
        assert array.shape[pool.unit_axis] == pool.units
        assert array.shape[pool.buffer_axis] == pool.num_buffers


@pytest.mark.parametrize("order", ORDERS)
def test_the_units_of_a_slot_cover_its_bytes_once(order: Order) -> None:
    layout = CacheLayout(MODEL, 4, 2, order)
    for group in layout.groups:
        for index in group.pools:
            shard = layout.pools[index].shard
            bytes_of_slot = np.zeros(NUM_SLOTS * shard.slot_bytes, np.int8)
            for slot, unit, buffer in every_unit(shard):
                start = shard.address(0, slot, unit, buffer)
                bytes_of_slot[start : start + shard.unit_bytes] += 1
            assert (bytes_of_slot == 1).all()


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_a_shard_of_a_slot_is_one_run_in_order_units(num_shards: int) -> None:
    whole, cut = CacheLayout(MODEL, 4), CacheLayout(MODEL, 4, num_shards)
    for pool, split in zip(whole.pools, cut.pools, strict=True):
        if pool.units < num_shards:
            continue
        share = pool.units // num_shards
        for rank in range(num_shards):
            held = units_of_shard(pool.units, num_shards, rank)
            starts = sorted(
                pool.address(0, 1, unit, buffer)
                for unit in held
                for buffer in range(pool.num_buffers)
            )
            first = pool.slot_stride + rank * share * pool.unit_stride
            run = range(first, first + split.shard.slot_bytes, pool.unit_bytes)
            assert starts == list(run)


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
@pytest.mark.parametrize("order", ORDERS)
def test_view_indices_are_those_of_the_reshaped_array(
    order: Order, num_shards: int
) -> None:
    layout = CacheLayout(MODEL, 4, num_shards, order)
    for pool in layout.pools:
        shard = pool.shard
        shape = shard.shape(NUM_SLOTS)
        array = np.arange(np.prod(shape)).reshape(shape)
        view = array.reshape(-1, *pool.unit_shape)
        assert len(view) == NUM_SLOTS * shard.units * shard.num_buffers
        for slot, unit, buffer in every_unit(shard):
            layer_id, role = pool.buffers[buffer]
            index = layout.view_index(slot, unit, layer_id, role)
            want = array[index_of(shard, slot, unit, buffer)]
            np.testing.assert_array_equal(view[index], want)


def test_view_indices_of_a_worked_example() -> None:
    # 2 layers of B and C in 2 groups: n = 4 buffers, U = 2 units.
    units, buffers = CacheLayout(MODEL), CacheLayout(MODEL, order="buffers")
    assert units.locate(2, "conv_b").buffer == 2
    assert units.view_index(5, 1, 2, "conv_b") == (5 * 2 + 1) * 4 + 2 == 46
    assert buffers.view_index(5, 1, 2, "conv_b") == (5 * 4 + 2) * 2 + 1 == 45
    pool = buffers.pool_of(2, "conv_b")
    assert pool.dense_view_index(5, 2) == 22


def test_a_layer_is_dense_in_order_buffers() -> None:
    for pool in CacheLayout(MODEL, 4, order="buffers").pools:
        shape = pool.shape(NUM_SLOTS)
        array = np.arange(np.prod(shape)).reshape(shape)
        view = array.reshape(-1, pool.units, *pool.unit_shape)
        slots = np.arange(NUM_SLOTS, dtype=np.int32)
        for buffer in range(pool.num_buffers):
            indices = pool.dense_view_index(slots, buffer)
            np.testing.assert_array_equal(view[indices], array[:, buffer])


def test_a_dense_view_in_order_units_is_refused() -> None:
    pool = CacheLayout(MODEL).pools[0]
    message = (
        r"^order must be 'buffers' for a dense view of attention0.key, got 'units'$"
    )
    with pytest.raises(ValueError, match=message):
        pool.dense_view_index(0, 0)


@pytest.mark.parametrize("order", ORDERS)
def test_arrays_of_slots_give_arrays_of_indices(order: Order) -> None:
    layout = CacheLayout(MODEL, 4, 1, order)
    slots = np.arange(NUM_SLOTS, dtype=np.int32)[:, None]
    units = np.arange(4, dtype=np.int32)
    addresses = layout.address(1000, slots, units, 0, "ssm")
    indices = layout.view_index(slots, units, 0, "ssm")
    assert addresses.shape == indices.shape == (NUM_SLOTS, 4)
    for slot, unit in itertools.product(range(NUM_SLOTS), range(4)):
        assert addresses[slot, unit] == layout.address(1000, slot, unit, 0, "ssm")
        assert indices[slot, unit] == layout.view_index(slot, unit, 0, "ssm")


def test_addresses_past_two_gibibytes_do_not_wrap() -> None:
    layout = CacheLayout(MODEL, 4)
    stride = layout.pool_of(0, "ssm").slot_stride
    slot = 2**31 // stride + 12345
    wide = slot * stride
    assert wide > 2**31
    slots = np.array([slot], np.int32)
    assert layout.address(0, slots, 0, 0, "ssm").tolist() == [wide]
    assert layout.address(0, int(slot), 0, 0, "ssm") == wide


@hypothesis.given(
    units=st.integers(1, 4),
    num_layers=st.integers(1, 4),
    num_shards=st.sampled_from([1, 2, 4]),
    order=st.sampled_from(ORDERS),
    tokens_per_page=st.integers(1, 5),
)
def test_any_attention_model_has_the_strides_of_numpy(
    units: int, num_layers: int, num_shards: int, order: Order, tokens_per_page: int
) -> None:
    hypothesis.assume(not (units % num_shards and num_shards % units))
    kind = FullAttention(units, 3, 5, dtype="float32")
    model = ModelLayout("m", tuple(Layer(2 * i, kind) for i in range(num_layers)))
    layout = CacheLayout(model, tokens_per_page, num_shards, order)
    for pool in layout.pools:
        array = numbered(pool.shard)
        for slot, unit, buffer in every_unit(pool.shard):
            index = index_of(pool.shard, slot, unit, buffer)
            got = layout.address(0, slot, unit, *pool.buffers[buffer])
            assert got == address_in(array, index)
