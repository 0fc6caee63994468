"""Placement: which units of a buffer each tensor-parallel shard holds.

With U units on T shards:

    U >= T, U % T == 0:  shard r holds units [r*U/T, (r+1)*U/T); no replicas
    U <  T, T % U == 0:  unit r // (T/U) is held by T/U neighbouring shards

so the unit axis of the global array has length max(U, T), repeated where replicated.
"""

import dataclasses
from collections.abc import Iterable

from jaxcache.layouts.arguments import divides_or_multiple, integer


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where one shard's part of a buffer stands among all parts.

    Attributes:
        num_shards: Different parts the buffer is cut into.
        shard_index: Which part this is.
        num_replicas: Tensor-parallel shards that hold this same part.
        replica_index: Which of them this is.
    """

    num_shards: int
    shard_index: int
    num_replicas: int = 1
    replica_index: int = 0

    def __post_init__(self) -> None:
        for count, index in (
            ("num_shards", "shard_index"),
            ("num_replicas", "replica_index"),
        ):
            size = integer(count, getattr(self, count), 1)
            value = integer(index, getattr(self, index), 0)
            if value >= size:
                raise ValueError(f"{index} must be below {count} = {size}, got {value}")
            object.__setattr__(self, count, size)
            object.__setattr__(self, index, value)

    @property
    def rank(self) -> int:
        """Index of the tensor-parallel shard, replicas counted."""
        return self.shard_index * self.num_replicas + self.replica_index


def place(units: int, num_shards: int, shard_index: int) -> Placement:
    """Returns the placement of `units` units on one of `num_shards` shards.

    Raises:
        ValueError: if the shard does not exist, or neither number divides the other.
    """
    check_split(units, num_shards)
    index = integer("shard_index", shard_index, 0)
    if index >= num_shards:
        raise ValueError(
            f"shard_index must be below num_shards = {num_shards}, got {index}"
        )
    parts = min(units, num_shards)
    replicas = num_shards // parts
    return Placement(parts, index // replicas, replicas, index % replicas)


def units_of_shard(units: int, num_shards: int, shard_index: int) -> range:
    """Returns the units of the model that one shard holds."""
    placement = place(units, num_shards, shard_index)
    size = units // placement.num_shards
    return range(placement.shard_index * size, (placement.shard_index + 1) * size)


def cache_units(units: int, num_shards: int) -> int:
    """Returns the length of the global unit axis: max(units, num_shards)."""
    check_split(units, num_shards)
    return max(units, num_shards)


def check_split(units: int, num_shards: int) -> None:
    """Checks that one of the two numbers divides the other.

    Raises:
        ValueError: naming both.
    """
    units = integer("units", units, 1)
    num_shards = integer("num_shards", num_shards, 1)
    if not divides_or_multiple(units, num_shards):
        raise ValueError(
            f"num_shards must divide the {units} units or be a multiple of them, "
            f"got {num_shards}"
        )


def workable_shards(units: Iterable[int], limit: int = 64) -> list[int]:
    """Returns the numbers of shards up to `limit` that all these units allow."""
    return [
        shards
        for shards in range(1, limit + 1)
        if all(divides_or_multiple(u, shards) for u in units)
    ]
