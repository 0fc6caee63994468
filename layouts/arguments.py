"""Checks of arguments: each names the argument, what is needed and what came."""

import operator
import reprlib
from collections.abc import Iterable

#: Sizes of arrays, slots and positions of tokens are 32-bit integers.
MAX_SIZE = 2**31 - 1


def integer(
    name: str, value: object, minimum: int | None = None, maximum: int | None = None
) -> int:
    """Returns `value` as an `int` that is not outside the bounds, if there are any.

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
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, got {number}")
    return number


def integers(
    name: str, values: object, minimum: int, maximum: int | None = None
) -> tuple[int, ...]:
    """Returns `values` as a tuple of integers that are not outside the bounds."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ValueError(f"{name} must be a tuple of integers, got {values!r}")
    return tuple(
        integer(f"{name}[{i}]", value, minimum, maximum)
        for i, value in enumerate(values)
    )


def boolean(name: str, value: object) -> bool:
    """Returns `value`, which must be True or False and not only something like it."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def check_kind(name: str, value: object, kind: type, hint: str = "") -> None:
    """Refuses what is not of a class.

    Args:
        name: The argument.
        value: What came.
        kind: The class.
        hint: What to do about it, if the name of the class does not say.
    """
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise ValueError(
            f"{name} must be {article} {kind.__name__}, got {reprlib.repr(value)}"
            + (f"; {hint}" if hint else "")
        )


def check_callable(name: str, value: object) -> None:
    """Refuses what cannot be called."""
    if not callable(value):
        raise ValueError(f"{name} must be a function, got {reprlib.repr(value)}")


def check_name(name: str, value: object) -> None:
    """Refuses what is not a string."""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {reprlib.repr(value)}")


def divides_or_multiple(units: int, num_shards: int) -> bool:
    """Says whether `units` can be split over, or replicated on, `num_shards` shards."""
    return units % num_shards == 0 or num_shards % units == 0
