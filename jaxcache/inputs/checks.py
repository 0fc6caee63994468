"""Host checks of one step's work: a bad id is refused before anything is uploaded.

On the device an id outside the cache is dropped without a word, so this is the only
place where a mistake of the planner shows.
"""

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jaxcache.inputs.buckets import Bucket
from jaxcache.layouts import NULL_SLOT, CacheSize

if TYPE_CHECKING:
    from jaxcache.inputs.packing import StepWork

Int32s = npt.NDArray[np.int32]


def _empty(*shape: int) -> Int32s:
    array = np.zeros(shape, np.int32)
    array.flags.writeable = False
    return array


# What a step leaves out.
NOTHING = _empty(0)
NO_UPDATES = _empty(4, 0)
NO_COPIES = _empty(3, 0)

_INT32 = np.dtype(np.int32)
_PARTS = (
    ("decode_seats", "decode_positions", "decode_tokens"),
    ("prefill_seats", "prefill_starts", "prefill_lens"),
    ("snapshot_slots", "snapshot_positions", "snapshot_entries"),
)
_read_parts = [operator.attrgetter(*part) for part in _PARTS]

# These functions run at every step, before the device may start: each NumPy call costs
# as much as twenty lines of Python. So `count_nonzero`, which is half the price of
# `any`, and one comparison for as much as possible.
_some = np.count_nonzero


def check_arrays(work: "StepWork") -> None:
    """Refuses arrays of a wrong type, and parts whose arrays differ in length."""
    for part, read in zip(_PARTS, _read_parts, strict=True):
        arrays = first, second, third = read(work)
        if first is NOTHING and second is NOTHING and third is NOTHING:
            continue
        is_right = (
            type(first) is type(second) is type(third) is np.ndarray
            and first.dtype is second.dtype is third.dtype is _INT32
            and first.shape == second.shape == third.shape
            and first.ndim == 1
        )
        if not is_right:
            _check_part(part, arrays)
    if work.prefill_tokens is not NOTHING:
        _check_vector("prefill_tokens", work.prefill_tokens)
    if work.updates is not NO_UPDATES:
        _check_columns("updates", work.updates, 4)
    if work.copies is not NO_COPIES:
        _check_columns("copies", work.copies, 3)


def _check_part(names: tuple[str, ...], arrays: tuple[Any, ...]) -> None:
    """Raises the error of the first array that is not as it must be, if one is not."""
    _check_vector(names[0], arrays[0])
    for name, array in zip(names[1:], arrays[1:], strict=True):
        _check_vector(name, array)
        if array.size != arrays[0].size:
            raise ValueError(
                f"{name} must have shape ({arrays[0].size}, as {names[0]} has), "
                f"got {array.shape}"
            )


def _check_vector(name: str, array: Any) -> None:
    _check_type(name, array)
    if array.ndim != 1:
        raise ValueError(f"{name} must have shape (n), got {array.shape}")


def _check_columns(name: str, array: Any, rows: int) -> None:
    _check_type(name, array)
    if array.ndim != 2 or array.shape[0] != rows:
        raise ValueError(f"{name} must have shape ({rows}, n), got {array.shape}")


def _check_type(name: str, array: object) -> None:
    if not isinstance(array, np.ndarray) or array.dtype != _INT32:
        came = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{name} must be an int32 NumPy array, got {came}")


def check_seats(work: "StepWork", size: CacheSize) -> None:
    """Refuses two entries of one request: both would write the same row."""
    seats = work.decode_seats
    if work.prefill_seats.size:
        seats = np.concatenate((seats, work.prefill_seats))
    if seats.size == 1:
        return
    counts = np.bincount(seats, minlength=size.num_seats)[: size.max_seqs]
    if counts.max() > 1:
        twice = np.flatnonzero(counts > 1).tolist()
        raise ValueError(
            f"decode_seats and prefill_seats must not name a seat twice, got seats "
            f"{twice} more than once"
        )


def check_prefill(work: "StepWork", size: CacheSize) -> None:
    """Refuses chunks that do not add up, or run past the longest history."""
    lens = work.prefill_lens
    if lens.min(initial=1) < 1:
        raise ValueError(f"prefill_lens must be at least 1, got {lens.tolist()}")
    if lens.sum() != work.prefill_tokens.size:
        raise ValueError(
            f"prefill_tokens must have sum(prefill_lens) = {lens.sum()} tokens, "
            f"got {work.prefill_tokens.size}"
        )
    ends = work.prefill_starts + lens.astype(np.int64)
    if ends.max(initial=0) > size.max_tokens:
        raise ValueError(
            f"prefill_starts + prefill_lens must be at most max_tokens = "
            f"{size.max_tokens}, got {ends.tolist()}"
        )


def check_snapshots(work: "StepWork", size: CacheSize, bucket: Bucket) -> None:
    """Refuses snapshots outside their entry's chunk, or in a slot that is reserved."""
    count = work.snapshot_slots.size
    if count > bucket.snapshots:
        raise ValueError(
            f"snapshot_slots must have at most {bucket.snapshots} snapshots in this "
            f"bucket, got {count}"
        )
    entries = work.snapshot_entries
    if entries.min() < 0 or entries.max() >= work.prefill_seats.size:
        raise ValueError(
            f"snapshot_entries must be indices of the {work.prefill_seats.size} "
            f"prefill entries, got {entries.tolist()}"
        )
    starts = work.prefill_starts[entries]
    ends = starts + work.prefill_lens[entries]
    positions = work.snapshot_positions
    if (positions <= starts).any() or (positions > ends).any():
        raise ValueError(
            f"snapshot_positions must lie after the start and at most at the end of "
            f"their chunks, {list(zip(starts.tolist(), ends.tolist(), strict=True))}, "
            f"got {positions.tolist()}"
        )
    slots = work.snapshot_slots
    if slots.min() < size.first_slot or np.unique(slots).size != count:
        raise ValueError(
            f"snapshot_slots must be different rows, each at least {size.first_slot}, "
            f"got {slots.tolist()}"
        )


