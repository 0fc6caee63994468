"""Movers: copying, clearing and updating slots between steps, in place."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxcache.device.donation import Donating
from jaxcache.device.pools import clear_pages, clear_rows, copy_pages, copy_rows
from jaxcache.device.proof import StepReport
from jaxcache.device.state import CacheState
from jaxcache.inputs.packing import index_bucket
from jaxcache.layouts.arguments import check_callable, check_kind, check_name

Ids = Sequence[int] | npt.NDArray[np.integer]


class Mover:
    """A jitted function from a state and arrays to a state; made by `jit_mover`."""

    def __init__(self, fn: Callable[..., CacheState], name: str) -> None:
        self._donating = Donating(fn, name)

    @property
    def reports(self) -> tuple[StepReport, ...]:
        """One report for each compilation."""
        return tuple(self._donating.reports)

    @property
    def compilations(self) -> int:
        """How many programs were compiled: one for each size of the arguments."""
        return self._donating.compilations

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling and proving."""
        return self._donating.compile_seconds

    def __call__(self, state: CacheState, *args: Any) -> CacheState:
        """Runs the mover.

        Args:
            state: The state, donated.
            *args: The other arguments of the function.

        Returns:
            The updated state, in the memory of the one passed.
        """
        check_kind("state", state, CacheState)
        self._donating.refuse_dead(state)
        compiled, _ = self._donating.prepare(state, *args)
        result: CacheState = compiled(state, *args)
        return result


def jit_mover(fn: Callable[..., CacheState], *, name: str | None = None) -> Mover:
    """Jits `fn(state, *arrays) -> state` with the state donated and proven in place.

    Args:
        fn: A pure function.
        name: Name in reports; `None` is that of `fn`.
    """
    check_callable("fn", fn)
    if name is not None:
        check_name("name", name)
    return Mover(fn, name or str(getattr(fn, "__name__", type(fn).__name__)))


class Movers:
    """The movers of slots, for ids that the host knows.

    Ids are checked, padded to a power of two and uploaded as one array, so the number
    of programs is the logarithm of the largest move. Every call donates the state.
    """

    def __init__(self) -> None:
        self._movers: dict[tuple[str, int | None], Mover] = {}

    @property
    def compilations(self) -> int:
        """How many programs were compiled."""
        return sum(mover.compilations for mover in self._movers.values())

    @property
    def reports(self) -> tuple[StepReport, ...]:
        """One report for each compilation."""
        return tuple(r for mover in self._movers.values() for r in mover.reports)

    def copy_pages(
        self, state: CacheState, group_id: int, source: Ids, destination: Ids
    ) -> CacheState:
        """Copies whole pages of an attention group.

        Args:
            state: The state, donated.
            group_id: The attention group.
            source: Pages to read; all are read before any is written.
            destination: As many pages to write, none twice and none reserved.

        Returns:
            The updated state.

        Raises:
            ValueError: if an id is outside the pool, reserved, or written twice.
        """
        slots = state.size.page_slots(group_id)
        ids = _checked(state, slots, source=source, destination=destination)
        return self._mover("copy_pages", group_id)(state, ids)

    def copy_rows(self, state: CacheState, source: Ids, destination: Ids) -> CacheState:
        """Copies whole rows; arguments as in `copy_pages`."""
        slots = state.size.row_slots
        ids = _checked(state, slots, source=source, destination=destination)
        return self._mover("copy_rows")(state, ids)

    def clear_pages(self, state: CacheState, group_id: int, pages: Ids) -> CacheState:
        """Zeroes whole pages of an attention group, none of them reserved."""
        ids = _checked(state, state.size.page_slots(group_id), pages=pages)
        return self._mover("clear_pages", group_id)(state, ids)

    def clear_rows(self, state: CacheState, rows: Ids) -> CacheState:
        """Zeroes whole rows, none of them reserved."""
        ids = _checked(state, state.size.row_slots, rows=rows)
        return self._mover("clear_rows")(state, ids)

    def _mover(self, name: str, group_id: int | None = None) -> Mover:
        mover = self._movers.get((name, group_id))
        if mover is None:
            mover = self._movers[name, group_id] = Mover(move(name, group_id), name)
        return mover


def move(name: str, group_id: int | None = None) -> Callable[..., CacheState]:
    """Returns what a mover of `Movers` runs: a pure function `(state, ids) -> state`.

    Its ids are `i32[2, n]`, source and destination, or `i32[1, n]` where it only
    clears; -1 is padding.

    Args:
        name: `copy_pages`, `copy_rows`, `clear_pages` or `clear_rows`.
        group_id: The attention group of pages; `None` for rows.
    """
    return functools.partial(_MOVES[name], group_id)


_MOVES: dict[str, Callable[[Any, CacheState, Any], CacheState]] = {
    "copy_pages": lambda group, state, ids: copy_pages(state, group, ids[0], ids[1]),
    "copy_rows": lambda _, state, ids: copy_rows(state, ids[0], ids[1]),
    "clear_pages": lambda group, state, ids: clear_pages(state, group, ids[0]),
    "clear_rows": lambda _, state, ids: clear_rows(state, ids[0]),
}


def _checked(state: CacheState, num_slots: int, **named: Ids) -> npt.NDArray[np.int32]:
    """Returns checked ids, a row for each name, padded with -1; the last is written."""
    arrays = {}
    for name, ids in named.items():
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(
                f"{name} must be a vector of integers, got {array.dtype}"
                f"{list(array.shape)}"
            )
        arrays[name] = array
    *read, (written, last) = arrays.items()
    for name, array in read:
        if array.size != last.size:
            raise ValueError(
                f"{written} must have as many ids as {name}, {array.size}, "
                f"got {last.size}"
            )
        if array.size and (array.min() < 0 or array.max() >= num_slots):
            raise ValueError(
                f"{name} must be from 0 to below {num_slots}, got {array.tolist()}"
            )
    first = state.size.first_slot
    if last.size and (last.min() < first or last.max() >= num_slots):
        raise ValueError(
            f"{written} must be from {first} to below {num_slots}, got {last.tolist()}"
        )
    if np.unique(last).size != last.size:
        raise ValueError(f"{written} must not name a slot twice, got {last.tolist()}")
    padded = np.full((len(arrays), index_bucket(last.size)), -1, np.int32)
    for row, array in enumerate(arrays.values()):
        padded[row, : array.size] = array
    return padded
