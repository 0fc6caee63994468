"""The stream of events of one manager: it listens to the tree, and names what it hears.

A stream begins with `AllCleared` and all that is resident, and goes on with what
changes. Events wait in it until they are taken. If nobody takes them, all are dropped
beyond a limit, and the next batch begins anew: a follower that sleeps costs no memory
and misses nothing.
"""

import time

import numpy as np

from jaxcache.events.hashing import (
    chain,
    chained,
    number,
    numbers,
    plain_scope,
    root_digest,
)
from jaxcache.events.records import (
    FULL,
    WINDOW,
    AllCleared,
    Batch,
    BegunStored,
    CacheShape,
    Event,
    Group,
    PagesRemoved,
    PagesStored,
    SnapshotRemoved,
    SnapshotStored,
    Tokens,
)
from jaxcache.layouts import NULL_SLOT, CacheLayout, Window
from jaxcache.layouts.arguments import integer
from jaxcache.prefixes.nodes import NO_DIGESTS, Int32s, Node, Root, Snapshot
from jaxcache.prefixes.residency import Residency

MAX_PENDING = 100_000


def describe(layout: CacheLayout, *, copies: bool) -> CacheShape:
    """Returns the shape of a cache.

    Args:
        layout: Its layout.
        copies: Whether its steps can copy begun pages.
    """
    groups = [
        Group(WINDOW, group.retention.window, group.retention.sink_tokens)
        if isinstance(group.retention, Window)
        else Group(FULL)
        for group in layout.page_groups
    ]
    return CacheShape(
        layout.tokens_per_page, tuple(groups), layout.has_recurrent, copies
    )


