"""One pool: the shape and the strides of an array that holds many equal buffers.

A pool is `dtype[num_slots, units, num_buffers, *unit_shape]` in order `units`, or
`dtype[num_slots, num_buffers, units, *unit_shape]` in order `buffers`; row-major.
"""

import dataclasses
import functools
import math
from typing import Literal, overload

import numpy as np
import numpy.typing as npt

from jaxcache.layouts.arguments import integer
from jaxcache.layouts.roles import numpy_dtype

Order = Literal["units", "buffers"]
ORDERS: tuple[Order, ...] = ("units", "buffers")

# An index, or an array of them: the formulas below hold for both.
Indices = npt.NDArray[np.integer]
Index = int | Indices


@dataclasses.dataclass(frozen=True)
class BufferStrides:
    """Where the units of one buffer are, in bytes.

    Unit u of slot s starts at `offset + s * slot_stride + u * unit_stride` of the pool.

    Attributes:
        offset: First byte of unit 0 in slot 0.
        slot_stride: From a slot to the next.
        unit_stride: From a unit to the next.
        units: How many units there are.
        unit_bytes: Bytes of one unit, which are contiguous.
    """

    offset: int
    slot_stride: int
    unit_stride: int
    units: int
    unit_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer in one slot."""
        return self.units * self.unit_bytes


@dataclasses.dataclass(frozen=True)
class PoolSpec:
    """All buffers of one layer group that are equal in units, unit shape and dtype.

    A spec describes the global array. With tensor parallelism each shard's device holds
    an equal cut of the unit axis; `shard` is the spec of that array.

    Attributes:
        name: Readable name, unique in its layout: `attention0.key+value`.
        group_id: The layer group whose slots these are.
        model_units: Units of the model, U.
        units: Length of the unit axis: max(U, num_shards), repeated where replicated.
        unit_shape: Shape of one unit of one buffer.
        dtype: Name of the element type.
        buffers: The (layer id, role) of each buffer: by layer, then by role.
        order: What is outermost in a slot.
        num_shards: Tensor-parallel shards that the unit axis is cut into.
    """

    name: str
    group_id: int
    model_units: int
    units: int
    unit_shape: tuple[int, ...]
    dtype: str
    buffers: tuple[tuple[int, str], ...]
    order: Order
    num_shards: int

    @property
    def num_buffers(self) -> int:
        """Buffers in one slot."""
        return len(self.buffers)

    @property
    def numpy_dtype(self) -> np.dtype[np.generic]:
        """The element type as NumPy (with ml_dtypes) knows it."""
        return numpy_dtype(self.dtype)

    @property
    def unit_axis(self) -> int:
        """Axis of the units, the one that is sharded: 1 or 2."""
        return 1 if self.order == "units" else 2

    @property
    def buffer_axis(self) -> int:
        """Axis of the buffers: 2 or 1."""
        return 3 - self.unit_axis

    @property
    def repeats(self) -> int:
        """How many times each unit of the model stands on the unit axis."""
        return self.units // self.model_units

    @functools.cached_property
    def shard(self) -> "PoolSpec":
        """The array that one shard's device holds: its share of the units."""
        share = self.units // self.num_shards
        return dataclasses.replace(self, units=share, model_units=share, num_shards=1)

    def shape(self, num_slots: int) -> tuple[int, ...]:
        """Returns the shape of the pool with `num_slots` slots."""
        slots = integer("num_slots", num_slots, 0)
        inner = (self.units, self.num_buffers)
        return (
            slots,
            *(inner if self.order == "units" else inner[::-1]),
            *self.unit_shape,
        )

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit of one buffer."""
        return math.prod(self.unit_shape) * self.numpy_dtype.itemsize

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all units of one buffer."""
        return self.units * self.unit_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self.num_buffers * self.buffer_bytes

    @property
    def slot_stride(self) -> int:
        """Bytes from a slot to the next: a slot is contiguous."""
        return self.slot_bytes

    @property
    def unit_stride(self) -> int:
        """Bytes from a unit to the next, of the same buffer."""
        if self.order == "units":
            return self.num_buffers * self.unit_bytes
        return self.unit_bytes

    @property
    def buffer_stride(self) -> int:
        """Bytes from a buffer to the next, of the same unit."""
        return self.unit_bytes if self.order == "units" else self.buffer_bytes

    def strides(self, buffer: int) -> BufferStrides:
        """Returns where the units of one buffer are."""
        return BufferStrides(
            offset=buffer * self.buffer_stride,
            slot_stride=self.slot_stride,
            unit_stride=self.unit_stride,
            units=self.units,
            unit_bytes=self.unit_bytes,
        )

    @overload
    def view_index(self, slot: int, unit: int, buffer: int) -> int: ...
    @overload
    def view_index(
        self, slot: Indices, unit: Index, buffer: Index
    ) -> npt.NDArray[np.int64]: ...
    @overload
    def view_index(
        self, slot: Index, unit: Index, buffer: Index
    ) -> int | npt.NDArray[np.int64]: ...
    def view_index(
        self, slot: Index, unit: Index, buffer: Index
    ) -> int | npt.NDArray[np.int64]:
        """Returns the index of a unit of a buffer of a slot in the unit view.

        The unit view is the pool reshaped to `[num_slots * units * num_buffers,
        *unit_shape]`. Arrays broadcast and give `i64`.
        """
        slot, unit, buffer = wide(slot), wide(unit), wide(buffer)
        if self.order == "units":
            return (slot * self.units + unit) * self.num_buffers + buffer
        return (slot * self.num_buffers + buffer) * self.units + unit

    @overload
    def dense_view_index(self, slot: int, buffer: int) -> int: ...
    @overload
    def dense_view_index(
        self, slot: Indices, buffer: Index
    ) -> npt.NDArray[np.int64]: ...
    def dense_view_index(
        self, slot: Index, buffer: Index
    ) -> int | npt.NDArray[np.int64]:
        """Returns the index of a buffer of a slot in the dense view.

        The dense view is the pool reshaped to `[num_slots * num_buffers, units,
        *unit_shape]`; only order `buffers` has one.

        Raises:
            ValueError: in order `units`, where a buffer is not contiguous.
        """
        if self.order != "buffers":
            raise ValueError(
                f"order must be 'buffers' for a dense view of {self.name}, "
                f"got {self.order!r}"
            )
        return wide(slot) * self.num_buffers + wide(buffer)

    @overload
    def address(self, pool_base: int, slot: int, unit: int, buffer: int) -> int: ...
    @overload
    def address(
        self, pool_base: int, slot: Indices, unit: Index, buffer: Index
    ) -> npt.NDArray[np.int64]: ...
    @overload
    def address(
        self, pool_base: int, slot: Index, unit: Index, buffer: Index
    ) -> int | npt.NDArray[np.int64]: ...
    def address(
        self, pool_base: int, slot: Index, unit: Index, buffer: Index
    ) -> int | npt.NDArray[np.int64]:
        """Returns the address of a unit of a buffer of a slot: base plus strides.

        Arrays broadcast and give `i64`.
        """
        return (
            pool_base
            + wide(slot) * self.slot_stride
            + wide(unit) * self.unit_stride
            + wide(buffer) * self.buffer_stride
        )


def wide(index: Index) -> int | npt.NDArray[np.int64]:
    """Returns the index in 64 bits: `i32` slots times a stride would overflow."""
    if isinstance(index, np.ndarray):
        return index.astype(np.int64)
    return int(index)
