"""Residency: what of the prefix tree is held, what may go, and letting it go.

A hold protects the pages of a prefix and everything they hang on; a held snapshot
protects its row. The counts of what is *loose*, that is neither, are kept up to date
with every change, so that "would it fit?" is answered without evicting anything, and
evicting costs time for what it frees, whatever the size of the tree.
"""

import numpy as np

from jaxcache.prefixes.eviction import Eviction
from jaxcache.prefixes.nodes import (
    NO_CHILDREN,
    NO_HOLDS,
    Hold,
    Int32s,
    Node,
    Root,
    Snapshot,
    find_partial_page,
)
from jaxcache.prefixes.slots import PagePools, RowPool


class Residency:
    """Holds on the tree, and the eviction of what nobody holds.

    Attributes:
        pages: The page pools.
        rows: The row pool.
        eviction: What goes first.
        tokens_per_page: Tokens of one page.
        is_recurrent: Whether a prefix is only usable at a snapshot.
        roots: The root of each scope.
        version: Grows with every change that could change a lookup.
        num_snapshots: Snapshots in the tree.
        num_held: Those of them that a request needs.
        num_evicted: Snapshots evicted so far.
        num_columns_evicted: Columns of pages evicted so far.
    """

    def __init__(
        self,
        pages: PagePools,
        rows: RowPool,
        eviction: Eviction,
        tokens_per_page: int,
        is_recurrent: bool,
    ) -> None:
        self.pages = pages
        self.rows = rows
        self.eviction = eviction
        self.tokens_per_page = tokens_per_page
        self.is_recurrent = is_recurrent
        self.roots: dict[object, Root] = {}
        self.version = 0
        self.num_snapshots = 0
        self.num_held = 0
        self.num_evicted = 0
        self.num_columns_evicted = 0
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
        self._has_holes = self.pages.has_holes = True

    def loose_from(self, node: Node) -> tuple[int, bool] | None:
        """Returns the first loose page of a node by index, and whether its tail is.

        Returns:
            `None` if a node below is held, and so all of this one.
        """
        if node.locked:
            return None
        page = self.tokens_per_page
        first, last = node.start // page, node.end // page
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

    # -- holding -----------------------------------------------------------------------

    def hold(self, node: Node, position: int) -> Hold:
        """Protects the first `position` tokens of the prefix that `node` is part of."""
        assert node.start < position <= node.end
        hold = Hold(node, position)
        was_pinned = node.is_pinned
        if node.holds:
            node.holds.append(hold)
        else:
            node.holds = [hold]
        self.account(node)
        if not was_pinned:
            self._lock_above(node)
        return hold

    def release(self, hold: Hold, *, tidy: bool = True) -> None:
        """Ends the protection.

        Args:
            hold: The hold.
            tidy: Whether to give up at once what only the hold was a reason to keep.
        """
        node = hold.node
        if len(node.holds) == 1:
            assert node.holds[0] is hold
            node.holds = NO_HOLDS
        else:
            node.holds.remove(hold)
        self.account(node)
        if not node.is_pinned:
            self._unlock_above(node)
        if tidy:
            self.tidy(node)

    def tidy(self, node: Node) -> None:
        """Gives up what a hold in a node may have been the only reason to keep."""
        if node.tail is not None and node.children:
            self.drop_covered_tail(node)
        if not self.pages.num_groups:
            self._prune(node)

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
        snapshot.holds += 1
        if snapshot.holds == 1:
            self.num_held += 1

    def release_snapshot(self, snapshot: Snapshot) -> None:
        """Ends the protection."""
        snapshot.holds -= 1
        if snapshot.holds == 0:
            self.num_held -= 1

    # -- letting go --------------------------------------------------------------------

    def make_room(self, columns: int, rows: int) -> None:
        """Evicts until so many columns of pages and rows are free.

        The caller has made sure, by the counts, that this can be done.
        """
        skipped = 0
        leaves = self.eviction.leaves
        while self.pages.free_columns < columns:
            leaf = leaves.victim()
            if leaf is None or skipped > len(leaves):
                raise RuntimeError(
                    f"{columns} pages were promised, {self.pages.free_columns} are "
                    f"free and {self._loose} counted as evictable, but none is"
                )
            if leaf.holds and not leaf.loose:
                leaves.touch(leaf)
                skipped += 1
            else:
                self._trim(leaf, columns - self.pages.free_columns)
                skipped = 0
        snapshots = self.eviction.snapshots
        while self.rows.free < rows:
            snapshot = snapshots.victim()
            if snapshot is None or skipped > len(snapshots):
                raise RuntimeError(
                    f"{rows} rows were promised, {self.rows.free} are free and "
                    f"{self.evictable_rows} counted as evictable, but none is"
                )
            if snapshot.holds:
                snapshots.touch(snapshot)
                skipped += 1
            else:
                node = snapshot.node
                assert node is not None
                self._drop_snapshot(snapshot)
                skipped = 0
                if not self.pages.num_groups:
                    self._prune(node)

    def _drop_snapshot(self, snapshot: Snapshot) -> None:
        assert snapshot.holds == 0
        assert snapshot.node is not None
        snapshot.node.snapshots.remove(snapshot)
        snapshot.node = None
        self.eviction.snapshots.remove(snapshot)
        self.rows.put(snapshot.row)
        self.num_snapshots -= 1
        self.num_evicted += 1
        self.version += 1

    def _trim(self, leaf: Node, columns: int) -> None:
        """Cuts the end off a leaf.

        With recurrent layers down to the next snapshot, since pages past the last
        snapshot of a prefix serve nobody; without, just as many columns as asked for.
        """
        page = self.tokens_per_page
        cut = leaf.start
        if self.is_recurrent:
            for snapshot in reversed(leaf.snapshots):
                if snapshot.position < leaf.end:
                    cut = snapshot.position
                    break
        else:
            last = leaf.end // page + (leaf.tail is not None)
            cut = (last - columns) * page
        cut = max(cut, leaf.extent)
        if cut <= leaf.start:
            self._remove(leaf)
        else:
            self._shorten(leaf, cut)

    def _shorten(self, leaf: Node, cut: int) -> None:
        """Cuts a leaf down to its tokens before `cut`."""
        page = self.tokens_per_page
        while leaf.snapshots and leaf.snapshots[-1].position > cut:
            self._drop_snapshot(leaf.snapshots[-1])
        keep = cut // page - leaf.start // page
        dropped, tail = leaf.pages[:, keep:], leaf.tail
        if cut % page and self._wants_tail(leaf, cut):
            if dropped.shape[1]:
                # The whole page of which the begun one is left.
                leaf.tail, dropped = dropped[:, 0].copy(), dropped[:, 1:]
            else:
                tail = None
        else:
            leaf.tail = None
        self._free(dropped, tail)
        leaf.edge = leaf.edge[: 4 * (cut - leaf.start)]
        leaf.end = cut
        leaf.pages = leaf.pages[:, :keep].copy()
        self.account(leaf)
        self.version += 1

    def _wants_tail(self, node: Node, end: int) -> bool:
        """Whether a reader could use tokens past the last page boundary up to `end`."""
        begin = end - end % self.tokens_per_page
        if not self.is_recurrent or node.extent > begin:
            return True
        return bool(node.snapshots) and begin < node.snapshots[-1].position <= end

    def _free(self, dropped: Int32s, tail: Int32s | None) -> None:
        self.pages.put(dropped)
        self.num_columns_evicted += dropped.shape[1]
        if tail is not None:
            self.pages.put(tail[:, None])
            self.num_columns_evicted += 1

    def _remove(self, leaf: Node) -> None:
        """Takes a leaf that nobody holds out of the tree."""
        assert not leaf.children
        assert not leaf.is_pinned
        while leaf.snapshots:
            self._drop_snapshot(leaf.snapshots[-1])
        parent = leaf.parent
        assert parent is not None
        self.eviction.leaves.remove(leaf)
        del parent.children[leaf.edge[:4]]
        leaf.parent = None
        self._loose -= leaf.loose
        if leaf.loose_holes is not None:
            self._loose_holes -= leaf.loose_holes
        leaf.loose = 0
        dropped, tail = leaf.pages, leaf.tail
        if self._takes_page_over(parent):
            if dropped.shape[1]:
                parent.tail, dropped = dropped[:, 0].copy(), dropped[:, 1:]
            else:
                parent.tail, tail = tail, None
            self.account(parent)
        self._free(dropped, tail)
        self.version += 1
        if not parent.children:
            parent.children = NO_CHILDREN
            if not isinstance(parent, Root):
                self.eviction.leaves.insert(parent)
            elif not parent.is_pinned:
                del self.roots[parent.scope]

    def _takes_page_over(self, parent: Node) -> bool:
        """Whether the page that a child leaves behind is the last to begin as needed.

        It must stay loose in the parent, or the counts would have promised it in vain.
        """
        begin = parent.end - parent.end % self.tokens_per_page
        return (
            parent.end > begin
            and parent.tail is None
            and not parent.locked
            and parent.extent <= begin
            and self._wants_tail(parent, parent.end)
            and find_partial_page(parent, parent.end, self.tokens_per_page) is None
        )

    def drop_covered_tail(self, node: Node, is_covered: bool = False) -> None:
        """Frees a tail page whose tokens begin a page of a node below too.

        Left where a request may be about to read the tail: it does not hold that node.

        Args:
            node: The node.
            is_covered: Whether the caller knows of such a page.
        """
        page = self.tokens_per_page
        tail = node.tail
        if tail is None or node.extent > node.end - node.end % page:
            return
        node.tail = None
        if is_covered or find_partial_page(node, node.end, page) is not None:
            self.pages.put(tail[:, None])
            self.account(node)
        else:
            node.tail = tail

    def _prune(self, node: Node) -> None:
        """Forgets tokens that no snapshot needs, in a model without pages.

        Nothing else bounds the tokens that such a tree knows.
        """
        while node.parent is not None and not node.children and not node.locked:
            keep = node.extent
            if node.snapshots:
                keep = max(keep, node.snapshots[-1].position)
            if keep > node.start:
                if keep < node.end:
                    self._shorten(node, keep)
                break
            parent = node.parent
            self._remove(node)
            node = parent

    # -- snapshots and leaves come -----------------------------------------------------

    def add_snapshot(self, node: Node, index: int, snapshot: Snapshot) -> None:
        """Puts a snapshot among those of a node; the tree owns its row from now on."""
        if node.snapshots:
            node.snapshots.insert(index, snapshot)
        else:
            node.snapshots = [snapshot]
        self.eviction.snapshots.insert(snapshot)
        self.num_snapshots += 1
        self.version += 1

    def add_leaf(self, leaf: Node) -> None:
        """Puts a new node under its parent; the tree owns its pages from now on."""
        parent = leaf.parent
        assert parent is not None
        if parent.children:
            parent.children[leaf.edge[:4]] = leaf
        else:
            parent.children = {leaf.edge[:4]: leaf}
            if not isinstance(parent, Root):
                self.eviction.leaves.remove(parent)
        self.eviction.leaves.insert(leaf)
        self.account(leaf)
        self.version += 1
