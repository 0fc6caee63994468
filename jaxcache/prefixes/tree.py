"""The prefix tree: which tokens are known, on which pages, with snapshots where.

It compares token ids, never hashes of them, and branches at any token. A lookup changes
nothing; nodes are split when something is published that leaves an edge in its middle.
"""

import bisect
import operator

import numpy as np

from jaxcache.layouts import CacheLayout, CacheSize, Window
from jaxcache.prefixes.eviction import Eviction
from jaxcache.prefixes.nodes import (
    NO_HOLDS,
    NO_SNAPSHOTS,
    Int32s,
    Node,
    Root,
    Snapshot,
    common_tokens,
    find_partial_page,
)
from jaxcache.prefixes.residency import Residency
from jaxcache.prefixes.slots import PagePools, RowPool

# A leaf grows in place up to this many bytes, so that prefill in small chunks makes few
# nodes; beyond it copying the edge at each growth would cost more than the nodes.
_MAX_GROWING_BYTES = 4 * 2048

_POSITION = operator.attrgetter("position")


class PrefixTree:
    """Publishes and finds prefixes.

    Attributes:
        residency: Holds on the tree and eviction from it.
        pages: The page pools; the tree gives back what it owns twice.
        tokens_per_page: Tokens of one page.
    """

    def __init__(
        self,
        layout: CacheLayout,
        size: CacheSize,
        pages: PagePools,
        rows: RowPool,
        eviction: Eviction,
    ) -> None:
        self.pages = pages
        self.tokens_per_page = size.tokens_per_page
        # Only a window lets pages of one group go before those of another.
        self._has_windows = any(
            isinstance(group.retention, Window) for group in layout.page_groups
        )
        self.residency = Residency(
            pages, rows, eviction, size.tokens_per_page, layout.has_recurrent
        )

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
                    self._adopt(node, pos // page - node.start // page, mine)
                    adopted += mine.shape[1]
                pos, at = stop, at + 4 * count
                if at < size and count < inside:
                    node = self._split(node, pos)
            if tailed is not None and pos // page > tailed.end // page:
                self.residency.drop_covered_tail(
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
        """Publishes a snapshot.

        Args:
            hint: A node at or below the position.
            position: Tokens that the row has absorbed.
            row: The row. The tree owns it from now on.
            kind: Why it was taken.

        Returns:
            The snapshot; `None` if there is one at this position: the row stays the
            caller's.
        """
        node = self.node_at(hint, position)
        index = bisect.bisect_left(node.snapshots, position, key=_POSITION)
        if index < len(node.snapshots) and node.snapshots[index].position == position:
            return None
        snapshot = Snapshot(node, position, row, kind)
        self.residency.add_snapshot(node, index, snapshot)
        return snapshot

    def snapshot_at(self, hint: Node, position: int) -> Snapshot | None:
        """Returns the snapshot at exactly a position on the path to `hint`."""
        node = self.node_at(hint, position)
        index = bisect.bisect_left(node.snapshots, position, key=_POSITION)
        if index < len(node.snapshots) and node.snapshots[index].position == position:
            return node.snapshots[index]
        return None

    # -- parts of publishing -----------------------------------------------------------

    def _adopt(self, node: Node, index: int, mine: Int32s) -> None:
        """Gives pages back that the tree has from `index` of `node` on; fills holes."""
        theirs = node.pages[:, index : index + mine.shape[1]]
        given = mine.copy()
        if self.residency.has_holes:
            missing = (theirs == 0) & (given != 0)
            if missing.any():
                theirs[missing] = given[missing]
                given[missing] = 0
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
            self.residency.add_leaf(leaf)
            if whole:
                self.residency.drop_covered_tail(node)
            return leaf
        if node.tail is not None:
            # Its tokens begin the next page, whole or partial, that comes now.
            self.pages.put(node.tail[:, None])
            node.tail = None
        node.edge += edge
        node.end += len(edge) // 4
        node.pages = np.concatenate((node.pages, columns), axis=1)
        residency = self.residency
        residency.account(node)
        residency.eviction.leaves.touch(node)
        residency.version += 1
        return node

    def _give_tail(self, node: Node, position: int, tail: Int32s) -> Node:
        """Publishes a page that is begun at the end of the tokens published before."""
        page = self.tokens_per_page
        if find_partial_page(node, position, page) is not None:
            self.pages.put(tail[:, None])
            return node
        if node.end > position:
            node = self._split(node, position)
        if node.tail is not None:
            self.pages.put(node.tail[:, None])
        node.tail = tail.copy()
        self.residency.account(node)
        self.residency.version += 1
        # Shorter beginnings of this page are in it too.
        above = node.parent
        while above is not None and above.end > position - position % page:
            self.residency.drop_covered_tail(above)
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
        cut, keep = 4 * (at - node.start), at // page - node.start // page
        upper = Node(parent, node.edge[:cut], node.start, node.pages[:, :keep].copy())
        parent.children[upper.edge[:4]] = upper
        node.parent = upper
        node.edge = node.edge[cut:]
        node.start = at
        node.pages = node.pages[:, keep:].copy()
        upper.children = {node.edge[:4]: node}
        if node.snapshots:
            index = bisect.bisect_right(node.snapshots, at, key=_POSITION)
            upper.snapshots = node.snapshots[:index] or NO_SNAPSHOTS
            node.snapshots = node.snapshots[index:] or NO_SNAPSHOTS
            for snapshot in upper.snapshots:
                snapshot.node = upper
        if node.holds:
            self._split_holds(node, upper, at)
        upper.locked = int(node.is_pinned)
        self.residency.account(node)
        self.residency.account(upper)
        return upper

    def _split_holds(self, node: Node, upper: Node, at: int) -> None:
        page = self.tokens_per_page
        holds = node.holds
        node.holds = NO_HOLDS
        for hold in holds:
            end_of_page = -(-hold.position // page) * page
            if hold.position > at:
                node.holds = [*node.holds, hold]
            elif end_of_page > at and self.pages.num_groups:
                hold.position = at + 1
                node.holds = [*node.holds, hold]
            else:
                hold.node = upper
                upper.holds = [*upper.holds, hold]
