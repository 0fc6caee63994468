"""Layer groups and coalescing: which buffers share a slot, and which share a pool."""

import dataclasses
from collections.abc import Sequence

from jaxcache.layouts.model import Layer
from jaxcache.layouts.pool_spec import Order, PoolSpec
from jaxcache.layouts.retention import Retention
from jaxcache.layouts.roles import BufferSpec


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers with the same retention rule: they share one kind of slot.

    Attributes:
        group_id: Index in `CacheLayout.groups`.
        retention: The rule.
        layer_ids: The layers, ascending.
        pools: Indices into `CacheLayout.pools`; slot s of the group is slot s of each.
    """

    group_id: int
    retention: Retention
    layer_ids: tuple[int, ...]
    pools: tuple[int, ...]

    @property
    def is_recurrent(self) -> bool:
        """Whether a slot of the group is a row; otherwise it is a page."""
        return self.retention.is_recurrent


@dataclasses.dataclass(frozen=True)
class BufferLocation:
    """Where a (layer, role) lives.

    Attributes:
        pool: Index into `CacheLayout.pools`.
        buffer: Index on that pool's buffer axis.
    """

    pool: int
    buffer: int


def layers_by_retention(layers: Sequence[Layer]) -> dict[Retention, tuple[Layer, ...]]:
    """Returns the layers of each group: page groups by first appearance, rows last."""
    groups: dict[Retention, list[Layer]] = {}
    for layer in layers:
        groups.setdefault(layer.kind.retention, []).append(layer)
    ordered = sorted(groups, key=lambda retention: retention.is_recurrent)
    return {retention: tuple(groups[retention]) for retention in ordered}


def coalesce(
    group_id: int,
    layers: Sequence[Layer],
    tokens_per_page: int,
    num_shards: int,
    order: Order,
) -> list[PoolSpec]:
    """Returns the pools of one group: equal buffers share one, by layer, then by role.

    Equal means the same units, unit shape and dtype. The number of units is also the
    split rule, so a pool is always split in one way. Key and value of all layers share
    a pool, so do B and C, and a convolution and a state that happen to be equal.
    """
    equal: dict[tuple[object, ...], list[tuple[int, BufferSpec]]] = {}
    for layer in layers:
        for spec in layer.kind.buffers(tokens_per_page):
            key = (spec.units, spec.unit_shape, spec.dtype)
            equal.setdefault(key, []).append((layer.layer_id, spec))
    is_recurrent = layers[0].kind.retention.is_recurrent
    prefix = "recurrent" if is_recurrent else f"attention{group_id}"
    names = [
        f"{prefix}.{'+'.join(dict.fromkeys(spec.role for _, spec in members))}"
        for members in equal.values()
    ]
    pools = []
    for name, members in zip(names, equal.values(), strict=True):
        spec = members[0][1]
        if names.count(name) > 1:
            shape = ",".join(map(str, spec.unit_shape))
            name = f"{name}[{spec.units}x({shape}) {spec.dtype}]"
        pools.append(
            PoolSpec(
                name=name,
                group_id=group_id,
                model_units=spec.units,
                units=max(spec.units, num_shards),
                unit_shape=spec.unit_shape,
                dtype=spec.dtype,
                buffers=tuple((layer_id, s.role) for layer_id, s in members),
                order=order,
                num_shards=num_shards,
            )
        )
    return pools
