"""Placement: every unit is somewhere, replicas are neighbours, the rest is refused."""

import re

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxcache.layouts import Placement, cache_units, place, units_of_shard


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int]:
    """Units and shards of which one divides the other."""
    small, factor = draw(st.integers(1, 16)), draw(st.integers(1, 16))
    return draw(st.sampled_from([(small, small * factor), (small * factor, small)]))


@hypothesis.given(splits())
def test_every_unit_is_held_equally_often(split: tuple[int, int]) -> None:
    units, shards = split
    held = [u for r in range(shards) for u in units_of_shard(units, shards, r)]
    copies = max(1, shards // units)
    # In order of the shards the units stand in order, each repeated: that is the unit
    # axis of the global array, which is cut into equal parts.
    assert held == [u for u in range(units) for _ in range(copies)]
    assert len(held) == cache_units(units, shards) == max(units, shards)


@hypothesis.given(splits())
def test_replicas_are_neighbours(split: tuple[int, int]) -> None:
    units, shards = split
    for unit in range(units):
        holders = [r for r in range(shards) if unit in units_of_shard(units, shards, r)]
        assert holders == list(range(holders[0], holders[0] + max(1, shards // units)))


@hypothesis.given(splits())
def test_a_placement_numbers_parts_and_replicas(split: tuple[int, int]) -> None:
    units, shards = split
    placements = [place(units, shards, r) for r in range(shards)]
    assert len(set(placements)) == shards
    for rank, placement in enumerate(placements):
        assert placement.rank == rank
        assert placement.num_shards * placement.num_replicas == shards
        assert placement.num_shards == min(units, shards)
        part = units_of_shard(units, shards, rank)
        size = units // placement.num_shards
        assert part == range(
            placement.shard_index * size, placement.shard_index * size + size
        )
        same = [p for p in placements if p.shard_index == placement.shard_index]
        assert [p.replica_index for p in same] == list(range(placement.num_replicas))


def test_eight_units_on_four_shards() -> None:
    assert place(8, 4, 3) == Placement(4, 3, 1, 0)
    assert [units_of_shard(8, 4, r) for r in range(4)] == [
        range(0, 2),
        range(2, 4),
        range(4, 6),
        range(6, 8),
    ]


def test_two_units_on_eight_shards() -> None:
    assert place(2, 8, 5) == Placement(2, 1, 4, 1)
    assert [units_of_shard(2, 8, r).start for r in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


@hypothesis.given(st.integers(1, 64), st.integers(1, 64))
def test_a_split_that_does_not_come_out_even_is_refused(
    units: int, shards: int
) -> None:
    hypothesis.assume(units % shards and shards % units)
    message = (
        f"^num_shards must divide the {units} units or be a multiple of them, "
        f"got {shards}$"
    )
    for refused in (
        lambda: place(units, shards, 0),
        lambda: units_of_shard(units, shards, 0),
        lambda: cache_units(units, shards),
    ):
        with pytest.raises(ValueError, match=message):
            refused()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 2, 2), "shard_index must be below num_shards = 2, got 2"),
        ((4, 2, -1), "shard_index must be an integer >= 0, got -1"),
        ((0, 2, 0), "units must be an integer >= 1, got 0"),
        ((4, 0, 0), "num_shards must be an integer >= 1, got 0"),
    ],
)
def test_a_shard_that_does_not_exist_is_refused(
    arguments: tuple[int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        place(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 0, 1, 0), "num_shards must be an integer >= 1, got 0"),
        ((2, 2, 1, 0), "shard_index must be below num_shards = 2, got 2"),
        ((2, 0, 0, 0), "num_replicas must be an integer >= 1, got 0"),
        ((2, 0, 2, 2), "replica_index must be below num_replicas = 2, got 2"),
        ((2, -1, 1, 0), "shard_index must be an integer >= 0, got -1"),
    ],
)
def test_a_placement_outside_its_counts_is_refused(
    arguments: tuple[int, int, int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Placement(*arguments)
