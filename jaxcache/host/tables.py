"""Device tables: what the page tables and the row index on the device should say.

The host keeps the values that every element should have, and which elements the device
may not have yet. A plan uploads those with the values of that moment. A plan that is
abandoned puts its elements back: whether its step ran or not, the next plan sets them
right.
"""

import numpy as np

from jaxcache.layouts import NULL_SLOT, CacheSize
from jaxcache.prefixes.nodes import Int32s, Int64s

_READ, _WRITE = 0, 1

# So many pages on average make runs of pages long.
_LONG_RUN = 16

NO_UPDATES = np.zeros((4, 0), np.int32)
NO_UPDATES.flags.writeable = False


class Growth:
    """Seats that always get their next page in the same step, and how they do.

    Attributes:
        seats: `i64[n]`, the seats.
        indices: `i64[n]`, which page of each comes next. Replaced, never written.
    """

    __slots__ = ("_bases", "_flat", "_one", "_updates", "indices", "seats")

    def __init__(
        self, flat: Int32s, bases: Int64s, updates: Int32s, indices: Int64s
    ) -> None:
        self.seats = bases[0]
        self.indices = indices
        self._flat = flat
        self._bases = bases[1:]
        self._updates = updates
        # Adding an array takes half the time of adding a number.
        self._one = np.ones(indices.size, np.int64)

    @classmethod
    def of_steps(
        cls, page_table: Int32s, seats: Int64s, indices: Int64s, steps: Int64s
    ) -> "dict[int, Growth]":
        """Returns the growths by the step in which they are due.

        Args:
            page_table: `i32[groups, seats, max_pages]`.
            seats: `i64[n]`, the seats.
            indices: `i64[n]`, which page of each comes next.
            steps: `i64[n]`, when it is due.
        """
        groups, num_seats, width = page_table.shape
        # All in one go, then cut, since there may be as many as tokens of a page.
        order = steps.argsort(kind="stable")
        seats, indices, steps = seats[order], indices[order], steps[order]
        bases = np.empty((groups + 1, seats.size), np.int64)
        bases[0] = seats
        of_group = np.arange(groups)[:, None]
        bases[1:] = (of_group * num_seats + seats) * width
        updates = np.empty((4, groups, seats.size), np.int32)
        updates[0], updates[1] = of_group, seats
        cuts = (steps[1:] != steps[:-1]).nonzero()[0] + 1
        flat, growths, start = page_table.reshape(-1), {}, 0
        for step, stop in zip(
            steps[[0, *cuts]].tolist(), [*cuts.tolist(), seats.size], strict=True
        ):
            part = slice(start, stop)
            growths[step] = cls(
                flat, bases[:, part], updates[:, :, part], indices[part]
            )
            start = stop
        return growths

    def set_pages(self, columns: Int32s) -> Int32s:
        """Sets the next page of each seat, and returns the updates that say so."""
        indices = self.indices
        self._flat[self._bases + indices] = columns
        updates = self._updates.copy()
        updates[2], updates[3] = indices, columns
        self.indices = indices + self._one
        return updates.reshape(4, -1)


