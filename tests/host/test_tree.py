"""The prefix tree against a set of prefixes that was published."""

import random
from typing import NamedTuple

import numpy as np
import pytest

from jaxcache.layouts import CacheLayout, CacheSize, Window, pages_for
from jaxcache.policies.lru import Lru
from jaxcache.policies.policy import Arrival
from jaxcache.prefixes.lookup import Finder, Found
from jaxcache.prefixes.nodes import Hold, Int32s, Node, Snapshot
from jaxcache.prefixes.slots import PagePools, RowPool
from jaxcache.prefixes.tree import PrefixTree
from tests.host.caches import KINDS, make_layout
from tests.host.oracle import longest_reusable

PAGE = 4


class Published(NamedTuple):
    """Tokens that were published once; `has_page[group][index]` of whole pages."""

    tokens: tuple[int, ...]
    has_page: list[list[bool]]
    has_tail: bool


class Model:
    """Every prefix ever published, as a list: nothing is evicted here."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self.published: list[Published] = []
        self.snapshots: set[tuple[int, ...]] = set()

    def matched(self, prompt: tuple[int, ...]) -> int:
        return max(
            (_agreeing(p.tokens, prompt[:-1]) for p in self.published), default=0
        )

    def reusable(self, prompt: tuple[int, ...]) -> int:
        for n in range(self.matched(prompt), 0, -1):
            prefix = prompt[:n]
            if self.layout.has_recurrent and prefix not in self.snapshots:
                continue
            if self._has_whole_pages(prefix) and self._has_begun_page(prefix):
                return n
        return 0

    def _has_whole_pages(self, prefix: tuple[int, ...]) -> bool:
        for group in self.layout.page_groups:
            stale = group.retention.stale_pages(len(prefix), PAGE)
            for index in range(len(prefix) // PAGE):
                until = prefix[: (index + 1) * PAGE]
                if index not in stale and not self._has(until, group.group_id):
                    return False
        return True

    def _has(self, until: tuple[int, ...], group: int) -> bool:
        index = len(until) // PAGE - 1
        return any(
            p.tokens[: len(until)] == until and p.has_page[group][index]
            for p in self.published
            if len(p.tokens) >= len(until)
        )

    def _has_begun_page(self, prefix: tuple[int, ...]) -> bool:
        n, groups = len(prefix), range(self.layout.num_page_groups)
        if n % PAGE == 0 or not groups:
            return True
        stop = pages_for(n, PAGE) * PAGE
        for p in self.published:
            if p.tokens[:n] != prefix:
                continue
            if len(p.tokens) < stop:
                if p.has_tail:
                    return True
            elif all(self._has(p.tokens[:stop], group) for group in groups):
                return True
        return False


def _agreeing(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    count = 0
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            break
        count += 1
    return count


class Tree:
    """A prefix tree with a model beside it."""

    def __init__(self, kind: str, num_pages: int = 4000, num_rows: int = 1000) -> None:
        layout = make_layout(kind, PAGE)
        self.layout = layout
        size = CacheSize.create(
            layout,
            num_pages if layout.num_page_groups else 0,
            num_rows if layout.has_recurrent else 0,
            max_seqs=1,
            max_tokens=64,
        )
        self.pages, self.rows = PagePools(size), RowPool(size)
        self.lru = Lru(row_bytes=1, page_bytes=1, tokens_per_page=PAGE)
        self.tree = PrefixTree(layout, size, self.pages, self.rows, self.lru)
        self.finder = Finder(layout, self.tree)
        self.model = Model(layout)
        self.holds: list[Hold] = []
        self.last: Node | None = None

    def has_room(self, columns: int) -> bool:
        residency, groups = self.tree.residency, range(self.pages.num_groups)
        return all(
            self.pages.free(g) + residency.evictable_pages(g) >= columns for g in groups
        ) and (self.rows.free + residency.evictable_rows >= min(2, self.rows.num_rows))

    def find(self, prompt: tuple[int, ...]) -> Found:
        return self.finder.find(None, _bytes(prompt), copies=True)

    def resident_snapshots(self) -> set[tuple[int, ...]]:
        root = self.tree.residency.roots.get(None)
        nodes = [] if root is None else list(root.walk())
        return {
            tuple(t for n in node.path() for t in n.tokens.tolist())[: s.position]
            for node in nodes
            for s in node.snapshots
            if s.is_resident
        }

    def publish(self, tokens: tuple[int, ...], rng: random.Random, holes: bool) -> None:
        """Publishes a sequence, from where a hold ends or from its beginning."""
        groups = self.pages.num_groups
        hint, start = self._begin(tokens, rng)
        stop = len(tokens) // PAGE
        columns = self.pages.take(stop - start // PAGE)
        has_page = [[True] * stop for _ in range(groups)]
        for group in self.layout.page_groups if holes else ():
            if isinstance(group.retention, Window):
                for index in range(start // PAGE, stop):
                    if rng.random() < 0.3:
                        self._drop(columns, group.group_id, index - start // PAGE)
                        has_page[group.group_id][index] = False
        has_tail = bool(len(tokens) % PAGE and groups and rng.random() < 0.5)
        tail = self.pages.take(1)[:, 0] if has_tail else None
        mine = columns.copy()
        node, adopted = self.tree.insert(
            None, hint, start, _bytes(tokens[start:]), columns, tail
        )
        assert node.start < len(tokens) <= node.end
        assert np.array_equal(columns[:, adopted:], mine[:, adopted:])
        self.model.published.append(Published(tokens, has_page, has_tail))
        self.last = node
        if self.layout.has_recurrent:
            for position in rng.sample(range(1, len(tokens) + 1), min(2, len(tokens))):
                self._take_snapshot(node, tokens[:position])

    def _begin(
        self, tokens: tuple[int, ...], rng: random.Random
    ) -> tuple[Node | None, int]:
        """Where publishing may go on: the model's list says which tokens are known."""
        for hold in self.holds:
            path = b"".join(n.edge for n in hold.node.path())[: 4 * hold.position]
            start = hold.position // PAGE * PAGE
            if 0 < start < len(tokens) and rng.random() < 0.7:
                if _bytes(tokens[:start]) == path[: 4 * start]:
                    return hold.node, start
        return None, 0

    def _drop(self, columns: Int32s, group: int, index: int) -> None:
        self.pages._stacks[group][self.pages._tops[group]] = columns[group, index]
        self.pages._tops[group] += 1
        columns[group, index] = 0

    def _take_snapshot(self, node: Node, tokens: tuple[int, ...]) -> None:
        row = self.rows.take()
        snapshot = self.attach(node, len(tokens), row)
        assert (snapshot is None) == (tokens in self.model.snapshots)
        if snapshot is None:
            self.rows.put(row)
        self.model.snapshots.add(tokens)

    def attach(self, node: Node, position: int, row: int) -> Snapshot | None:
        snapshot = self.tree.attach(node, position, row, "test")
        if snapshot is not None:
            tell = self.lru.added if snapshot.record is None else self.lru.revived
            tell(Arrival(1, 0, 0, None), snapshot)
        return snapshot


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_a_lookup_finds_what_a_list_of_all_prefixes_says(
    kind: str, holes: bool, seed: int
) -> None:
    rng = random.Random(f"{kind} {holes} {seed}")
    tree = Tree(kind)
    known: list[tuple[int, ...]] = [()]
    for _ in range(40):
        tokens = _random_tokens(rng, known)
        known.append(tokens)
        tree.publish(tokens, rng, holes)
        for _ in range(4):
            prompt = (*_random_tokens(rng, known), 0)
            found = tree.find(prompt)
            matched = tree.model.matched(prompt)
            if tree.pages.num_groups:
                assert found.lookup.matched_tokens == matched
            else:
                # Tokens that no snapshot needs are forgotten when holds end.
                assert found.lookup.matched_tokens <= matched
            assert found.lookup.reused_tokens == tree.model.reusable(prompt)
            if found.node is not None and len(tree.holds) < 8:
                tree.holds.append(tree.tree.residency.hold(found.node, found.held))
        if tree.holds and rng.random() < 0.3:
            hold = tree.holds.pop(rng.randrange(len(tree.holds)))
            tree.tree.residency.release(hold)


