"""Free lists: which pages and rows nobody owns.

A slot has exactly one owner: its free list, the prefix tree, a request or a plan in
flight. Whoever takes a slot owns it until it puts it back.
"""

import numpy as np
import numpy.typing as npt

from jaxcache.layouts import NULL_SLOT, CacheSize

Int32s = npt.NDArray[np.int32]


class PagePools:
    """The free pages of every attention group.

    Pages go in columns: a column has one page of each group, for the same tokens.

    Attributes:
        num_groups: Attention groups.
        num_pages: Pages of each group, free or not.
        has_holes: Whether columns may lack pages of some groups.
    """

    def __init__(self, size: CacheSize) -> None:
        self.num_groups = len(size.num_pages)
        self.num_pages = size.num_pages
        self.has_holes = False
        first = size.first_slot
        # Last in, first out: what was freed last is warm in the caches of the device.
        self._stacks = [
            np.arange(first + count - 1, first - 1, -1, dtype=np.int32)
            for count in size.num_pages
        ]
        self._tops = list(size.num_pages)
        self._lowest = list(size.num_pages)

    def free(self, group_id: int) -> int:
        """Returns how many pages of a group are free."""
        return self._tops[group_id]

    @property
    def free_columns(self) -> int:
        """How many whole columns are free; no end of them without attention groups."""
        return min(self._tops, default=1 << 62)

    def peak(self, group_id: int) -> int:
        """Returns the most pages of a group that were ever in use at once."""
        return self.num_pages[group_id] - self._lowest[group_id]

    def take(self, count: int) -> Int32s:
        """Takes `count` columns, `i32[groups, count]`; they must be free."""
        columns = np.empty((self.num_groups, count), np.int32)
        tops, lowest = self._tops, self._lowest
        for group, stack in enumerate(self._stacks):
            before = tops[group]
            top = before - count
            assert top >= 0, "pages are counted before they are taken"
            columns[group] = stack[top:before]
            tops[group] = top
            if top < lowest[group]:
                lowest[group] = top
        return columns

    def put(self, columns: Int32s) -> None:
        """Gives columns back, `i32[groups, n]`; `NULL_SLOT` stands for no page."""
        for group, stack in enumerate(self._stacks):
            slots = columns[group]
            if self.has_holes:
                slots = slots[slots != NULL_SLOT]
            top = self._tops[group]
            stack[top : top + len(slots)] = slots
            self._tops[group] = top + len(slots)

    def free_slots(self, group_id: int) -> Int32s:
        """Returns a copy of the free pages of a group, in no order."""
        return self._stacks[group_id][: self._tops[group_id]].copy()


class RowPool:
    """The free rows of the recurrent group.

    Attributes:
        num_rows: Rows, free or not.
    """

    def __init__(self, size: CacheSize) -> None:
        self.num_rows = size.num_rows
        first = size.first_slot
        self._stack = list(range(first + size.num_rows - 1, first - 1, -1))
        self._lowest = size.num_rows

    @property
    def free(self) -> int:
        """How many rows are free."""
        return len(self._stack)

    @property
    def peak(self) -> int:
        """The most rows that were ever in use at once."""
        return self.num_rows - self._lowest

    def take(self) -> int:
        """Takes one row; it must be free."""
        row = self._stack.pop()
        if len(self._stack) < self._lowest:
            self._lowest = len(self._stack)
        return row

    def put(self, row: int) -> None:
        """Gives one row back."""
        self._stack.append(row)

    def free_slots(self) -> list[int]:
        """Returns a copy of the free rows, in no order."""
        return list(self._stack)
