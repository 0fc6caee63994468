"""What the tree asks of an eviction order, and what it answers it."""

from typing import Protocol

from jaxcache.prefixes.nodes import Snapshot


class Geometry(Protocol):
    """What the tree knows of a snapshot's surroundings, a few microseconds each."""

    def shallower(self, snapshot: Snapshot) -> Snapshot | None:
        """Returns the next shallower resident snapshot on its path."""
        ...

    def pages_freed(self, snapshot: Snapshot) -> int:
        """Returns how many columns of pages evicting it would free."""
        ...


class EvictionOrder(Protocol):
    """What goes first when rows or pages are short."""

    def victim(self, geometry: Geometry, needs_pages: bool) -> Snapshot | None:
        """Returns the resident snapshot that goes first, none that is held.

        Args:
            geometry: What the tree knows.
            needs_pages: Whether pages are short: one that frees some is preferred.

        Returns:
            `None` if every resident snapshot is held.
        """
        ...

    def evicted(self, snapshot: Snapshot, shallower: Snapshot | None) -> None:
        """Notes that a snapshot is a ghost now.

        Args:
            snapshot: The snapshot.
            shallower: The next shallower resident one, which would serve instead.
        """
        ...
