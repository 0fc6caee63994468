"""The cache layout: groups, pools and the address of every unit of every buffer."""

import dataclasses
import functools
from typing import overload

import numpy as np
import numpy.typing as npt

from jaxcache.layouts.arguments import MAX_SIZE, divides_or_multiple, integer
from jaxcache.layouts.conv_view import ConvView, conv_view
from jaxcache.layouts.fingerprint import fingerprint
from jaxcache.layouts.layer_groups import (
    BufferLocation,
    LayerGroup,
    coalesce,
    layers_by_retention,
)
from jaxcache.layouts.model import Layer, ModelLayout
from jaxcache.layouts.placement import Placement, place, workable_shards
from jaxcache.layouts.pool_spec import (
    ORDERS,
    BufferStrides,
    Index,
    Indices,
    Order,
    PoolSpec,
)
from jaxcache.layouts.retention import Retention
from jaxcache.layouts.roles import BufferSpec


@dataclasses.dataclass(frozen=True, eq=False)
class CacheLayout:
    """What bytes lie where, for one model on `num_shards` tensor-parallel shards.

    A value: frozen, hashable, equal when its four fields are equal; it may be a static
    field of a pytree. Everything else follows from the fields.

    Attributes:
        model: The layers of this process.
        tokens_per_page: Tokens of one page, in every attention group.
        num_shards: Tensor-parallel shards that units are split or replicated over.
        order: What is outermost in a slot: `units` (a shard's share of a slot is one
            contiguous run) or `buffers` (a layer's role is dense).
    """

    model: ModelLayout
    tokens_per_page: int = 16
    num_shards: int = 1
    order: Order = "units"

    def __post_init__(self) -> None:
        if not isinstance(self.model, ModelLayout):
            raise ValueError(f"model must be a ModelLayout, got {self.model!r}")
        tokens = integer("tokens_per_page", self.tokens_per_page, 1, MAX_SIZE)
        shards = integer("num_shards", self.num_shards, 1, MAX_SIZE)
        object.__setattr__(self, "tokens_per_page", tokens)
        object.__setattr__(self, "num_shards", shards)
        if self.order not in ORDERS:
            raise ValueError(f"order must be 'units' or 'buffers', got {self.order!r}")
        for (layer_id, role), spec in self._specs.items():
            if not divides_or_multiple(spec.units, shards):
                works = workable_shards({s.units for s in self._specs.values()})
                raise ValueError(
                    f"num_shards must divide the {spec.units} units of {role!r} of "
                    f"layer {layer_id} or be a multiple of them, got {shards}; every "
                    f"layer of {self.model.name} works with "
                    f"{', '.join(map(str, works))}"
                )

    # A layout is hashed and compared at every call of a jitted step, so both are O(1)
    # for the same object.

    def _fields(self) -> tuple[ModelLayout, int, int, Order]:
        return (self.model, self.tokens_per_page, self.num_shards, self.order)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._fields())

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, CacheLayout):
            return NotImplemented
        return hash(self) == hash(other) and self._fields() == other._fields()

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        # Cached values stay behind: the hash of a string differs between processes.
        return (CacheLayout, self._fields())

    @functools.cached_property
    def _specs(self) -> dict[tuple[int, str], BufferSpec]:
        return {
            (layer.layer_id, spec.role): spec
            for layer in self.model.layers
            for spec in layer.kind.buffers(self.tokens_per_page)
        }

    @functools.cached_property
    def _layer_groups(self) -> dict[Retention, tuple[Layer, ...]]:
        return layers_by_retention(self.model.layers)

    @functools.cached_property
    def pools(self) -> tuple[PoolSpec, ...]:
        """The pools, group by group, in order of first appearance."""
        return tuple(
            pool
            for group_id, layers in enumerate(self._layer_groups.values())
            for pool in coalesce(
                group_id, layers, self.tokens_per_page, self.num_shards, self.order
            )
        )

    @functools.cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The layer groups: page groups by first appearance, the recurrent one last."""
        return tuple(
            LayerGroup(
                group_id,
                retention,
                tuple(sorted({layer.layer_id for layer in layers})),
                tuple(i for i, p in enumerate(self.pools) if p.group_id == group_id),
            )
            for group_id, (retention, layers) in enumerate(self._layer_groups.items())
        )

    @functools.cached_property
    def page_groups(self) -> tuple[LayerGroup, ...]:
        """The attention groups; their ids are 0 to `num_page_groups` - 1."""
        return tuple(group for group in self.groups if not group.is_recurrent)

    @property
    def num_page_groups(self) -> int:
        """How many attention groups there are."""
        return len(self.page_groups)

    @functools.cached_property
    def recurrent_group(self) -> LayerGroup | None:
        """The recurrent group, or `None` where the model has attention only."""
        return self.groups[-1] if self.groups[-1].is_recurrent else None

    @property
    def has_recurrent(self) -> bool:
        """Whether requests have rows."""
        return self.recurrent_group is not None

    @functools.cached_property
    def _locations(self) -> dict[tuple[int, str], BufferLocation]:
        return {
            key: BufferLocation(pool, buffer)
            for pool, spec in enumerate(self.pools)
            for buffer, key in enumerate(spec.buffers)
        }

    @functools.cached_property
    def _roles(self) -> dict[tuple[int, bool], tuple[str, ...]]:
        roles: dict[tuple[int, bool], tuple[str, ...]] = {}
        for layer in self.model.layers:
            key = (layer.layer_id, layer.kind.retention.is_recurrent)
            names = tuple(s.role for s in layer.kind.buffers(self.tokens_per_page))
            roles[key] = roles.get(key, ()) + names
        return roles

    def page_roles(self, layer_id: int) -> tuple[str, ...]:
        """Returns the roles that a layer keeps in pages; empty if it has none."""
        return self._roles.get((layer_id, False), ())

    def row_roles(self, layer_id: int) -> tuple[str, ...]:
        """Returns the roles that a layer keeps in rows; empty if it has none."""
        return self._roles.get((layer_id, True), ())

    def locate(self, layer_id: int, role: str) -> BufferLocation:
        """Returns where a (layer, role) lives.

        Raises:
            ValueError: naming the roles of the layer, or the layers there are.
        """
        try:
            return self._locations[layer_id, role]
        except KeyError:
            pass
        if roles := self.page_roles(layer_id) + self.row_roles(layer_id):
            raise ValueError(
                f"role must be one of {', '.join(roles)} for layer {layer_id}, "
                f"got {role!r}"
            )
        raise self._no_layer(layer_id)

    def pool_of(self, layer_id: int, role: str) -> PoolSpec:
        """Returns the pool of a (layer, role)."""
        return self.pools[self.locate(layer_id, role).pool]

    def group_of(self, layer_id: int, role: str) -> int:
        """Returns the id of the layer group of a (layer, role)."""
        return self.pool_of(layer_id, role).group_id

    def buffer_spec(self, layer_id: int, role: str) -> BufferSpec:
        """Returns units, unit shape and dtype of a (layer, role), of one slot."""
        self.locate(layer_id, role)
        return self._specs[layer_id, role]

    def units(self, layer_id: int, role: str) -> int:
        """Returns the model's own number of units, U."""
        return self.pool_of(layer_id, role).model_units

    def cache_units(self, layer_id: int, role: str) -> int:
        """Returns the length of the global unit axis: max(U, num_shards)."""
        return self.pool_of(layer_id, role).units

    def placement(self, layer_id: int, role: str, shard_index: int) -> Placement:
        """Returns what part of a (layer, role) one shard holds."""
        return place(self.units(layer_id, role), self.num_shards, shard_index)

    def _shard_of(self, layer_id: int, role: str) -> tuple[PoolSpec, int]:
        location = self.locate(layer_id, role)
        return self.pools[location.pool].shard, location.buffer

    def strides(self, layer_id: int, role: str) -> BufferStrides:
        """Returns where a (layer, role) lies in the array that one shard holds."""
        shard, buffer = self._shard_of(layer_id, role)
        return shard.strides(buffer)

    @overload
    def view_index(self, slot: int, unit: int, layer_id: int, role: str) -> int: ...
    @overload
    def view_index(
        self, slot: Indices, unit: Index, layer_id: int, role: str
    ) -> npt.NDArray[np.int64]: ...
    def view_index(
        self, slot: Index, unit: Index, layer_id: int, role: str
    ) -> int | npt.NDArray[np.int64]:
        """Returns the index in the unit view of the array that one shard holds.

        Args:
            slot: Slot, or slots.
            unit: Unit of that array: it counts from the first unit of the shard.
            layer_id: The layer.
            role: The role.
        """
        shard, buffer = self._shard_of(layer_id, role)
        return shard.view_index(slot, unit, buffer)

    @overload
    def address(
        self, pool_base: int, slot: int, unit: int, layer_id: int, role: str
    ) -> int: ...
    @overload
    def address(
        self, pool_base: int, slot: Indices, unit: Index, layer_id: int, role: str
    ) -> npt.NDArray[np.int64]: ...
    def address(
        self, pool_base: int, slot: Index, unit: Index, layer_id: int, role: str
    ) -> int | npt.NDArray[np.int64]:
        """Returns the address of one unit in the memory of one shard.

        `pool_base + slot * slot_stride + unit * unit_stride + buffer * buffer_stride`,
        with the strides of the pool's `shard`.

        Args:
            pool_base: Address of the shard's array of `pool_of(layer_id, role)`.
            slot: Slot, or slots.
            unit: Unit of that array: it counts from the first unit of the shard.
            layer_id: The layer.
            role: The role.
        """
        shard, buffer = self._shard_of(layer_id, role)
        return shard.address(pool_base, slot, unit, buffer)

    def conv_view(self, layer_id: int, *, of_shard: bool = False) -> ConvView:
        """Returns how the sections of a layer's convolution make one combined state.

        Args:
            layer_id: A layer with a convolution.
            of_shard: Whether the sections hold one shard's units, or the model's.

        Raises:
            ValueError: if the layer has no convolution.
        """
        for layer in self.model.layers:
            if layer.layer_id == layer_id and layer.kind.conv_roles:
                roles = layer.kind.conv_roles
                specs = [self.buffer_spec(layer_id, role) for role in roles]
                pools = [self.pool_of(layer_id, role) for role in roles]
                units = [p.shard.units if of_shard else p.model_units for p in pools]
                return conv_view(specs, units)
        raise ValueError(
            f"layer_id must be a layer with a convolution, got {layer_id!r}"
        )

    def slot_bytes(self, group_id: int) -> int:
        """Returns the bytes of one slot of a group, over its pools.

        As all sizes here: of all shards together, replicas counted.
        """
        groups = len(self.groups)
        if integer("group_id", group_id, 0) >= groups:
            raise ValueError(f"group_id must be below {groups}, got {group_id}")
        return sum(self.pools[pool].slot_bytes for pool in self.groups[group_id].pools)

    def bytes_per_page(self, group_id: int) -> int:
        """Returns the bytes of one page of an attention group."""
        size = self.slot_bytes(group_id)
        if self.groups[group_id].is_recurrent:
            raise ValueError(
                f"group_id must be an attention group, below {self.num_page_groups}, "
                f"got {group_id}: the recurrent group has rows (bytes_per_row)"
            )
        return size

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row; 0 without recurrent layers."""
        group = self.recurrent_group
        return 0 if group is None else self.slot_bytes(group.group_id)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in the pages of all attention groups."""
        pages = sum(self.bytes_per_page(g.group_id) for g in self.page_groups)
        return pages // self.tokens_per_page

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of what transfer peers must share: everything but shards and stage."""
        return self._fingerprint_of(self.model.model_layers)

    def layer_fingerprint(self, layer_id: int) -> str:
        """Returns the same hash for one layer.

        Peers whose models differ by whole layers (one has draft layers) compare these
        for the layers they share.
        """
        layers = tuple(x for x in self.model.layers if x.layer_id == layer_id)
        if not layers:
            raise self._no_layer(layer_id)
        return self._fingerprint_of(layers)

    def _fingerprint_of(self, layers: tuple[Layer, ...]) -> str:
        return fingerprint(self.model.name, layers, self.tokens_per_page, self.order)

    def _no_layer(self, layer_id: int) -> ValueError:
        return ValueError(
            f"layer_id must be one of the layers with a cache, "
            f"{self.model.layer_ids}, got {layer_id!r}"
        )
