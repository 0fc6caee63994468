"""A cache in NumPy and plain loops: what the device side must do, bit by bit."""

from typing import Any

import numpy as np

from jaxcache.device.state import READ, WRITE, CacheState
from jaxcache.inputs.packing import StepWork
from jaxcache.layouts import CacheLayout, CacheSize
from tests.device.caches import Array, canonical, cast


class Oracle:
    """Pools as `[slots, buffers, units, *unit_shape]`, tables as they are uploaded."""

    def __init__(self, state: CacheState) -> None:
        self.layout: CacheLayout = state.layout
        self.size: CacheSize = state.size
        self.pools = canonical(state)
        self.page_table = np.array(state.page_table)
        self.row_index = np.array(state.row_index)

    def buffer(self, layer_id: int, role: str) -> tuple[Array, Any]:
        """A view `[slots, units, *unit_shape]` of one buffer, and its pool's spec."""
        location = self.layout.locate(layer_id, role)
        spec = self.layout.pools[location.pool]
        return self.pools[location.pool][:, location.buffer], spec

    def writable(self, slot: int, pool: Array) -> bool:
        return self.size.first_slot <= slot < len(pool)

    def write_token(
        self, layer_id: int, role: str, slot: int, offset: int, value: Array
    ) -> None:
        buffer, spec = self.buffer(layer_id, role)
        if self.writable(slot, buffer):
            value = np.repeat(cast(value, spec.dtype), len(buffer[0]) // len(value), 0)
            buffer[slot, :, offset] = value

    def write_row(self, layer_id: int, role: str, slot: int, value: Array) -> None:
        buffer, spec = self.buffer(layer_id, role)
        if self.writable(slot, buffer):
            repeats = len(buffer[0]) // len(value)
            buffer[slot] = np.repeat(cast(value, spec.dtype), repeats, 0)

    def read(self, layer_id: int, role: str, slot: int) -> Array:
        buffer, _ = self.buffer(layer_id, role)
        read: Array = buffer[slot if 0 <= slot < len(buffer) else 0].copy()
        return read

    def group(self, group_id: int) -> list[Array]:
        return [self.pools[pool] for pool in self.layout.groups[group_id].pools]

    def copy(self, group_id: int, source: list[int], destination: list[int]) -> None:
        for pool in self.group(group_id):
            rows = [pool[s if 0 <= s < len(pool) else 0].copy() for s in source]
            for slot, row in zip(destination, rows, strict=True):
                if self.writable(slot, pool):
                    pool[slot] = row

    def clear(self, group_id: int, slots: list[int]) -> None:
        for pool in self.group(group_id):
            for slot in slots:
                if self.writable(slot, pool):
                    pool[slot] = 0

    def update(self, updates: list[list[int]]) -> None:
        """Applies (table, seat, column, value), dropping what does not exist."""
        groups = self.layout.num_page_groups
        for table, seat, column, value in updates:
            if not 0 <= table <= groups:
                continue
            target = self.row_index.T if table == groups else self.page_table[table]
            if 0 <= seat < target.shape[0] and 0 <= column < target.shape[1]:
                target[seat, column] = value

    def begin(self, work: StepWork) -> None:
        self.update(work.updates.T.tolist())
        for group, source, destination in self._by_group(work.copies):
            self.copy(group, source, destination)

    def _by_group(self, copies: Array) -> list[tuple[int, list[int], list[int]]]:
        return [
            (g, copies[1, copies[0] == g].tolist(), copies[2, copies[0] == g].tolist())
            for g in range(self.layout.num_page_groups)
        ]

    def row(self, seat: int) -> tuple[int, int]:
        return int(self.row_index[READ, seat]), int(self.row_index[WRITE, seat])

    def place(self, group_id: int, seat: int, position: int) -> tuple[int, int]:
        """The page and the offset of a token."""
        page, offset = divmod(position, self.size.tokens_per_page)
        return int(self.page_table[group_id, seat, page]), offset