def check_copies(
    copies: Int32s, size: CacheSize, bucket: Bucket, num_slots: Int32s
) -> None:
    """Refuses copies of pages that do not exist, or into a page that is reserved.

    Args:
        copies: `i32[3, c]`, columns (group, source, destination).
        size: The cache.
        bucket: The bucket.
        num_slots: `i32[groups + 1]`, slots of each attention group, then of the rows.
    """
    count, groups = copies.shape[1], num_slots.size - 1
    if count > bucket.copies:
        raise ValueError(
            f"copies must have at most {bucket.copies} copies in this bucket, "
            f"got {count}"
        )
    group, source, destination = copies
    if group.min() < 0 or group.max() >= groups:
        raise ValueError(
            f"copies must name attention groups below {groups}, got {group.tolist()}"
        )
    slots = num_slots[group]
    if source.min() < 0 or (source >= slots).any():
        raise ValueError(
            f"copies must have source pages below {slots.tolist()}, "
            f"got {source.tolist()}"
        )
    if destination.min() < size.first_slot or (destination >= slots).any():
        raise ValueError(
            f"copies must have destination pages from {size.first_slot} to below "
            f"{slots.tolist()}, got {destination.tolist()}"
        )
    pairs = set(zip(group.tolist(), destination.tolist(), strict=True))
    if len(pairs) != count:
        raise ValueError(
            f"copies must not name a destination twice, got {destination.tolist()} "
            f"of groups {group.tolist()}"
        )


class UpdateChecks:
    """Refuses updates of elements that do not exist, or that point outside the pools.

    Args:
        size: The cache.
        num_slots: `i32[groups + 1]`, slots that an element of each table may name.
        num_columns: `i32[groups + 1]`, columns of each table.
    """

    def __init__(self, size: CacheSize, num_slots: Int32s, num_columns: Int32s) -> None:
        self._size = size
        tables = num_slots.size
        # By table: what (table, seat, column, value) must stay below.
        self._bounds = np.stack(
            [
                np.full(tables, tables),
                np.full(tables, size.max_seqs),
                num_columns,
                num_slots,
            ]
        ).astype(np.uint32)
        width = max(size.max_pages, 2)
        # Numbers each element of the tables. 64 bits only where 32 are too few, since
        # the updates would be converted.
        fits = tables * size.max_seqs * width <= np.iinfo(np.int32).max
        self._strides = np.array(
            [size.max_seqs * width, width, 1, 0], np.int32 if fits else np.int64
        )

    def __call__(self, updates: Int32s) -> None:
        """Checks `i32[4, u]`, columns (table, seat, column, value)."""
        # Unsigned, so that a negative number is past every bound; the bounds of a table
        # that does not exist are those of the last one, and it fails the first of them.
        unsigned = updates.view(np.uint32)
        bounds = self._bounds.take(unsigned[0], axis=1, mode="clip")
        if _some(wrong := unsigned >= bounds):
            row = int(wrong.any(axis=1).argmax())
            name = ("tables", "seats", "columns", "values")[row]
            raise ValueError(
                f"updates must have {name} from 0 to below "
                f"{bounds[row][wrong[row]].tolist()}, "
                f"got {updates[row][wrong[row]].tolist()}"
            )
        count = updates.shape[1]
        if _some(updates[3]) != count:
            table, _, column, value = updates
            rows = (table == self._bounds.shape[1] - 1) & (column == 1)
            if (rows & (value == NULL_SLOT)).any():
                raise ValueError(
                    f"updates must not make row {NULL_SLOT}, the null row, a row that "
                    f"is written, got {updates.T.tolist()}"
                )
        elements = self._strides.dot(updates)
        elements.sort()
        if _some(elements[1:] == elements[:-1]):
            raise ValueError(
                "updates must not change an element twice, since their order is not "
                f"kept, got {updates.T.tolist()}"
            )


def refuse_bounded(work: "StepWork", size: CacheSize, smallest_token: int) -> None:
    """Raises the error of the first value that lies outside its bound."""
    for name in ("decode_tokens", "prefill_tokens"):
        tokens: Int32s = getattr(work, name)
        if (tokens < smallest_token).any():
            raise ValueError(
                f"{name} must be token ids >= 0, or {smallest_token} for the token "
                f"sampled last, got {tokens[tokens < smallest_token].tolist()}"
            )
    bounds = {
        "decode_seats": size.num_seats,
        "prefill_seats": size.num_seats,
        "decode_positions": size.max_tokens,
        "prefill_starts": size.max_tokens,
        "snapshot_slots": size.row_slots,
    }
    for name, bound in bounds.items():
        values: Int32s = getattr(work, name)
        wrong = (values < 0) | (values >= bound)
        if wrong.any():
            raise ValueError(
                f"{name} must be from 0 to below {bound}, got {values[wrong].tolist()}"
            )
    raise AssertionError("a value out of bounds belongs to one of the fields above")
