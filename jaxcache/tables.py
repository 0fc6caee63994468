"""Device tables: what the page tables and the row index on the device should say.

The host keeps the values that every element should have and the set of elements that
the device may not have yet. A plan uploads those with the values of that moment. A plan
that is abandoned puts its elements back into the set: whether its step ran or not, the
next plan sets them right.
"""

import numpy as np
import numpy.typing as npt

from jaxcache.layouts import NULL_SLOT, CacheSize
from jaxcache.nodes import Int32s

Int64s = npt.NDArray[np.int64]

_READ, _WRITE = 0, 1

_NO_UPDATES = np.zeros((4, 0), np.int32)
_NO_UPDATES.flags.writeable = False


class DeviceTables:
    """The page tables and the row index of the real seats.

    Attributes:
        page_table: `i32[groups, seats, max_pages]`, only true up to what is allocated.
    """

    def __init__(self, size: CacheSize) -> None:
        self._groups = len(size.num_pages)
        self._seats = size.max_seqs
        self._width = max(size.max_pages, 2)
        self._sink = size.sink_slot
        # The row index is one more table, of two columns.
        shape = (self._groups + 1, self._seats, self._width)
        self._cells = np.full(shape, self._sink, np.int32)
        self._flat = self._cells.reshape(-1)
        self.page_table: Int32s = self._cells[: self._groups]
        self._rows = self._cells[self._groups]
        # Indices into `_flat`, in pieces without repetition, and single ones.
        self._pending: list[Int64s] = []
        self._single: list[int] = []

    def set_pages(self, seat: int, first: int, columns: Int32s) -> None:
        """Sets the pages of a request from index `first` on, `i32[groups, n]`."""
        stop = first + columns.shape[1]
        self.page_table[:, seat, first:stop] = columns
        self.mark_pages(seat, first, stop)

    def mark_pages(self, seat: int, first: int, stop: int) -> None:
        """Notes that pages of a request were changed."""
        for group in range(self._groups if stop > first else 0):
            base = (group * self._seats + seat) * self._width
            self._pending.append(np.arange(base + first, base + stop))

    def set_page_of_each(self, seats: Int64s, indices: Int64s, columns: Int32s) -> None:
        """Sets one page of each of several requests, `i32[groups, n]`."""
        for group in range(self._groups):
            flat = (group * self._seats + seats) * self._width + indices
            self._flat[flat] = columns[group]
            self._pending.append(flat)

    def rows(self, seat: int) -> tuple[int, int]:
        """Returns the row that a request reads and the one that it writes."""
        read, write = self._rows[seat, :2].tolist()
        return read, write

    def set_rows(self, seat: int, read: int, write: int) -> None:
        """Sets the row that a request reads and the one that it writes."""
        assert write != NULL_SLOT
        base = (self._groups * self._seats + seat) * self._width
        for index, row in ((base + _READ, read), (base + _WRITE, write)):
            if self._flat[index] != row:
                self._flat[index] = row
                self._single.append(index)

    def point_rows_at_sink(self, seat: int) -> None:
        """Lets a seat that nobody has read and write the sink."""
        self.set_rows(seat, self._sink, self._sink)

    def take_updates(self) -> Int32s:
        """Returns what the device does not have yet, `i32[4, u]`, and forgets it."""
        pieces, single = self._pending, self._single
        if not pieces and not single:
            return _NO_UPDATES
        if len(pieces) == 1 and not single:
            flat = pieces[0]
        else:
            pieces.append(np.array(single, np.int64))
            flat = np.unique(np.concatenate(pieces))
        self._pending, self._single = [], []
        updates = np.empty((4, flat.size), np.int32)
        line, updates[2] = np.divmod(flat, self._width)
        updates[0], updates[1] = np.divmod(line, self._seats)
        updates[3] = self._flat[flat]
        return updates

    def put_updates_back(self, updates: Int32s) -> None:
        """Notes that the device may not have got these after all."""
        table, seat, column = updates[:3].astype(np.int64)
        if table.size:
            flat = (table * self._seats + seat) * self._width + column
            self._pending.append(flat)
