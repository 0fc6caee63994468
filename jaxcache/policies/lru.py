"""Least recently used first: the simple policy."""

import collections
import itertools
from collections.abc import Collection, Iterable, Sequence

from jaxcache.policies.policy import BOUNDARY, BRANCH, KINDS, Arrival, Wish
from jaxcache.prefixes.nodes import Snapshot
from jaxcache.prefixes.order import Geometry

# How many snapshots are asked whether they free pages before any one goes.
_MAX_ASKED = 64


class Lru:
    """Takes every snapshot, and evicts the one that was not used for longest.

    Args:
        row_bytes: Does not matter here.
        page_bytes: Does not matter here.
        tokens_per_page: Tokens of one page.
        kinds: The kinds that it may suggest.
        ghosts: How many evicted snapshots are remembered, so that the tree knows where
            prompts parted after it has lost their pages.
    """

    def __init__(
        self,
        *,
        row_bytes: int,
        page_bytes: int,
        tokens_per_page: int,
        kinds: Collection[str] = KINDS,
        ghosts: int = 4096,
    ) -> None:
        del row_bytes, page_bytes
        self._page = tokens_per_page
        self._kinds = frozenset(kinds)
        self._max_ghosts = ghosts
        # Not plain dicts: finding the first item walks over all deleted ones.
        self._residents: collections.OrderedDict[Snapshot, None]
        self._residents = collections.OrderedDict()
        self._ghosts: collections.OrderedDict[Snapshot, None]
        self._ghosts = collections.OrderedDict()

    def arrive(self, arrival: Arrival) -> Arrival:
        """Notes a new request."""
        return arrival

    def wishes(self, bundle: Arrival, now: Arrival, free_rows: int) -> Sequence[Wish]:
        """Returns the last page boundaries of the prompt, and where it parts."""
        page, length = self._page, now.prompt_tokens
        wishes = []
        if now.matched > now.reused:
            wishes.append(Wish(now.matched // page * page, BRANCH, True))
        wishes.append(Wish((length - 1) // page * page, BOUNDARY, True))
        if length % page == 0:
            wishes.append(Wish(length, BOUNDARY, True))
        return [wish for wish in wishes if wish.kind in self._kinds]

    def wants_response(
        self, bundle: Arrival, position: int, response_tokens: int, free_rows: int
    ) -> bool:
        """Every response is kept."""
        return True

    def added(self, bundle: Arrival, snapshot: Snapshot) -> None:
        """Notes a new snapshot or ghost."""
        snapshot.record = 0
        (self._residents if snapshot.row >= 0 else self._ghosts)[snapshot] = None

    def revived(self, bundle: Arrival, snapshot: Snapshot) -> None:
        """Notes that a ghost is resident again."""
        del self._ghosts[snapshot]
        self._residents[snapshot] = None

    def evicted(self, snapshot: Snapshot, shallower: Snapshot | None) -> None:
        """Notes that a snapshot is a ghost now."""
        del self._residents[snapshot]
        self._ghosts[snapshot] = None

    def used(self, bundle: Arrival, snapshot: Snapshot) -> None:
        """Makes a snapshot the most recently used one."""
        del bundle
        self._residents.move_to_end(snapshot)

    def expired(self) -> Iterable[Snapshot]:
        """Returns the oldest ghosts, where there are too many."""
        while len(self._ghosts) > self._max_ghosts:
            yield self._ghosts.popitem(last=False)[0]

    def victim(self, geometry: Geometry, needs_pages: bool) -> Snapshot | None:
        """Returns the snapshot that was not used for longest.

        If pages are short, the first one of the oldest that frees some.
        """
        oldest: Snapshot | None = None
        for snapshot in itertools.islice(self._residents, _MAX_ASKED):
            if snapshot.holds:
                continue
            if not needs_pages or geometry.pages_freed(snapshot):
                return snapshot
            oldest = oldest or snapshot
        if oldest is not None:
            return oldest
        return next((s for s in self._residents if not s.holds), None)
