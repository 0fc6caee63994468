"""Checks of constructor arguments: each returns the value in its canonical form."""

import operator
from collections.abc import Iterable


def integer(name: str, value: object, minimum: int | None = None) -> int:
    """Returns `value` as an `int` that is at least `minimum`, if there is one.

    Raises:
        ValueError: naming the argument, what was needed and what came.
    """
    wanted = "an integer" if minimum is None else f"an integer >= {minimum}"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be {wanted}, got {value!r}") from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{name} must be {wanted}, got {number}")
    return number


def integers(name: str, values: object, minimum: int) -> tuple[int, ...]:
    """Returns `values` as a tuple of integers that are at least `minimum`."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a tuple of integers, got {values!r}")
    return tuple(
        integer(f"{name}[{i}]", value, minimum) for i, value in enumerate(values)
    )


def divides_or_multiple(units: int, num_shards: int) -> bool:
    """Says whether `units` can be split over, or replicated on, `num_shards` shards."""
    return units % num_shards == 0 or num_shards % units == 0