def publish(tree: Tree, tokens: tuple[int, ...], *, tail: bool = False) -> Node:
    columns = tree.pages.take(len(tokens) // PAGE)
    page = tree.pages.take(1)[:, 0] if tail else None
    return tree.tree.insert(None, None, 0, _bytes(tokens), columns, page)[0]


def attach(tree: Tree, node: Node, position: int) -> Snapshot:
    snapshot = tree.attach(node, position, tree.rows.take())
    assert snapshot is not None
    return snapshot


def test_a_begun_page_is_found_where_the_whole_one_lacks_a_group() -> None:
    tree = Tree("two groups")
    columns = tree.pages.take(1)
    tree._drop(columns, 1, 0)
    tree.tree.insert(None, None, 0, _bytes((0, 0, 1, 1)), columns)
    node = publish(tree, (0, 0), tail=True)
    attach(tree, node, 2)
    assert tree.find((0, 0, 1, 1, 1)).lookup.reused_tokens == 2


def test_a_begun_page_serves_no_token_that_it_does_not_hold() -> None:
    """One sequence is published without its begun page, a shorter one with."""
    tree = Tree("hybrid")
    long = publish(tree, (0, 0, 0, 0, 1, 1, 1))
    attach(tree, long, 7)
    short = publish(tree, (0, 0, 0, 0, 1, 1), tail=True)
    attach(tree, short, 6)
    assert tree.find((0, 0, 0, 0, 1, 1, 1, 0)).lookup.reused_tokens == 6


def test_a_begun_page_makes_a_shorter_one_of_the_same_tokens_redundant() -> None:
    tree = Tree("hybrid", num_pages=16)
    attach(tree, publish(tree, (0, 0, 0, 0, 1), tail=True), 5)
    attach(tree, publish(tree, (0, 0, 0, 0, 1, 0), tail=True), 6)
    attach(tree, publish(tree, (0, 0, 0, 0, 1, 1), tail=True), 6)
    # One whole page and two begun ones: the first begun one was replaced.
    assert tree.pages.free(0) == 13
    assert tree.find((0, 0, 0, 0, 1, 2, 2)).lookup.reused_tokens == 5


@pytest.mark.parametrize("by_child", [False, True])
def test_a_page_that_was_promised_is_not_left_to_a_parent_that_is_held(
    by_child: bool,
) -> None:
    """The snapshot at 6 could use the page of its child, if only it were free to go."""
    tree = Tree("hybrid", num_pages=16)
    residency = tree.tree.residency
    node = publish(tree, (0, 0, 0, 0, 1, 1))
    attach(tree, node, 6)
    attach(tree, publish(tree, (0, 0, 0, 0, 1, 1, 1, 1)), 8)
    assert node.end == 8
    other = publish(tree, (0, 0, 0, 0, 1, 1, 0))
    assert other.start == 6
    parent = other.parent
    assert parent is not None
    hold = residency.hold(other, 7) if by_child else residency.hold(parent, 6)
    promised = tree.pages.free_columns + residency.evictable_pages(0)
    tree.tree.evictor.make_room(promised, 0)
    assert tree.pages.free_columns == promised
    assert parent.tail is None
    residency.release(hold)


def test_a_page_that_a_child_leaves_behind_serves_the_snapshot_before_it() -> None:
    tree = Tree("hybrid", num_pages=16)
    node = publish(tree, (0, 0, 0, 0, 1, 1, 1, 1))
    other = publish(tree, (0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0))
    snapshots = [attach(tree, other, 6), attach(tree, other, 12), attach(tree, node, 8)]
    prompt = (0, 0, 0, 0, 1, 1, 2)
    assert tree.find(prompt).lookup.reused_tokens == 6
    free = tree.pages.free(0)
    # First one child goes, then the other but for its first page, then the rest.
    for index, freed, reused in ((1, 2, 6), (2, 2, 6), (0, 4, 0)):
        tree.tree.evictor.evict(snapshots[index])
        assert tree.pages.free(0) - free == freed
        assert tree.find(prompt).lookup.reused_tokens == reused


class Held(NamedTuple):
    """A prefix that is held."""

    hold: Hold
    snapshot: Snapshot | None
    prompt: tuple[int, ...]
    reused: int


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_eviction_frees_all_that_is_counted_and_nothing_that_is_held(
    kind: str, seed: int
) -> None:
    rng = random.Random(f"{kind} {seed}")
    tree = Tree(kind, num_pages=64, num_rows=30)
    residency = tree.tree.residency
    known: list[tuple[int, ...]] = [()]
    held: list[Held] = []
    for _ in range(120):
        need = rng.choice([16, 16, 48])
        if held and not tree.has_room(need):
            _release(tree, held.pop(0))
            continue
        # Whatever the counts promise can be had.
        tree.tree.evictor.make_room(need, min(2, tree.rows.num_rows))
        assert tree.pages.free_columns >= need
        tokens = _random_tokens(rng, known)
        known.append(tokens)
        tree.model.snapshots = tree.resident_snapshots()
        tree.publish(tokens, rng, holes=kind == "two groups")
        assert tree.last is not None
        tree.tree.evictor.shrink(tree.last)
        prompt = (*_random_tokens(rng, known), 0)
        found = tree.find(prompt)
        reused = found.lookup.reused_tokens
        assert (reused, found.lookup.matched_tokens) == longest_reusable(
            tree.tree, None, list(prompt), tree.layout, copies=True
        )
        if found.node is not None and rng.random() < 0.5:
            hold = residency.hold(found.node, found.held)
            if found.snapshot is not None:
                residency.hold_snapshot(found.snapshot)
            held.append(Held(hold, found.snapshot, prompt, reused))
        for some in held:
            assert tree.find(some.prompt).lookup.reused_tokens >= some.reused
        if len(held) > 6:
            _release(tree, held.pop(0))
    assert tree.tree.evictor.num_columns + tree.tree.evictor.num_snapshots


def _release(tree: Tree, held: Held) -> None:
    residency = tree.tree.residency
    if held.snapshot is not None:
        assert held.snapshot.node is not None, "a held snapshot was evicted"
        residency.release_snapshot(held.snapshot)
    tree.tree.release(held.hold)


def _bytes(tokens: tuple[int, ...]) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def _random_tokens(rng: random.Random, known: list[tuple[int, ...]]) -> tuple[int, ...]:
    like = rng.choice(known)
    cut = rng.randint(0, len(like))
    tail = tuple(rng.randrange(2) for _ in range(rng.choice([0, 1, 3, 12])))
    return (like[:cut] + tail)[:60] or (0,)
