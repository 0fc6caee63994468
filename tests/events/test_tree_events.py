"""A mirror of a prefix tree that is short of room, with holes in its windows."""

import random

import numpy as np
import pytest

from jaxcache.events.mirror import Mirror
from jaxcache.events.records import PagesStored
from jaxcache.events.stream import EventStream, describe
from tests.events.following import assert_same_as_told_now, follow
from tests.host.caches import KINDS
from tests.host.test_tree import (
    Held,
    Tree,
    _random_tokens,
    _release,
    attach,
    publish,
)

WITH_WINDOW = "attention with a window"


@pytest.fixture(autouse=True)
def _window_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    full, window, _ = KINDS["two groups"]
    monkeypatch.setitem(KINDS, WITH_WINDOW, (full, window))


class Followed:
    """A tree, and a mirror of it."""

    def __init__(self, kind: str, num_pages: int = 64, num_rows: int = 30) -> None:
        self.tree = Tree(kind, num_pages=num_pages, num_rows=num_rows)
        self.residency = self.tree.tree.residency
        self.mirror = Mirror()
        shape = describe(self.tree.layout, copies=True)
        self.stream = EventStream(shape, self.residency)
        follow(self.stream, self.mirror)

    def check(self, *prompts: tuple[int, ...]) -> int:
        """Returns the most that can be restored of any of the prompts."""
        follow(self.stream, self.mirror)
        assert_same_as_told_now(self.mirror, self.residency)
        best = 0
        for prompt in prompts:
            reused = self.tree.find(prompt).lookup.reused_tokens
            assert self.mirror.restorable(list(prompt)) == reused, prompt
            best = max(best, reused)
        return best


@pytest.mark.parametrize("kind", [*KINDS, WITH_WINDOW])
@pytest.mark.parametrize("seed", range(6))
def test_a_mirror_equals_a_tree_that_is_short_of_room(kind: str, seed: int) -> None:
    rng = random.Random(f"{kind} {seed}")
    followed = Followed(kind)
    tree, residency = followed.tree, followed.residency
    known: list[tuple[int, ...]] = [()]
    held: list[Held] = []
    hits = 0
    for _ in range(120):
        need = rng.choice([16, 16, 48])
        if held and not tree.has_room(need):
            _release(tree, held.pop(0))
            followed.check()
            continue
        tree.tree.evictor.make_room(need, min(2, tree.rows.num_rows))
        followed.check()
        tokens = _random_tokens(rng, known)
        known.append(tokens)
        tree.model.snapshots = tree.resident_snapshots()
        tree.publish(tokens, rng, holes=True)
        assert tree.last is not None
        tree.tree.evictor.shrink(tree.last)
        prompts = [(*_random_tokens(rng, known), 0) for _ in range(6)]
        hits += followed.check(*prompts) > 0
        found = tree.find(prompts[0])
        if found.node is not None and rng.random() < 0.5:
            hold = residency.hold(found.node, found.held)
            if found.snapshot is not None:
                residency.hold_snapshot(found.snapshot)
            reused = found.lookup.reused_tokens
            held.append(Held(hold, found.snapshot, prompts[0], reused))
        if len(held) > 6:
            _release(tree, held.pop(0))
            followed.check()
    assert hits > 10


def test_a_begun_page_that_is_cut_short_is_told_anew() -> None:
    """A split leaves it to the upper part, with the tokens that are needed there."""
    followed = Followed("hybrid")
    node = publish(followed.tree, (0, 0, 0), tail=True)
    attach(followed.tree, node, 2)
    assert followed.check((0, 0, 0, 1)) == 2
    # Shorter than a page, and without a page of its own that would begin alike.
    publish(followed.tree, (0, 0, 1))
    assert followed.check((0, 0, 1, 1), (0, 0, 0, 1), (0, 0, 7)) == 2


def test_pages_beside_a_hole_are_told_apart() -> None:
    followed = Followed("two groups")
    tree = followed.tree
    columns = tree.pages.take(3)
    tree._drop(columns, 1, 1)
    data = np.arange(12, dtype=np.int32).tobytes()
    tree.tree.insert(None, None, 0, data, columns)
    batch = followed.stream.take()
    assert batch is not None
    stored = [event for event in batch.events if isinstance(event, PagesStored)]
    all_three, first, third = stored
    assert [event.group for event in stored] == [0, 1, 1]
    assert (first.position, first.parent) == (0, None)
    assert (third.position, third.parent) == (8, all_three.hashes[1])
    assert third.tokens.tolist() == [8, 9, 10, 11]