class DeviceTables:
    """The page tables and the row index of the real seats.

    What a seat's page table has to send is one run of indices, so nothing is ever sent
    twice in a step: `[first, stop)`, and none where `first >= stop`.

    Attributes:
        page_table: `i32[groups, seats, max_pages]`, only true up to what is allocated.
        row_index: `i32[seats, 2]`, the row that each seat reads and the one it writes.
    """

    def __init__(self, size: CacheSize) -> None:
        groups, seats = len(size.num_pages), size.max_seqs
        self._sink = size.sink_slot
        self._width = size.max_pages
        shape = (groups, seats, size.max_pages)
        self.page_table: Int32s = np.full(shape, self._sink, np.int32)
        self.row_index: Int32s = np.full((seats, 2), self._sink, np.int32)
        self._first = np.full(seats, size.max_pages, np.int64)
        self._stop = np.zeros(seats, np.int64)
        self._rows = np.zeros((seats, 2), np.bool_)
        self._columns = np.arange(size.max_pages, dtype=np.int32)
        # One page of each of some seats, whose runs are empty.
        self._each: tuple[Int64s, Int64s] | None = None
        # Whether there may be anything else to send at all.
        self._has_pages = False
        self._has_rows = False

    def set_pages(self, seat: int, first: int, columns: Int32s) -> None:
        """Sets the pages of a request from index `first` on, `i32[groups, n]`."""
        stop = first + columns.shape[1]
        self.page_table[:, seat, first:stop] = columns
        self.mark_pages(seat, first, stop)

    def mark_pages(self, seat: int, first: int, stop: int) -> None:
        """Notes that pages of a request were changed."""
        if stop > first:
            self._first[seat] = min(first, int(self._first[seat]))
            self._stop[seat] = max(stop, int(self._stop[seat]))
            self._has_pages = True

    def set_page_of_each(self, seats: Int64s, indices: Int64s, columns: Int32s) -> None:
        """Sets one page of each of several requests, `i32[groups, n]`."""
        self.page_table[:, seats, indices] = columns
        if not self._has_pages and self._each is None:
            # By far the commonest change, so it is sent as it comes.
            self._each = (seats, indices)
            return
        self._first[seats] = np.minimum(self._first[seats], indices)
        self._stop[seats] = np.maximum(self._stop[seats], indices + 1)
        self._has_pages = True

    def forget_pages(self, seat: int) -> None:
        """Leaves out what was to be sent of the page table of a seat nobody has."""
        self._first[seat] = self._width
        self._stop[seat] = 0

    def rows(self, seat: int) -> tuple[int, int]:
        """Returns the row that a request reads and the one that it writes."""
        read, write = self.row_index[seat].tolist()
        return read, write

    def set_rows(self, seat: int, read: int, write: int) -> None:
        """Sets the row that a request reads and the one that it writes."""
        assert write != NULL_SLOT
        before = self.rows(seat)
        if before[_READ] != read:
            self.row_index[seat, _READ] = read
            self._rows[seat, _READ] = self._has_rows = True
        if before[_WRITE] != write:
            self.row_index[seat, _WRITE] = write
            self._rows[seat, _WRITE] = self._has_rows = True

    def point_rows_at_sink(self, seat: int) -> None:
        """Lets a seat that nobody has read and write the sink."""
        self.set_rows(seat, self._sink, self._sink)

    @property
    def has_updates(self) -> bool:
        """Whether there may be anything that the device does not have yet."""
        return self._has_pages or self._has_rows or self._each is not None

    def take_updates(self) -> Int32s:
        """Returns what the device does not have yet, `i32[4, u]`, and forgets it."""
        parts: list[Int32s] = []
        if self._each is not None:
            parts += self._page_updates(*self._each)
            self._each = None
        if self._has_pages:
            parts += self._take_runs()
            self._has_pages = False
        if self._has_rows:
            seats, columns = self._rows.nonzero()
            updates = np.empty((4, seats.size), np.int32)
            updates[0] = len(self.page_table)
            updates[1], updates[2] = seats, columns
            updates[3] = self.row_index[seats, columns]
            parts.append(updates)
            self._rows[:] = False
            self._has_rows = False
        if not parts:
            return NO_UPDATES
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _take_runs(self) -> list[Int32s]:
        """Returns the updates of every run of pages to send, and forgets them."""
        seats = (self._stop > self._first).nonzero()[0]
        first, stop = self._first[seats], self._stop[seats]
        self._first[seats] = self._width
        self._stop[seats] = 0
        lengths = stop - first
        total = int(lengths.sum())
        if total >= _LONG_RUN * seats.size:
            return self._long_runs(seats, first, stop, total)
        of_run = np.repeat(np.arange(seats.size), lengths)
        begins = lengths.cumsum() - lengths
        indices = np.arange(total) + (first - begins)[of_run]
        return self._page_updates(seats[of_run], indices)

    def _long_runs(
        self, seats: Int64s, first: Int64s, stop: Int64s, total: int
    ) -> list[Int32s]:
        """Returns the updates of few runs: slices are quicker then than indices."""
        groups = len(self.page_table)
        updates = np.empty((4, groups, total), np.int32)
        updates[0] = np.arange(groups)[:, None]
        at = 0
        runs = zip(seats.tolist(), first.tolist(), stop.tolist(), strict=True)
        for seat, begin, end in runs:
            run = slice(at, at + end - begin)
            updates[1, :, run] = seat
            updates[2, :, run] = self._columns[begin:end]
            updates[3, :, run] = self.page_table[:, seat, begin:end]
            at = run.stop
        return [updates.reshape(4, -1)]

    def _page_updates(self, seats: Int64s, indices: Int64s) -> list[Int32s]:
        parts = []
        for group, table in enumerate(self.page_table):
            updates = np.empty((4, seats.size), np.int32)
            updates[0], updates[1], updates[2] = group, seats, indices
            updates[3] = table[seats, indices]
            parts.append(updates)
        return parts

    def put_updates_back(self, updates: Int32s) -> None:
        """Notes that the device may not have got these after all."""
        for table, seat, column, _ in updates.T.tolist():
            if table == len(self.page_table):
                self._rows[seat, column] = True
                self._has_rows = True
            else:
                self.mark_pages(seat, column, column + 1)
