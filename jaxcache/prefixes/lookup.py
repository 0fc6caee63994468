"""Lookup: the longest prefix that can be reused, and why not more.

A prefix of n tokens can be reused where all of this holds: its tokens are known; with
recurrent layers a snapshot lies exactly at n; every attention group has the pages that
a query at position n still sees. Candidates are tried from the longest, so what one
group refuses is looked for again in all of them at the next shorter one.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxcache.layouts import CacheLayout, Retention
from jaxcache.prefixes.nodes import Int32s, Node, Snapshot, find_partial_page
from jaxcache.prefixes.tree import PrefixTree


class Lookup(NamedTuple):
    """What a request reuses, and why not more.

    Attributes:
        reused_tokens: Tokens that need not be computed.
        matched_tokens: Tokens of the prompt that the tree knows, all but the last at
            most.
        prompt_tokens: Length of the prompt.
        usable_tokens: For each attention group the longest prefix that its pages cover.
        snapshot_position: Position of the deepest snapshot among the tokens matched; 0
            if there is none, `None` in a model without recurrent layers.
        looked_up: False where the request wanted no reuse.
    """

    reused_tokens: int
    matched_tokens: int
    prompt_tokens: int
    usable_tokens: tuple[int, ...]
    snapshot_position: int | None
    looked_up: bool

    @property
    def why(self) -> str:
        """Why no more tokens are reused, in a sentence."""
        if not self.looked_up:
            return "reuse was not wanted"
        limit = self.prompt_tokens - 1
        reused, matched = self.reused_tokens, self.matched_tokens
        if reused == limit:
            return f"all {limit} tokens before the last one are reused"
        if reused == matched:
            return f"the tree knows {matched} of the {limit} tokens before the last one"
        known = f"of the {matched} tokens that the tree knows"
        if self.snapshot_position == 0:
            return f"{known} no snapshot was kept"
        if self.snapshot_position == reused:
            return f"the last snapshot {known} is at {reused}"
        for group, usable in enumerate(self.usable_tokens):
            if usable < matched and usable < (self.snapshot_position or matched):
                return f"attention group {group} has the pages of {usable} {known}"
        return (
            f"the begun page at {self.snapshot_position or matched} is not resident or "
            f"cannot be copied, so {reused} {known} are reused"
        )


class Found(NamedTuple):
    """A reusable prefix in the tree.

    Attributes:
        lookup: The numbers.
        snapshot: The snapshot to start from, if the model needs one.
        credited: The deepest snapshot among the tokens matched, ghosts included: where
            the prompt would have started from if nothing had ever been evicted.
        node: A node on the prefix or below it that must be held; `None` if nothing is
            reused.
        held: The position to hold there.
        source: `i32[groups]`, the page with the tokens that begin a page, to be copied;
            `None` where the prefix ends with a page.
    """

    lookup: Lookup
    snapshot: Snapshot | None
    credited: Snapshot | None
    node: Node | None
    held: int
    source: Int32s | None


class Finder:
    """Finds the longest reusable prefix of a prompt."""

    def __init__(self, layout: CacheLayout, tree: PrefixTree) -> None:
        self._tree = tree
        self._retentions = [group.retention for group in layout.page_groups]
        self._is_recurrent = layout.has_recurrent

    def nothing(
        self, prompt_tokens: int, *, looked_up: bool, matched: int = 0
    ) -> Found:
        """Returns that nothing is reused."""
        lookup = Lookup(
            0,
            matched,
            prompt_tokens,
            (0,) * len(self._retentions),
            0 if self._is_recurrent else None,
            looked_up,
        )
        return Found(lookup, None, None, None, 0, None)

    def find(self, scope: object, data: bytes, *, copies: bool) -> Found:
        """Looks a prompt up. Changes nothing.

        Args:
            scope: Only prefixes of the same scope are looked at.
            data: The prompt, as the bytes of int32.
            copies: Whether the prefix may end inside a page, which is copied then.
        """
        length = len(data) // 4
        node, matched = self._tree.match(scope, data, length - 1)
        if node is None:
            return self.nothing(length, looked_up=True)
        cover = _Cover(self._tree, node, matched, self._retentions, copies)
        deepest: int | None = None
        snapshot: Snapshot | None = None
        credited: Snapshot | None = None
        place: _Place | None = None
        if self._is_recurrent:
            deepest = 0
            above: Node | None = node
            while above is not None and place is None:
                for snapshot in reversed(above.snapshots):
                    if snapshot.position > matched:
                        continue
                    if credited is None:
                        credited = snapshot
                    if not snapshot.is_resident:
                        continue
                    deepest = deepest or snapshot.position
                    place = cover.place(above, snapshot.position)
                    if place is not None:
                        break
                above = above.parent
        else:
            place = cover.deepest()
        usable = cover.usable()
        if place is None:
            lookup = Lookup(0, matched, length, usable, deepest, True)
            return Found(lookup, None, credited, None, 0, None)
        lookup = Lookup(place.position, matched, length, usable, deepest, True)
        return Found(lookup, snapshot, credited, place.node, place.held, place.source)


class _Place(NamedTuple):
    """A position up to which all pages are there; the rest as in `Found`."""

    position: int
    node: Node
    held: int
    source: Int32s | None


class _Cover:
    """Which positions on one path have their pages, in every attention group."""

    def __init__(
        self,
        tree: PrefixTree,
        node: Node,
        matched: int,
        retentions: list[Retention],
        copies: bool,
    ) -> None:
        self._tree = tree
        self._node = node
        self._matched = matched
        self._retentions = retentions
        self._page = tree.tokens_per_page
        self._copies = copies
        self._missing: npt.NDArray[np.int64] | None = None
        self._columns = _columns(node, self._page)
        if tree.residency.has_holes:
            columns = np.concatenate([n.pages for n in node.path()], axis=1)
            missing = np.zeros((len(columns), columns.shape[1] + 1), np.int64)
            np.cumsum(columns == 0, axis=1, out=missing[:, 1:])
            self._missing = missing

    def place(self, node: Node, position: int) -> _Place | None:
        """Returns how to reuse the tokens before `position`, which lies in `node`."""
        if not self._has_whole_pages(position):
            return None
        if not self._retentions or position % self._page == 0:
            return _Place(position, node, position, None)
        if not self._copies:
            return None
        found = find_partial_page(node, position, self._page)
        if found is None:
            return None
        owner, source = found
        if owner is node:
            return _Place(position, node, position, source)
        return _Place(position, owner, owner.start + 1, source)

    def deepest(self) -> _Place | None:
        """Returns the longest prefix that has its pages, without recurrent layers."""
        whole = self._matched - self._matched % self._page
        # Inside the last page the nodes on the path may have begun pages of their own.
        above: Node | None = self._node
        position = self._matched
        while above is not None and position > whole:
            place = self.place(above, position)
            if place is None and whole < above.tail_end < position:
                place = self.place(above, above.tail_end)
            if place is not None:
                return place
            position, above = above.start, above.parent
        for position in range(whole, 0, -self._page):
            node = self._tree.node_at(self._node, position)
            place = self.place(node, position)
            if place is not None:
                return place
        return None

    def usable(self) -> tuple[int, ...]:
        """Returns for each group the longest prefix that its pages cover."""
        whole = min(self._matched // self._page, self._columns) * self._page
        longest = whole
        if whole + self._page > self._matched > whole:
            found = find_partial_page(self._node, self._matched, self._page)
            longest = self._matched if found is not None else whole
        if self._missing is None:
            return (longest,) * len(self._retentions)
        usable = []
        for group in range(len(self._retentions)):
            position = whole
            while position and not self._group_has(group, position):
                position -= self._page
            usable.append(longest if position == whole else position)
        return tuple(usable)

    def _has_whole_pages(self, position: int) -> bool:
        if position // self._page > self._columns:
            return False
        if self._missing is None:
            return True
        groups = range(len(self._retentions))
        return all(self._group_has(group, position) for group in groups)

    def _group_has(self, group: int, position: int) -> bool:
        """Whether all whole pages before a position are there that it still sees."""
        assert self._missing is not None
        missing = self._missing[group]
        whole = position // self._page
        stale = self._retentions[group].stale_pages(position, self._page)
        start, stop = min(stale.start, whole), min(stale.stop, whole)
        if len(stale) == 0:
            start = stop = 0
        return bool(missing[whole] - (missing[stop] - missing[start]) == 0)


def _columns(node: Node, page: int) -> int:
    """Returns how many pages the path to a node has, from its beginning on."""
    above: Node | None = node
    while above is not None:
        if count := above.pages.shape[1]:
            return above.start // page + int(count)
        above = above.parent
    return 0
