"""A small prefix tree for the tests of policies, and requests served one at a time.

A prompt is a tuple of segments, each a name and a number of tokens; two prompts are
equal as far as their segments are.
"""

import math
from collections import deque
from collections.abc import Iterator
from typing import Any

from jaxcache.policies.policy import Arrival, Policy
from jaxcache.prefixes.nodes import NO_ROW, Snapshot

PAGE = 16

type Segments = tuple[tuple[str, int], ...]


class Node:
    """One segment below its parent."""

    def __init__(self, parent: "Node | None", name: str, tokens: int) -> None:
        self.parent = parent
        self.name = name
        self.start: int = parent.stop if parent else 0
        self.stop: int = self.start + tokens
        self.children: dict[str, Node] = {}
        self.snapshots: list[Snapshot] = []
        self.residents = 0  # on it and below
        self.tracked = 0  # the same with ghosts
        self.pages = 0

    def count_pages(self) -> int:
        """Columns of pages that end in it, or hold its deepest snapshot."""
        own = [each.position for each in self.snapshots if each.row != NO_ROW]
        if not self.residents:
            return 0
        if self.residents > len(own):
            return self.stop // PAGE - self.start // PAGE
        return math.ceil(max(own) / PAGE) - self.start // PAGE

    def up(self) -> "Iterator[Node]":
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class FakeSnapshot(Snapshot):
    """A snapshot on a node of this tree."""

    node: Any

    def __init__(self, node: Any, position: int, kind: str, row: int) -> None:
        super().__init__(node, position, row, kind)


def _node(snapshot: Snapshot) -> Node:
    assert isinstance(snapshot, FakeSnapshot)
    node: Node = snapshot.node
    return node


class FakeTree:
    """Counts rows and pages, and answers what a policy asks."""

    def __init__(self) -> None:
        self.root = Node(None, "", 0)
        self.rows = self.pages = 0

    def grow(self, segments: Segments) -> list[Node]:
        path, node = [], self.root
        for name, tokens in segments:
            if name not in node.children:
                node.children[name] = Node(node, name, tokens)
            node = node.children[name]
            path.append(node)
        return path

    def look_up(
        self, segments: Segments, limit: int
    ) -> tuple["Snapshot | None", "Snapshot | None", int]:
        """Returns the deepest resident, the deepest of any sort, the known tokens."""
        hit = credited = None
        matched = 0
        node: Node | None = self.root
        for name, _ in segments:
            node = node.children.get(name) if node else None
            if node is None or not node.tracked:
                break
            for snapshot in sorted(node.snapshots, key=lambda each: each.position):
                matched = max(matched, snapshot.position)
                if snapshot.position <= limit:
                    credited = snapshot
                    hit = snapshot if snapshot.row != NO_ROW else hit
            if node.tracked > len(node.snapshots):
                matched = node.stop
        return hit, credited, min(matched, limit)

    def add(self, node: Node, position: int, kind: str, row: int) -> FakeSnapshot:
        snapshot = FakeSnapshot(node, position, kind, NO_ROW)
        node.snapshots.append(snapshot)
        for each in node.up():
            each.tracked += 1
        if row != NO_ROW:
            self.set_row(snapshot, row)
        return snapshot

    def set_row(self, snapshot: Snapshot, row: int) -> None:
        change = (row != NO_ROW) - (snapshot.row != NO_ROW)
        snapshot.row = row
        self.rows += change
        for node in _node(snapshot).up():
            node.residents += change
            pages = node.count_pages()
            self.pages += pages - node.pages
            node.pages = pages

    def forget(self, snapshot: FakeSnapshot) -> None:
        snapshot.node.snapshots.remove(snapshot)
        for node in _node(snapshot).up():
            node.tracked -= 1

    def shallower(self, snapshot: Snapshot) -> "Snapshot | None":
        for node in _node(snapshot).up():
            above = [
                each
                for each in node.snapshots
                if each.row != NO_ROW and each.position < snapshot.position
            ]
            if above:
                return max(above, key=lambda each: each.position)
        return None

    def pages_freed(self, snapshot: Snapshot) -> int:
        assert isinstance(snapshot, FakeSnapshot)
        before = self.pages
        self.set_row(snapshot, NO_ROW)
        freed = before - self.pages
        self.set_row(snapshot, 0)
        return freed


