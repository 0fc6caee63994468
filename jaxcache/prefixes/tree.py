"""The prefix tree: which tokens are known, on which pages, with snapshots where.

It compares token ids, never hashes of them, and branches at any token. A lookup changes
nothing; nodes are split when something is published that leaves an edge in its middle.
Publishing tokens that are known but have lost their pages gives them pages again.
"""

import bisect
import operator

import numpy as np

from jaxcache.layouts import NULL_SLOT, CacheLayout, CacheSize, Window
from jaxcache.prefixes.eviction import Evictor
from jaxcache.prefixes.nodes import (
    NO_HOLDS,
    NO_ROW,
    NO_SNAPSHOTS,
    Hold,
    Int32s,
    Node,
    Root,
    Snapshot,
    common_tokens,
    find_partial_page,
)
from jaxcache.prefixes.order import EvictionOrder
from jaxcache.prefixes.residency import Residency
from jaxcache.prefixes.slots import PagePools, RowPool

# A leaf grows in place up to this many bytes, so that prefill in small chunks makes few
# nodes; beyond it copying the edge at each growth would cost more than the nodes.
_MAX_GROWING_BYTES = 4 * 2048

_POSITION = operator.attrgetter("position")


class PrefixTree:
    """Publishes and finds prefixes.

    Attributes:
        residency: Who needs what of the tree.
        evictor: Gives up what nobody holds.
        pages: The page pools; the tree gives back what it owns twice.
        tokens_per_page: Tokens of one page.
    """

    def __init__(
        self,
        layout: CacheLayout,
        size: CacheSize,
        pages: PagePools,
        rows: RowPool,
        order: EvictionOrder,
    ) -> None:
        self.pages = pages
        self._is_recurrent = layout.has_recurrent
        self.tokens_per_page = size.tokens_per_page
        # Only a window lets pages of one group go before those of another.
        self._has_windows = any(
            isinstance(group.retention, Window) for group in layout.page_groups
        )
        self.residency = Residency(pages, size.tokens_per_page)
        self.evictor = Evictor(pages, rows, order, self.residency, layout.has_recurrent)

    def root(self, scope: object) -> Root:
        """Returns the root of a scope, a new one if it has none."""
        roots = self.residency.roots
        root = roots.get(scope)
        if root is None:
            root = roots[scope] = Root(scope, self.pages.num_groups)
        return root

    def match(self, scope: object, data: bytes, limit: int) -> tuple[Node | None, int]:
        """Finds the longest known prefix. Changes nothing.

        Args:
            scope: Only prefixes of the same scope are looked at.
            data: Tokens, as the bytes of int32.
            limit: How many of them may be matched.

        Returns:
            The node in whose edge the match ends and the tokens matched; `None` and 0
            if the first token is unknown already.
        """
        node: Node | None = self.residency.roots.get(scope)
        if node is None:
            return None, 0
        at, stop = 0, 4 * limit
        while at < stop:
            child = node.children.get(data[at : at + 4])
            if child is None:
                break
            node = child
            edge = child.edge
            if data.startswith(edge, at):
                at += len(edge)
                continue
            at += 4 * common_tokens(edge, 0, data, at)
            break
        if node.parent is None:
            return None, 0
        return node, min(at, stop) // 4

    def insert(
        self,
        scope: object,
        hint: Node | None,
        start: int,
        data: bytes,
        columns: Int32s,
        tail: Int32s | None = None,
    ) -> tuple[Node, int]:
        """Publishes the tokens that follow a known prefix, with their pages.

        The tree owns the pages from now on. Where it has the same tokens on other
        pages, those stay: the given ones are given back, and `columns` is changed to
        those of the tree.

        Args:
            scope: Where to publish.
            hint: A node that a hold of the caller ends in, on the path to `start`;
                `None` where `start` is 0.
            start: Tokens before these, all of them known; begins a page.
            data: The tokens, as the bytes of int32; at least one.
            columns: `i32[groups, n]`, the whole pages of these tokens. Changed.
            tail: `i32[groups]`, the page with the tokens after the last whole page, if
                it is to be published.

        Returns:
            The node in which the last token lies, and how many columns were the tree's
            already: the first ones.
        """
        node = self.node_at(hint, start) if start else self.root(scope)
        if self._has_windows and not columns.all():
            self.residency.note_holes()
        page = self.tokens_per_page
        first = start // page
        pos, at, size = start, 0, len(data)
        adopted = 0
        tailed: Node | None = None
        while True:
            if inside := node.end - pos:
                count = common_tokens(node.edge, 4 * (pos - node.start), data, at)
                stop = pos + count
                if stop // page > pos // page:
                    mine = columns[:, pos // page - first : stop // page - first]
                    adopted += self._fill(node, pos // page, mine)
                pos, at = stop, at + 4 * count
                if at < size and count < inside:
                    node = self._split(node, pos)
            if tailed is not None and pos // page > tailed.tail_end // page:
                self.evictor.drop_covered_tail(
                    tailed, is_covered=not self.residency.has_holes
                )
                tailed = None
            if at == size:
                break
            if node.tail is not None:
                tailed = node
            child = node.children.get(data[at : at + 4])
            if child is None:
                rest = columns[:, pos // page - first :]
                node = self._append(node, data[at:], rest, tail is not None)
                pos, at = node.end, size
                if tailed is node:
                    tailed = None
            else:
                node = child
        if tail is not None:
            node = self._give_tail(node, pos, tail)
        return node, adopted

    def node_at(self, hint: Node | None, position: int) -> Node:
        """Returns the node on the path to `hint` in whose edge a position lies."""
        node = hint
        while node is not None and node.start >= position:
            node = node.parent
        assert node is not None
        assert node.start < position <= node.end
        return node

    def attach(self, hint: Node, position: int, row: int, kind: str) -> Snapshot | None:
        """Publishes a snapshot; a ghost at its position gets the row.

        Args:
            hint: A node at or below the position.
            position: Tokens that the row has absorbed.
            row: The row. The tree owns it from now on. `NO_ROW` for a ghost.
            kind: Why it was taken.

        Returns:
            The snapshot; `None` if there is one already: the row stays the caller's.
        """
        node = self.node_at(hint, position)
        index = bisect.bisect_left(node.snapshots, position, key=_POSITION)
        if index < len(node.snapshots) and node.snapshots[index].position == position:
            snapshot = node.snapshots[index]
            if row == NO_ROW or snapshot.is_resident:
                return None
            snapshot.row, snapshot.kind = row, kind
        else:
            snapshot = Snapshot(node, position, row, kind)
            if node.snapshots:
                node.snapshots.insert(index, snapshot)
            else:
                node.snapshots = [snapshot]
        if row != NO_ROW:
            self.residency.count_in(snapshot)
        return snapshot

    def snapshot_at(self, hint: Node, position: int) -> Snapshot | None:
        """Returns the snapshot at exactly a position on the path to `hint`."""
        node = self.node_at(hint, position)
        index = bisect.bisect_left(node.snapshots, position, key=_POSITION)
        if index < len(node.snapshots) and node.snapshots[index].position == position:
            return node.snapshots[index]
        return None

    def release(self, hold: Hold) -> None:
        """Ends a protection, and gives up what only that was a reason to keep."""
        self.residency.release(hold)
        self.evictor.shrink(hold.node)

    # -- parts of publishing -----------------------------------------------------------

    def _fill(self, node: Node, first: int, mine: Int32s) -> int:
        """Gives whole pages to tokens of a node, from page `first` of its prefix on.

        Where the node has pages already, those stay: the given ones are given back, and
        `mine` is changed to those of the node.

        Returns:
            How many columns the node had already: the first ones.
        """
        index = first - node.start // self.tokens_per_page
        have: int = max(0, node.pages.shape[1] - index)
        if have:
            self._adopt(node, index, mine[:, :have])
        missing = mine[:, have:]
        if missing.shape[1]:
            assert node.pages.shape[1] == index + have, "pages come in order"
            if node.tail is not None and not missing[:, 0].all():
                # What comes now cannot take the begun page's place: a group lacks it.
                self._split(node, node.tail_end)
            elif node.tail is not None:
                # Its tokens begin the first of the pages that come now.
                self.evictor.drop_tail(node, node.tail)
            node.pages = np.concatenate((node.pages, missing), axis=1)
            if self.residency.listener is not None:
                self.residency.listener.pages_stored(node, first + have, missing)
            self.residency.account(node)
            self.residency.version += 1
        return min(have, int(mine.shape[1]))

    def _adopt(self, node: Node, index: int, mine: Int32s) -> None:
        """Gives pages back that the tree has from `index` of `node` on; fills holes."""
        theirs = node.pages[:, index : index + mine.shape[1]]
        given = mine.copy()
        if self.residency.has_holes:
            missing = (theirs == 0) & (given != 0)
            if missing.any():
                theirs[missing] = given[missing]
                if self.residency.listener is not None:
                    filled = np.where(missing, given, NULL_SLOT)
                    self.residency.listener.pages_stored(
                        node, node.start // self.tokens_per_page + index, filled
                    )
                given[missing] = NULL_SLOT
                self.residency.account(node)
                self.residency.version += 1
        self.pages.put(given)
        mine[:] = theirs

    def _append(self, node: Node, edge: bytes, columns: Int32s, has_tail: bool) -> Node:
        """Adds tokens after the end of `node`: to itself if it may grow, or to a child.

        A leaf that many requests hold may grow too: each holds only up to its position.
        """
        whole = columns.shape[1] > 0
        # A tail that lies in the way must be followed by the page that begins alike.
        replaced = bool(columns[:, 0].all()) if whole else has_tail
        may_grow = (
            not isinstance(node, Root)
            and not node.children
            and len(node.edge) <= _MAX_GROWING_BYTES
            and (node.tail is None or replaced)
        )
        if not may_grow:
            leaf = Node(node, edge, node.end, columns.copy())
            if node.children:
                node.children[edge[:4]] = leaf
            else:
                node.children = {edge[:4]: leaf}
            self.evictor.add_leaf(leaf)
            self.residency.account(leaf)
            self.residency.version += 1
            if whole:
                if self.residency.listener is not None:
                    first = leaf.start // self.tokens_per_page
                    self.residency.listener.pages_stored(leaf, first, columns)
                self.evictor.drop_covered_tail(node)
            return leaf
        if node.tail is not None:
            # Its tokens begin the next page, whole or partial, that comes now.
            self.evictor.drop_tail(node, node.tail)
        node.edge += edge
        node.end += len(edge) // 4
        if whole and self.residency.listener is not None:
            first = node.start // self.tokens_per_page + node.pages.shape[1]
            self.residency.listener.pages_stored(node, first, columns)
        node.pages = np.concatenate((node.pages, columns), axis=1)
        self.residency.account(node)
        self.residency.version += 1
        self.evictor.touch_leaf(node)
        return node

    def _give_tail(self, node: Node, position: int, tail: Int32s) -> Node:
        """Publishes a page that is begun at the end of the tokens published before.

        Returns:
            The node in which the last of them lies.
        """
        page = self.tokens_per_page
        if find_partial_page(node, position, page) is not None:
            self.pages.put(tail[:, None])
            return node
        if node.pages.shape[1] > position // page - node.start // page:
            # The node has the whole page, but not in every group: both are needed.
            node = self._split(node, position)
        if node.tail is not None:
            self.evictor.drop_tail(node, node.tail)
        node.tail = tail.copy()
        node.tail_end = position
        if self.residency.listener is not None:
            self.residency.listener.begun_stored(node, node.tail)
        self.residency.account(node)
        self.residency.version += 1
        # Shorter beginnings of this page are in it too.
        above = node.parent
        while above is not None and above.end > position - position % page:
            self.evictor.drop_covered_tail(above)
            above = above.parent
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Splits a node; it stays the lower part, and the new upper one is returned.

        The page in which `at` lies goes to the lower part, and so does a hold that
        needs this page.
        """
        page = self.tokens_per_page
        parent = node.parent
        assert parent is not None
        # Where nobody needs the lower part, its begun page is there for the upper one.
        leave_tail = node.tail_end <= at or (
            self._is_recurrent and self.residency.needed(node) <= at
        )
        cut, keep = 4 * (at - node.start), at // page - node.start // page
        upper = Node(parent, node.edge[:cut], node.start, node.pages[:, :keep].copy())
        parent.children[upper.edge[:4]] = upper
        node.parent = upper
        node.edge = node.edge[cut:]
        node.start = at
        node.pages = node.pages[:, keep:].copy()
        upper.children = {node.edge[:4]: node}
        if node.digests:
            upper.digests = node.digests[:keep]
            node.digests = node.digests[keep:]
        if node.tail is not None and leave_tail:
            self._leave_tail(node, upper, node.tail)
        if node.snapshots:
            index = bisect.bisect_right(node.snapshots, at, key=_POSITION)
            upper.snapshots = node.snapshots[:index] or NO_SNAPSHOTS
            node.snapshots = node.snapshots[index:] or NO_SNAPSHOTS
            for snapshot in upper.snapshots:
                snapshot.node = upper
                upper.residents += snapshot.is_resident
            node.residents -= upper.residents
        if node.holds:
            self._split_holds(node, upper, at)
        upper.locked = int(node.is_pinned)
        upper.live = int(node.is_live)
        self.residency.account(node)
        self.residency.account(upper)
        return upper

    def _leave_tail(self, node: Node, upper: Node, tail: Int32s) -> None:
        """Moves the begun page of a node to the upper part that was split off."""
        listener, end = self.residency.listener, node.tail_end
        if listener is not None and end > upper.end:
            listener.begun_removed(node, tail)
        node.tail = None
        upper.tail, upper.tail_end = tail, min(end, upper.end)
        if listener is not None and end > upper.end:
            listener.begun_stored(upper, tail)

    def _split_holds(self, node: Node, upper: Node, at: int) -> None:
        page = self.tokens_per_page
        holds = node.holds
        node.holds = NO_HOLDS
        for hold in holds:
            end_of_page = -(-hold.position // page) * page
            if hold.position > at:
                node.holds = [*node.holds, hold]
            elif (
                end_of_page > at
                and self.pages.num_groups
                and not (upper.tail is not None and hold.position <= upper.tail_end)
            ):
                hold.position = at + 1
                node.holds = [*node.holds, hold]
            else:
                hold.node = upper
                upper.holds = [*upper.holds, hold]
