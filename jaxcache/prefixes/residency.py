"""Residency: what of the prefix tree somebody needs.

A hold of a request protects the pages of a prefix and everything they hang on; a held
snapshot protects its row. What no request holds is *loose*: eviction may have it. The
counts of what is loose are kept up to date with every change, so that "would it fit?"
is answered without evicting anything.

In a model with recurrent layers a prefix can be reused only where a snapshot is. So
pages are kept for the sake of holds and of resident snapshots, which make a node and
all above it *live*, and for nothing else.
"""

import numpy as np

from jaxcache.prefixes.listener import Listener
from jaxcache.prefixes.nodes import NO_HOLDS, Hold, Node, Root, Snapshot
from jaxcache.prefixes.slots import PagePools


class Residency:
    """Who needs what of one tree.

    Attributes:
        tokens_per_page: Tokens of one page.
        roots: The root of each scope.
        version: Grows with every change that could change a lookup.
        num_snapshots: Resident snapshots.
        num_held: Those of them that a request needs.
        listener: Who is told what becomes resident and what ceases to be.
    """

    def __init__(self, pages: PagePools, tokens_per_page: int) -> None:
        self._pages = pages
        self.tokens_per_page = tokens_per_page
        self.roots: dict[object, Root] = {}
        self.version = 0
        self.num_snapshots = 0
        self.num_held = 0
        self.listener: Listener | None = None
        self._has_holes = False
        self._loose = 0
        self._loose_holes = np.zeros(pages.num_groups, np.int64)

    # -- how much could go -------------------------------------------------------------

    def evictable_pages(self, group_id: int) -> int:
        """Returns how many pages of a group eviction could free."""
        if self._has_holes:
            return self._loose - int(self._loose_holes[group_id])
        return self._loose

    @property
    def evictable_rows(self) -> int:
        """How many rows eviction could free."""
        return self.num_snapshots - self.num_held

    @property
    def has_holes(self) -> bool:
        """Whether any pages were ever missing inside a published prefix."""
        return self._has_holes

    def note_holes(self) -> None:
        """Says that pages with holes are being published."""
        self._has_holes = self._pages.has_holes = True

    def loose_from(self, node: Node) -> tuple[int, bool] | None:
        """Returns the first loose page of a node by index, and whether its tail is.

        Returns:
            `None` if a node below is held, and so all of this one.
        """
        if node.locked:
            return None
        page = self.tokens_per_page
        first = node.start // page
        last = first + node.pages.shape[1]
        extent = node.extent
        keep = max(first, min(last, -(-extent // page)))
        return keep - first, node.tail is not None and extent <= last * page

    def account(self, node: Node) -> None:
        """Counts anew what of a node is loose."""
        loose = self.loose_from(node)
        columns = 0
        if loose is not None:
            columns = node.pages.shape[1] - loose[0] + loose[1]
        self._loose += columns - node.loose
        node.loose = columns
        if self._has_holes:
            holes = np.zeros_like(self._loose_holes)
            if loose is not None:
                holes += (node.pages[:, loose[0] :] == 0).sum(axis=1)
                if loose[1] and node.tail is not None:
                    holes += node.tail == 0
            before = node.loose_holes
            self._loose_holes += holes if before is None else holes - before
            node.loose_holes = holes

    def forget_counts(self, node: Node) -> None:
        """Leaves a node that left the tree out of the counts."""
        self._loose -= node.loose
        if node.loose_holes is not None:
            self._loose_holes -= node.loose_holes
        node.loose = 0

    # -- who needs a node --------------------------------------------------------------

    def needed(self, node: Node) -> int:
        """Returns up to which position anybody needs a node; its start if nobody."""
        return node.end if node.live else self.needed_directly(node)

    def needed_directly(self, node: Node, without: Snapshot | None = None) -> int:
        """Returns the same as if there were no nodes below, nor one snapshot."""
        needed = max(node.extent, node.start)
        if node.residents:
            for snapshot in reversed(node.snapshots):
                if snapshot.is_resident and snapshot is not without:
                    return max(needed, snapshot.position)
        return needed

    def enliven(self, node: Node) -> None:
        """Counts a node that has just become live in those above it."""
        above = node.parent
        while above is not None:
            was_live = above.is_live
            above.live += 1
            if was_live:
                break
            above = above.parent

    def fade(self, node: Node) -> None:
        """Counts a node that is live no longer out of those above it."""
        above = node.parent
        while above is not None:
            above.live -= 1
            if above.is_live:
                break
            above = above.parent

    # -- holding -----------------------------------------------------------------------

    def hold(self, node: Node, position: int) -> Hold:
        """Protects the first `position` tokens of the prefix that `node` is part of."""
        assert node.start < position <= node.end
        hold = Hold(node, position)
        was_pinned, was_live = node.is_pinned, node.is_live
        if node.holds:
            node.holds.append(hold)
        else:
            node.holds = [hold]
        self.account(node)
        if not was_pinned:
            self._lock_above(node)
        if not was_live:
            self.enliven(node)
        return hold

    def release(self, hold: Hold) -> None:
        """Ends the protection. What only it was a reason to keep stays for now."""
        node = hold.node
        if len(node.holds) == 1:
            assert node.holds[0] is hold
            node.holds = NO_HOLDS
        else:
            node.holds.remove(hold)
        self.account(node)
        if not node.is_pinned:
            self._unlock_above(node)
        if not node.is_live:
            self.fade(node)

    def _lock_above(self, node: Node) -> None:
        above = node.parent
        while above is not None:
            was_pinned = above.is_pinned
            above.locked += 1
            if above.locked == 1:
                self.account(above)
            if was_pinned:
                break
            above = above.parent

    def _unlock_above(self, node: Node) -> None:
        above = node.parent
        while above is not None:
            above.locked -= 1
            if above.locked == 0:
                self.account(above)
            if above.is_pinned:
                break
            above = above.parent

    def hold_snapshot(self, snapshot: Snapshot) -> None:
        """Protects a snapshot's row; its position is under a hold of the same owner."""
        assert snapshot.is_resident
        snapshot.holds += 1
        if snapshot.holds == 1:
            self.num_held += 1

    def release_snapshot(self, snapshot: Snapshot) -> None:
        """Ends the protection."""
        snapshot.holds -= 1
        if snapshot.holds == 0:
            self.num_held -= 1

    # -- snapshots ---------------------------------------------------------------------

    def count_in(self, snapshot: Snapshot) -> None:
        """Counts a snapshot that has got a row."""
        node = snapshot.node
        assert node is not None
        was_live = node.is_live
        node.residents += 1
        self.num_snapshots += 1
        self.version += 1
        if not was_live:
            self.enliven(node)
        if self.listener is not None:
            self.listener.snapshot_stored(snapshot)

    def count_out(self, snapshot: Snapshot) -> None:
        """Counts a snapshot that has lost its row."""
        node = snapshot.node
        assert node is not None
        node.residents -= 1
        self.num_snapshots -= 1
        self.version += 1
        if not node.is_live:
            self.fade(node)
        if self.listener is not None:
            self.listener.snapshot_removed(snapshot)