class Server[Bundle]:
    """Serves requests with a policy; the tokens reused are `reused` of `asked`.

    Up to `in_flight` requests run at once; each has its rows and pages at its start.
    """

    def __init__(
        self, policy: Policy[Bundle], rows: int, pages: int, in_flight: int = 1
    ) -> None:
        self.policy = policy
        self.tree = FakeTree()
        self.num_rows, self.num_pages = rows, pages
        self.reused = self.asked = self.evictions = 0
        self.log: list[tuple[int, int]] = []
        self._in_flight = in_flight
        self._running: deque[tuple[Bundle, list[Node], int, int, int]] = deque()
        self._live_rows = self._live_pages = 0

    @property
    def hit(self) -> float:
        return self.reused / self.asked

    def serve(self, prompt: Segments, response: Segments) -> int:
        """Serves one request and returns how many tokens it reused."""
        policy, tree = self.policy, self.tree
        length = sum(tokens for _, tokens in prompt)
        response_tokens = sum(tokens for _, tokens in response)
        hit, credited, matched = tree.look_up(prompt, length - 1)
        reused = hit.position if hit else 0
        self.asked += length
        self.reused += reused
        arrival = Arrival(length, reused, matched, credited)
        bundle = policy.arrive(arrival)
        if hit:
            hit.holds += 1
            policy.used(bundle, hit)
        path = tree.grow((*prompt, *response))
        free = self.num_rows - tree.rows - self._live_rows - 1
        wishes = policy.wishes(bundle, arrival, free)
        end = length + response_tokens - 1
        pages = math.ceil(end / PAGE) - reused // PAGE
        self._make_room(1 + sum(wish.worth_a_row for wish in wishes), pages)
        if hit:
            hit.holds -= 1
        for wish in wishes:
            self._put(bundle, path, wish.position, wish.kind, wish.worth_a_row)
        self._live_rows += 1
        self._live_pages += pages
        self._running.append((bundle, path, end, response_tokens, pages))
        if len(self._running) >= self._in_flight:
            self._end()
        for ghost in policy.expired():
            assert isinstance(ghost, FakeSnapshot)
            tree.forget(ghost)
        return reused

    def _end(self) -> None:
        bundle, path, end, response_tokens, pages = self._running.popleft()
        self._live_rows -= 1
        self._live_pages -= pages
        free = self.num_rows - self.tree.rows - self._live_rows - 1
        keep = self.policy.wants_response(bundle, end, response_tokens, free)
        self._put(bundle, path, end, "response", keep)
        self._make_room(0, 0)

    def _put(
        self, bundle: Bundle, path: list[Node], position: int, kind: str, keep: bool
    ) -> None:
        node = next(node for node in path if position <= node.stop)
        for snapshot in node.snapshots:
            if snapshot.position == position:
                if keep and snapshot.row == NO_ROW:
                    self.tree.set_row(snapshot, 0)
                    self.policy.revived(bundle, snapshot)
                return
        snapshot = self.tree.add(node, position, kind, 0 if keep else NO_ROW)
        self.policy.added(bundle, snapshot)

    def _make_room(self, rows: int, pages: int) -> None:
        tree = self.tree
        while True:
            needs_pages = tree.pages + self._live_pages + pages > self.num_pages
            if not needs_pages and tree.rows + self._live_rows + rows <= self.num_rows:
                return
            victim = self.policy.victim(tree, needs_pages)
            if victim is None:
                return
            assert isinstance(victim, FakeSnapshot)
            assert victim.row != NO_ROW
            assert not victim.holds
            shallower = tree.shallower(victim)
            tree.set_row(victim, NO_ROW)
            self.policy.evicted(victim, shallower)
            self.evictions += 1
            self.log.append((victim.position, len(self.log)))
