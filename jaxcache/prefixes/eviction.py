"""Eviction: giving pages and rows of the prefix tree up, and forgetting tokens.

A model with recurrent layers gives up snapshots: the row, and the pages that nothing
else needs, down to the next resident snapshot or hold on the path. What is left is a
ghost; the tokens up to the deepest snapshot of a path, ghosts included, stay known. A
model with attention only has no snapshots, and cuts the ends off its least recently
used leaves. Either way eviction takes time for what it frees, not for the tree's size.
"""

import collections

from jaxcache.prefixes.nodes import (
    NO_CHILDREN,
    NO_ROW,
    NO_SNAPSHOTS,
    Int32s,
    Node,
    Root,
    Snapshot,
    find_partial_page,
)
from jaxcache.prefixes.order import EvictionOrder
from jaxcache.prefixes.residency import Residency
from jaxcache.prefixes.slots import PagePools, RowPool


class Evictor:
    """Gives up what nobody holds.

    Attributes:
        leaves: Leaves of a model with attention only, the least recently used first.
        num_snapshots: Snapshots evicted so far.
        num_columns: Columns of pages given up so far.
    """

    def __init__(
        self,
        pages: PagePools,
        rows: RowPool,
        order: EvictionOrder,
        residency: Residency,
        is_recurrent: bool,
    ) -> None:
        self._pages = pages
        self._rows = rows
        self._order = order
        self._residency = residency
        self._is_recurrent = is_recurrent
        self._page = residency.tokens_per_page
        self.leaves: collections.OrderedDict[Node, None] = collections.OrderedDict()
        self.num_snapshots = 0
        self.num_columns = 0

    # -- making room -------------------------------------------------------------------

    def make_room(self, columns: int, rows: int) -> None:
        """Evicts until so many columns of pages and rows are free.

        The caller has made sure, by the counts, that this can be done.
        """
        while self._pages.free_columns < columns:
            if self._is_recurrent:
                self._evict_one(True, columns, rows)
            else:
                self._trim_leaves(columns)
        while self._rows.free < rows:
            self._evict_one(False, columns, rows)

    def _evict_one(self, needs_pages: bool, columns: int, rows: int) -> None:
        snapshot = self._order.victim(self, needs_pages)
        if snapshot is None:
            raise RuntimeError(
                f"{columns} columns of pages and {rows} rows were promised, but "
                f"{self._pages.free_columns} and {self._rows.free} are free, and no "
                f"snapshot can be evicted"
            )
        self.evict(snapshot)

    def evict(self, snapshot: Snapshot) -> None:
        """Makes a ghost of a snapshot that nobody holds."""
        node = snapshot.node
        assert node is not None
        assert snapshot.is_resident
        assert snapshot.holds == 0
        shallower = self.shallower(snapshot)
        self._rows.put(snapshot.row)
        snapshot.row = NO_ROW
        self.num_snapshots += 1
        self._residency.count_out(snapshot)
        self._order.evicted(snapshot, shallower)
        self.shrink(node)

    def forget(self, snapshot: Snapshot) -> None:
        """Takes a ghost out of the tree, with the tokens that only it kept known."""
        node = snapshot.node
        assert node is not None
        assert not snapshot.is_resident
        node.snapshots.remove(snapshot)
        if not node.snapshots:
            node.snapshots = NO_SNAPSHOTS
        snapshot.node = None
        self.shrink(node)

    # -- what an eviction order asks ---------------------------------------------------

    def shallower(self, snapshot: Snapshot) -> Snapshot | None:
        """Returns the next shallower resident snapshot on its path."""
        node = snapshot.node
        position = snapshot.position
        while node is not None:
            if node.residents:
                for other in reversed(node.snapshots):
                    if other.position < position and other.is_resident:
                        return other
            node = node.parent
        return None

    def pages_freed(self, snapshot: Snapshot) -> int:
        """Returns how many columns of pages evicting a snapshot would free."""
        node = snapshot.node
        assert node is not None
        if node.live or node.extent >= snapshot.position:
            return 0
        freed = 0
        needed = self._residency.needed_directly(node, without=snapshot)
        if needed > snapshot.position:
            return 0
        while True:
            keep = needed // self._page - node.start // self._page
            freed += max(0, int(node.pages.shape[1]) - keep)
            parent = node.parent
            if needed > node.start or parent is None or parent.live > 1:
                return freed
            node, needed = parent, self._residency.needed_directly(parent)

    # -- giving up what nobody needs ---------------------------------------------------

    def shrink(self, node: Node) -> None:
        """Gives up what nobody needs of a node, and of those above it.

        Does nothing in a model with attention only, where pages wait to be evicted.
        """
        if not self._is_recurrent:
            self.drop_covered_tail(node)
            return
        while node.parent is not None:
            parent = node.parent
            if node.live:
                self.drop_covered_tail(node)
                break
            needed = self._residency.needed(node)
            self._free_beyond(node, needed)
            self._cut_tokens(node, needed)
            if node.is_live:
                break
            node = parent
        if node.parent is None and not node.children and not node.is_pinned:
            if isinstance(node, Root):
                self._residency.roots.pop(node.scope, None)

    def _free_beyond(self, node: Node, needed: int) -> None:
        """Frees the pages of a node that hold no token before `needed`."""
        first, have = node.start // self._page, node.pages.shape[1]
        keep = needed // self._page - first
        if keep > have or (keep == have and node.tail is None):
            return
        begun = needed % self._page > 0 and self._wants_begun(node, needed)
        if keep == have and begun:
            return
        dropped, tail = node.pages[:, keep:], node.tail
        self._report(node, first + keep, dropped, tail)
        node.tail = None
        node.pages = node.pages[:, :keep].copy()
        if begun and dropped.shape[1]:
            # The whole page of which the begun one is left.
            dropped = self._leave_first(node, dropped, needed)
        elif needed <= node.start and node.start % self._page:
            dropped, tail = self._leave_to_above(node, dropped, tail)
        self._free(dropped, tail)
        self._residency.account(node)
        self._residency.version += 1

    def _wants_begun(self, node: Node, position: int) -> bool:
        """Whether tokens past the last page boundary before `position` are needed."""
        begin = position - position % self._page
        if node.extent > begin:
            return True
        return any(
            begin < snapshot.position <= position and snapshot.is_resident
            for snapshot in reversed(node.snapshots)
        )

    def _leave_to_above(
        self, node: Node, dropped: Int32s, tail: Int32s | None
    ) -> tuple[Int32s, Int32s | None]:
        """Leaves a page that began above a node to whoever needs its beginning there.

        It must stay loose there, or the counts would have promised it in vain.
        """
        begin = node.start - node.start % self._page
        above = node.parent
        while above is not None and above.end > begin:
            if (
                above.tail is None
                and not above.locked
                and above.extent <= begin
                and self._wants_begun(above, above.end)
            ):
                if find_partial_page(above, above.end, self._page) is None:
                    dropped, tail = self._leave_begun(above, dropped, tail, above.end)
                    self._residency.account(above)
                break
            above = above.parent
        return dropped, tail

    def drop_covered_tail(self, node: Node, is_covered: bool = False) -> None:
        """Frees a tail page whose tokens begin a page of a node below too.

        Left where a request may be about to read the tail: it does not hold that node.

        Args:
            node: The node.
            is_covered: Whether the caller knows of such a page.
        """
        tail = node.tail
        if tail is None or node.extent > node.tail_end - node.tail_end % self._page:
            return
        node.tail = None
        if is_covered or find_partial_page(node, node.tail_end, self._page) is not None:
            self.drop_tail(node, tail)
            self._residency.account(node)
        else:
            node.tail = tail

    def drop_tail(self, node: Node, tail: Int32s) -> None:
        """Frees the begun page of a node, whose tokens begin another; not counted."""
        if self._residency.listener is not None:
            self._residency.listener.begun_removed(node, tail)
        self._pages.put(tail[:, None])
        node.tail = None

    def _cut_tokens(self, node: Node, needed: int) -> None:
        """Forgets tokens at the end of a node without children that nothing needs."""
        if node.children:
            return
        keep = needed
        if node.snapshots:
            keep = max(keep, node.snapshots[-1].position)
        if keep <= node.start:
            self._remove(node)
        elif keep < node.end:
            tail, listener = node.tail, self._residency.listener
            if listener is not None and tail is not None and keep < node.tail_end:
                listener.begun_removed(node, tail)
                node.tail_end = keep
                listener.begun_stored(node, tail)
            self._cut_edge(node, keep)
            node.tail_end = min(node.tail_end, keep)
            self._residency.version += 1

    def _cut_edge(self, node: Node, end: int) -> None:
        """Forgets the tokens of a node from `end` on."""
        node.edge = node.edge[: 4 * (end - node.start)]
        node.end = end
        if node.digests:
            del node.digests[end // self._page - node.start // self._page :]

    def _remove(self, leaf: Node) -> None:
        """Takes a node out of the tree that has nothing left."""
        assert not leaf.children
        assert not leaf.is_live
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.edge[:4]]
        leaf.parent = None
        self._residency.forget_counts(leaf)
        self._residency.version += 1
        if not parent.children:
            parent.children = NO_CHILDREN

    def _report(
        self, node: Node, first: int, dropped: Int32s, tail: Int32s | None
    ) -> None:
        """Tells the listener what a node loses; its tokens must be there still."""
        listener = self._residency.listener
        if listener is not None:
            listener.pages_removed(node, first, dropped)
            if tail is not None:
                listener.begun_removed(node, tail)

    def _leave_first(self, node: Node, dropped: Int32s, end: int) -> Int32s:
        """Leaves the beginning of the first page that a node loses, up to `end`, to it.

        Returns:
            The other pages.
        """
        node.tail, node.tail_end = dropped[:, 0].copy(), end
        if self._residency.listener is not None:
            self._residency.listener.begun_stored(node, node.tail)
        return dropped[:, 1:]

    def _leave_begun(
        self, node: Node, dropped: Int32s, tail: Int32s | None, end: int
    ) -> tuple[Int32s, Int32s | None]:
        """Leaves the beginning of a page, whole or begun, up to `end` to a node.

        Returns:
            The other pages.
        """
        if dropped.shape[1]:
            return self._leave_first(node, dropped, end), tail
        if tail is not None:
            node.tail, node.tail_end = tail, end
            if self._residency.listener is not None:
                self._residency.listener.begun_stored(node, tail)
        return dropped, None

    def _free(self, dropped: Int32s, tail: Int32s | None) -> None:
        self._pages.put(dropped)
        self.num_columns += dropped.shape[1]
        if tail is not None:
            self._pages.put(tail[:, None])
            self.num_columns += 1

    # -- leaves, in a model with attention only ----------------------------------------

    def add_leaf(self, leaf: Node) -> None:
        """Notes a new node without children."""
        if not self._is_recurrent:
            assert leaf.parent is not None
            self.leaves.pop(leaf.parent, None)
            self.leaves[leaf] = None

    def touch_leaf(self, leaf: Node) -> None:
        """Notes that a leaf was used, or has grown."""
        if leaf in self.leaves:
            self.leaves.move_to_end(leaf)

    def _trim_leaves(self, columns: int) -> None:
        """Cuts the ends off leaves until so many columns are free."""
        skipped = 0
        while self._pages.free_columns < columns:
            leaf = next(iter(self.leaves), None)
            if leaf is None or skipped > len(self.leaves):
                raise RuntimeError(
                    f"{columns} columns of pages were promised, "
                    f"{self._pages.free_columns} are free, but no leaf can be cut"
                )
            if leaf.holds and not leaf.loose:
                self.leaves.move_to_end(leaf)
                skipped += 1
            else:
                self._trim(leaf, columns - self._pages.free_columns)
                skipped = 0

    def _trim(self, leaf: Node, columns: int) -> None:
        """Cuts as many columns as asked for off the end of a leaf."""
        last = leaf.end // self._page + (leaf.tail is not None)
        cut = max((last - columns) * self._page, leaf.extent)
        if cut > leaf.start:
            self._cut_leaf(leaf, cut)
            return
        parent = leaf.parent
        assert parent is not None
        dropped, tail = leaf.pages, leaf.tail
        self._report(leaf, leaf.start // self._page, dropped, tail)
        del self.leaves[leaf]
        self._remove(leaf)
        if leaf.start % self._page:
            dropped, tail = self._leave_to_parent(parent, dropped, tail)
        self._free(dropped, tail)
        if not parent.children:
            if not isinstance(parent, Root):
                # Others have gone on from it, so it is the likelier to be met again.
                self.leaves[parent] = None
            elif not parent.is_pinned:
                del self._residency.roots[parent.scope]

    def _cut_leaf(self, leaf: Node, cut: int) -> None:
        first = leaf.start // self._page
        keep = cut // self._page - first
        dropped, tail = leaf.pages[:, keep:], leaf.tail
        self._report(leaf, first + keep, dropped, tail)
        leaf.tail = None
        if cut % self._page:
            end = cut if dropped.shape[1] else min(leaf.tail_end, cut)
            dropped, tail = self._leave_begun(leaf, dropped, tail, end)
        self._cut_edge(leaf, cut)
        leaf.pages = leaf.pages[:, :keep].copy()
        self._free(dropped, tail)
        self._residency.account(leaf)
        self._residency.version += 1

    def _leave_to_parent(
        self, parent: Node, dropped: Int32s, tail: Int32s | None
    ) -> tuple[Int32s, Int32s | None]:
        """Leaves the page that began in the parent to it, if no other node has it."""
        begin = parent.end - parent.end % self._page
        if (
            parent.tail is None
            and not parent.locked
            and parent.extent <= begin
            and find_partial_page(parent, parent.end, self._page) is None
        ):
            dropped, tail = self._leave_begun(parent, dropped, tail, parent.end)
            self._residency.account(parent)
        return dropped, tail
