"""A mirror beside a manager: what both say of many prompts."""

import random
from collections.abc import Hashable, Iterable

import numpy as np

from jaxcache.events.mirror import Mirror
from jaxcache.events.records import Batch, decode_batch, encode_batch
from jaxcache.events.stream import EventStream
from jaxcache.host.manager import CacheManager
from jaxcache.prefixes.residency import Residency

SCOPES = (None, "other")


def travelled(batch: Batch) -> Batch:
    """A batch as it arrives in another process."""
    return decode_batch(batch.sequence, encode_batch(batch))


def follow(stream: EventStream, mirror: Mirror) -> int:
    """Brings a mirror up to date, over the wire format; returns the events."""
    count = 0
    while (batch := stream.take()) is not None:
        mirror.apply(travelled(batch))
        count += len(batch.events)
    return count


def reused(manager: CacheManager, prompt: list[int], scope: Hashable) -> int:
    """What the manager itself reuses, without leaving a trace."""
    core = manager._core
    data = np.array(prompt, np.int32).tobytes()
    return core.finder.find(scope, data, copies=core.copies).lookup.reused_tokens


def known_prompts(manager: CacheManager, scope: Hashable) -> list[list[int]]:
    """The tokens of every leaf of a scope, ghosts included."""
    root = manager._core.tree.residency.roots.get(scope)
    if root is None:
        return []
    return [
        [token for each in node.path() for token in each.tokens.tolist()]
        for node in root.walk()
        if node.parent is not None and not node.children
    ]


def prompts_near(
    manager: CacheManager, scope: Hashable, rng: random.Random, vocab: int
) -> Iterable[list[int]]:
    """Every leaf, cut and continued in several ways, and prompts of chance."""
    for known in known_prompts(manager, scope):
        yield [*known, 0]
        for _ in range(4):
            cut = rng.randint(0, len(known))
            tail = [rng.randrange(vocab) for _ in range(rng.randint(1, 6))]
            yield known[:cut] + tail
    for _ in range(4):
        yield [rng.randrange(vocab) for _ in range(rng.randint(1, 12))]


def assert_equal(
    mirror: Mirror, manager: CacheManager, rng: random.Random, vocab: int
) -> int:
    """The mirror says of many prompts what the manager does; returns the hits."""
    hits = 0
    for scope in SCOPES:
        for prompt in prompts_near(manager, scope, rng, vocab):
            wanted = reused(manager, prompt, scope)
            assert mirror.restorable(prompt, scope) == wanted, (prompt, scope)
            hits += wanted > 0
    return hits


def assert_same_contents(mirror: Mirror, manager: CacheManager) -> None:
    """A mirror that followed holds what one that came just now is told, no more."""
    assert_same_as_told_now(mirror, manager._core.tree.residency)


def assert_same_as_told_now(mirror: Mirror, residency: Residency) -> None:
    listener, residency.listener = residency.listener, None
    stream = EventStream(mirror.shape, residency)
    batch = stream.take()
    stream.close()
    residency.listener = listener
    assert batch is not None
    fresh = Mirror()
    fresh.apply(batch)
    assert contents(mirror) == contents(fresh)


def contents(mirror: Mirror) -> object:
    pages = {
        name: (page.parent, page.tokens, page.places)
        for name, page in mirror._pages.items()
    }
    below = {parent: set(names) for parent, names in mirror._below.items()}
    return pages, below, mirror._snapshots
