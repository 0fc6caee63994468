"""Least recently used first: the simple order, to compare with and to fall back on."""

import collections
from collections.abc import Iterable, Sequence

from jaxcache.policies.candidates import candidates
from jaxcache.policies.policy import NO_ROW, Arrival, Geometry, Snapshot, Wish

# How many are asked for one that frees pages, before any will do.
MAX_ASKED = 32


class Lru:
    """Takes every candidate, evicts what was not used for longest, and learns nothing.

    Evicted snapshots are forgotten at once.
    """

    def __init__(self, *, tokens_per_page: int) -> None:
        self._page = tokens_per_page
        # By record. Not a plain dict: finding its first item walks over deleted ones.
        self._order: collections.OrderedDict[int, Snapshot] = collections.OrderedDict()
        self._records = 0
        self._ghosts: list[Snapshot] = []

    def arrive(self, arrival: Arrival) -> Arrival:
        """Notes a new request."""
        return arrival

    def wishes(self, bundle: Arrival, reused: int, free_rows: int) -> Sequence[Wish]:
        """Returns every candidate."""
        del free_rows
        kinds = candidates(bundle.prompt_tokens, reused, bundle.matched, self._page)
        return [Wish(position, kind, True) for position, kind in kinds.items()]

    def wants_response(
        self, bundle: Arrival, position: int, response_tokens: int, free_rows: int
    ) -> bool:
        """Returns that the state at the end of a request is worth its row."""
        del bundle, position, response_tokens, free_rows
        return True

    def added(self, bundle: Arrival, snapshot: Snapshot) -> None:
        """Notes a new snapshot as the most recently used one."""
        del bundle
        self._records += 1
        snapshot.record = self._records
        if snapshot.row == NO_ROW:
            self._ghosts.append(snapshot)
        else:
            self._order[self._records] = snapshot

    def evicted(self, snapshot: Snapshot, shallower: Snapshot | None) -> None:
        """Notes that a snapshot is gone."""
        del shallower
        assert snapshot.record is not None
        del self._order[snapshot.record]
        self._ghosts.append(snapshot)

    def revived(self, bundle: Arrival, snapshot: Snapshot) -> None:
        """Notes that a ghost got a row."""
        self._ghosts.remove(snapshot)
        self.added(bundle, snapshot)

    def used(self, bundle: Arrival, snapshot: Snapshot) -> None:
        """Makes a snapshot the most recently used one."""
        del bundle
        assert snapshot.record is not None
        self._order.move_to_end(snapshot.record)

    def expired(self) -> Iterable[Snapshot]:
        """Returns what was evicted since it was asked last."""
        ghosts, self._ghosts = self._ghosts, []
        return ghosts

    def victim(self, geometry: Geometry, needs_pages: bool) -> Snapshot | None:
        """Returns the snapshot that was not used for longest."""
        oldest = None
        asked = 0
        for snapshot in self._order.values():
            if snapshot.holds:
                continue
            if not needs_pages or geometry.pages_freed(snapshot):
                return snapshot
            oldest = oldest or snapshot
            asked += 1
            if asked == MAX_ASKED:
                break
        return oldest