class EventStream:
    """Events of one manager, which `CacheManager.listen` makes.

    Attributes:
        shape: What a mirror must know of the cache.
        rank: Which of several data-parallel caches it is.
        num_dropped: Events that were dropped because nobody took them.
    """

    def __init__(
        self,
        shape: CacheShape,
        residency: Residency,
        *,
        rank: int = 0,
        max_pending: int = MAX_PENDING,
    ) -> None:
        """Listens to a tree from now on.

        Args:
            shape: Of the cache.
            residency: Of the tree.
            rank: Which of several data-parallel caches it is.
            max_pending: Events that may wait to be taken.

        Raises:
            ValueError: if another stream listens, or an argument is wrong.
        """
        if residency.listener is not None:
            raise ValueError(
                f"{residency.listener!r} listens already; close it first, or call its "
                f"restate for one more follower"
            )
        self.shape = shape
        self.rank = integer("rank", rank, 0)
        self.num_dropped = 0
        self._residency = residency
        self._max_pending = integer("max_pending", max_pending, 1)
        self._page = shape.tokens_per_page
        self._kinds = [(group.kind, group.window) for group in shape.groups]
        self._sequence = 0
        self._pending: list[Event] = []
        # Whether the next batch tells everything anew, so that changes are not kept.
        self._is_anew = True
        residency.listener = self

    # -- for those who follow ----------------------------------------------------------

    def take(self) -> Batch | None:
        """Takes the events since the last call; `None` if there are none."""
        if self._is_anew:
            self._tell_all()
        if not self._pending:
            return None
        events, self._pending = self._pending, []
        batch = Batch(
            sequence=self._sequence,
            timestamp=time.time(),
            rank=self.rank,
            events=events,
        )
        self._sequence += 1
        return batch

    def restate(self) -> None:
        """Lets the next batch tell everything anew, for followers that missed some."""
        self._pending.clear()
        self._is_anew = True

    def close(self) -> None:
        """Listens no longer. Does nothing the second time."""
        if self._residency.listener is self:
            self._residency.listener = None
        self._pending.clear()

    def _tell_all(self) -> None:
        self._is_anew = False
        self._pending = [AllCleared(self.shape)]
        limit, self._max_pending = self._max_pending, 1 << 62
        for root in self._residency.roots.values():
            for node in root.walk():
                self.pages_stored(node, node.start // self._page, node.pages)
                if node.tail is not None:
                    self.begun_stored(node, node.tail)
                for snapshot in node.snapshots:
                    if snapshot.is_resident:
                        self.snapshot_stored(snapshot)
        self._max_pending = limit

    def _tell(self, event: Event) -> None:
        if len(self._pending) >= self._max_pending:
            self.num_dropped += len(self._pending) + 1
            self.restate()
        else:
            self._pending.append(event)

    # -- what the tree tells -----------------------------------------------------------

    def pages_stored(self, node: Node, first: int, columns: Int32s) -> None:
        """Notes whole pages that a node has got."""
        if self._is_anew or not columns.size:
            return
        digests = self._digests(node, first, columns.shape[1])
        hashes = numbers(digests)
        begin = first * self._page
        tokens = _tokens(node, begin, begin + len(hashes) * self._page)
        parent = number(self._digest(node, first)) if first else None
        scope = plain_scope(_root(node).scope)
        for group, (kind, window) in enumerate(self._kinds):
            for start, stop in _runs(columns[group]):
                is_all = stop - start == len(hashes)
                cut = tokens[4 * start * self._page : 4 * stop * self._page]
                self._tell(
                    PagesStored(
                        hashes=hashes if is_all else hashes[start:stop],
                        parent=hashes[start - 1] if start else parent,
                        tokens=Tokens(cut),
                        tokens_per_page=self._page,
                        group=group,
                        kind=kind,
                        window=window,
                        position=begin + start * self._page,
                        scope=scope,
                    )
                )

    def pages_removed(self, node: Node, first: int, columns: Int32s) -> None:
        """Notes whole pages that a node loses."""
        if self._is_anew or not columns.size:
            return
        hashes = numbers(self._digests(node, first, columns.shape[1]))
        for group in range(len(self._kinds)):
            gone = [
                each
                for start, stop in _runs(columns[group])
                for each in hashes[start:stop]
            ]
            if gone:
                self._tell(PagesRemoved(hashes=gone, group=group))

    def begun_stored(self, node: Node, tail: Int32s) -> None:
        """Notes a begun page that a node has got."""
        if self._is_anew:
            return
        digest, parent, tokens = self._position(node, node.tail_end)
        scope = plain_scope(_root(node).scope)
        for group, (kind, _) in enumerate(self._kinds):
            if tail[group] != NULL_SLOT:
                self._tell(
                    BegunStored(
                        hash=number(digest),
                        parent=parent,
                        tokens=Tokens(tokens),
                        group=group,
                        kind=kind,
                        position=node.tail_end - len(tokens) // 4,
                        scope=scope,
                    )
                )

    def begun_removed(self, node: Node, tail: Int32s) -> None:
        """Notes a begun page that a node loses."""
        if self._is_anew:
            return
        digest, _, _ = self._position(node, node.tail_end)
        for group in range(len(self._kinds)):
            if tail[group] != NULL_SLOT:
                self._tell(PagesRemoved(hashes=[number(digest)], group=group))

    def snapshot_stored(self, snapshot: Snapshot) -> None:
        """Notes a snapshot that has got a row."""
        if self._is_anew:
            return
        node = snapshot.node
        assert node is not None
        digest, parent, _ = self._position(node, snapshot.position)
        self._tell(
            SnapshotStored(
                hash=number(digest),
                parent=parent,
                position=snapshot.position,
                reason=snapshot.kind,
                scope=plain_scope(_root(node).scope),
            )
        )

    def snapshot_removed(self, snapshot: Snapshot) -> None:
        """Notes a snapshot that has lost its row."""
        if self._is_anew:
            return
        node = snapshot.node
        assert node is not None
        digest, parent, _ = self._position(node, snapshot.position)
        self._tell(
            SnapshotRemoved(
                hash=number(digest),
                parent=parent,
                position=snapshot.position,
                scope=plain_scope(_root(node).scope),
            )
        )

    # -- names -------------------------------------------------------------------------

    def _position(self, node: Node, position: int) -> tuple[bytes, int | None, bytes]:
        """Returns the digest of a position, the whole page before it, the tokens since.

        Args:
            node: A node at or below the position.
            position: The position.
        """
        pages = position // self._page
        digest = self._digest(node, pages)
        parent = number(digest) if pages else None
        tokens = _tokens(node, pages * self._page, position)
        return chained(digest, tokens) if tokens else digest, parent, tokens

    def _digest(self, node: Node, pages: int) -> bytes:
        """Returns the digest of the first `pages` whole pages on the path to a node."""
        if not pages:
            return root_digest(_root(node).scope)
        owner: Node | None = node
        while owner is not None and owner.start >= pages * self._page:
            owner = owner.parent
        assert owner is not None
        return self._digests(owner, pages - 1, 1)[0]

    def _digests(self, node: Node, first: int, count: int) -> list[bytes]:
        """Returns the digests of `count` whole pages that end in a node.

        Args:
            node: The node.
            first: Which page of the whole prefix the first one is.
            count: How many.
        """
        base = node.start // self._page
        have, stop = base + len(node.digests), first + count
        if have < stop:
            parent = node.digests[-1] if node.digests else self._digest(node, base)
            tokens = _tokens(node, have * self._page, stop * self._page)
            if node.digests is NO_DIGESTS:
                node.digests = []
            node.digests += chain(parent, tokens, 4 * self._page)
        return node.digests[first - base : stop - base]


def _root(node: Node) -> Root:
    while node.parent is not None:
        node = node.parent
    assert isinstance(node, Root)
    return node


def _tokens(node: Node, start: int, stop: int) -> bytes:
    """Returns tokens on the path to a node, as the bytes of int32."""
    parts = []
    owner: Node | None = node
    while stop > start:
        while owner is not None and owner.start >= stop:
            owner = owner.parent
        assert owner is not None
        begin = max(start, owner.start)
        parts.append(owner.edge[4 * (begin - owner.start) : 4 * (stop - owner.start)])
        stop = begin
    return parts[0] if len(parts) == 1 else b"".join(reversed(parts))


def _runs(slots: Int32s) -> list[tuple[int, int]]:
    """Returns where pages are, as half-open ranges."""
    present = slots != NULL_SLOT
    if present.all():
        return [(0, len(slots))]
    edges = np.flatnonzero(np.diff(present, prepend=False, append=False))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
