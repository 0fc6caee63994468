"""Eviction order: which of the resident things goes first.

Two kinds of things are resident in the prefix tree for nobody's sake but a later
request's: snapshots, each with a row, and the ends of leaves, with their pages. The
tree says what may go at all (nothing held), the order here says what goes first.
"""

from collections.abc import Iterator
from typing import Protocol

from jaxcache.prefixes.nodes import Node, Snapshot


class EvictionQueue[T](Protocol):
    """An order over resident things of one kind."""

    def insert(self, item: T) -> None:
        """Adds an item as the most recently used one."""
        ...

    def touch(self, item: T) -> None:
        """Notes that an item was used; it stays where it is in no other case."""
        ...

    def remove(self, item: T) -> None:
        """Forgets an item that is no longer resident."""
        ...

    def victim(self) -> T | None:
        """Returns the item that should go first, `None` if there is none.

        It stays in the queue: the tree removes it, or touches it because it is held.
        """
        ...

    def __contains__(self, item: object) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[T]: ...


class Eviction(Protocol):
    """What goes first, among snapshots and among leaves.

    One object has both queues, so that an order may weigh a snapshot by the pages that
    would go with it.
    """

    @property
    def snapshots(self) -> EvictionQueue[Snapshot]:
        """The order in which snapshots give up their rows."""
        ...

    @property
    def leaves(self) -> EvictionQueue[Node]:
        """The order in which nodes without children give up their pages."""
        ...
