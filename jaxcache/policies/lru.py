"""Least recently used first: the simple order, and the only one without snapshots."""

import collections
from collections.abc import Iterator

from jaxcache.prefixes.nodes import Node, Snapshot


class LruQueue[T]:
    """Least recently used first; every call takes constant time."""

    def __init__(self) -> None:
        # Not a plain dict: finding its first item walks over all deleted ones.
        self._items: collections.OrderedDict[T, None] = collections.OrderedDict()

    def insert(self, item: T) -> None:
        """Adds an item as the most recently used one."""
        self._items[item] = None

    def touch(self, item: T) -> None:
        """Makes an item the most recently used one."""
        self._items.move_to_end(item)

    def remove(self, item: T) -> None:
        """Forgets an item."""
        del self._items[item]

    def victim(self) -> T | None:
        """Returns the item that was not used for longest."""
        return next(iter(self._items), None)

    def __contains__(self, item: object) -> bool:
        return item in self._items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)


class Lru:
    """Evicts what was not used for longest.

    A node that becomes a leaf starts as the most recently used: others have gone on
    from it, so it is the likelier of the two to be met again.
    """

    def __init__(self) -> None:
        self.snapshots: LruQueue[Snapshot] = LruQueue()
        self.leaves: LruQueue[Node] = LruQueue()
