"""After any run a mirror says what the manager says, and listening changes nothing."""

import os
import random

import numpy as np
import pytest

from jaxcache.events.mirror import Mirror, SequenceGap
from jaxcache.events.records import Batch, PagesRemoved, PagesStored, SnapshotRemoved
from tests.events.following import (
    assert_equal,
    assert_same_contents,
    contents,
    follow,
    reused,
)
from tests.host.caches import KINDS, make_buckets, make_manager
from tests.host.driver import Driver
from tests.host.events import VOCAB, Events
from tests.host.snapshot_of_core import describe
from tests.host.test_any_sequence import WEIGHTS

RUNS = int(os.environ.get("JAXCACHE_SOAK_RUNS", "12"))


def names_of_a_run(rng: random.Random, count: int) -> list[str]:
    return rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=count)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mirror_equals_its_manager_after_any_run(kind: str) -> None:
    hits, removed = 0, 0
    for seed in range(RUNS):
        rng = random.Random(f"{kind} {seed}")
        events = Events(kind, rng, is_roomy=seed % 5 == 4)
        asking = random.Random(seed)
        mirror, stream = Mirror(), events.manager.listen()
        for number, name in enumerate(names_of_a_run(rng, 300)):
            getattr(events, name)(rng)
            if number % 10 == 0:
                follow(stream, mirror)
                hits += assert_equal(mirror, events.manager, asking, VOCAB)
                assert_same_contents(mirror, events.manager)
        events.end()
        while (batch := stream.take()) is not None:
            removed += sum(
                isinstance(event, PagesRemoved | SnapshotRemoved)
                for event in batch.events
            )
            mirror.apply(batch)
        assert_same_contents(mirror, events.manager)
        # All went at the end, so nothing may be left that was told and never revoked.
        assert (mirror.num_pages, mirror.num_snapshots) == (0, 0)
    assert hits > RUNS
    assert removed > RUNS


@pytest.mark.parametrize("kind", KINDS)
def test_listening_changes_nothing(kind: str) -> None:
    for seed in range(max(2, RUNS // 4)):
        told, silent = (random.Random(f"{kind} {seed}") for _ in range(2))
        followed, alone = Events(kind, told), Events(kind, silent)
        stream = followed.manager.listen()
        for name in names_of_a_run(random.Random(seed), 200):
            getattr(followed, name)(told)
            getattr(alone, name)(silent)
            assert describe(followed.core) == describe(alone.core)
        assert stream.take() is not None


def test_a_listener_that_comes_late_is_told_everything_first() -> None:
    told = 0
    for seed in range(4):
        rng = random.Random(seed)
        events = Events("two groups", rng, is_roomy=seed % 2 == 0)
        first, stream = Mirror(), events.manager.listen()
        for name in names_of_a_run(rng, 150):
            getattr(events, name)(rng)
        follow(stream, first)
        stream.close()
        late, stream = Mirror(), events.manager.listen()
        told += follow(stream, late)
        assert contents(late) == contents(first)
        for name in names_of_a_run(rng, 50):
            getattr(events, name)(rng)
        follow(stream, late)
        assert_equal(late, events.manager, rng, VOCAB)
    assert told > 10


def test_only_one_stream_listens_at_once_and_a_closed_one_is_silent() -> None:
    driver = Driver(make_manager("hybrid"))
    stream = driver.manager.listen()
    with pytest.raises(ValueError, match="listens already"):
        driver.manager.listen()
    stream.close()
    stream.close()
    other = driver.manager.listen(rank=3)
    stream.close()
    driver.serve("a", list(range(40)))
    batch = other.take()
    assert batch is not None
    assert batch.rank == 3
    assert any(isinstance(event, PagesStored) for event in batch.events)
    assert other.take() is None


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_hashed_until_somebody_listens(kind: str) -> None:
    driver = Driver(make_manager(kind))
    driver.serve("a", list(range(40)))
    root = driver.manager._core.tree.residency.roots[None]
    assert all(not node.digests for node in root.walk())
    driver.manager.listen().take()
    assert any(node.digests for node in root.walk())


def test_a_mirror_agrees_with_what_add_reuses() -> None:
    driver = Driver(make_manager("hybrid"))
    mirror, stream = Mirror(), driver.manager.listen()
    prompt = list(range(100))
    driver.serve("a", prompt, 5, points=[37])
    follow(stream, mirror)
    for query in (prompt, prompt[:40], [*prompt[:37], 7], [*prompt[:36], 7], [1, 2]):
        said = mirror.restorable(query)
        assert said == driver.add("probe", query).reused_tokens
        driver.cancel("probe")
    # Inside a page, exactly where the snapshot is.
    assert mirror.restorable([*prompt[:37], 7]) == 37
    assert mirror.restorable([*prompt[:36], 7]) == 0
    assert mirror.restorable(prompt, "other") == 0


def test_pages_without_a_snapshot_restore_nothing() -> None:
    driver = Driver(make_manager("hybrid", num_rows=32))
    mirror, stream = Mirror(), driver.manager.listen()
    prompt = list(range(64))
    driver.serve("a", [*prompt, 7])
    follow(stream, mirror)
    assert mirror.restorable([*prompt, 8]) == 64
    tree = driver.manager._core.tree
    driver.add("b", [*prompt, 9])
    snapshots = [
        snapshot
        for node in tree.residency.roots[None].walk()
        for snapshot in node.snapshots
        if snapshot.is_resident
    ]
    driver.cancel("b")
    # A holder of the pages alone keeps them, and the snapshots go.
    node = snapshots[-1].node
    assert node is not None
    hold = tree.residency.hold(node, snapshots[-1].position)
    for snapshot in snapshots:
        tree.evictor.evict(snapshot)
    follow(stream, mirror)
    assert mirror.num_pages
    assert not mirror.num_snapshots
    assert mirror.restorable([*prompt, 8]) == 0
    tree.release(hold)


def test_where_begun_pages_are_not_copied_none_is_counted() -> None:
    for copies, wanted in ((8, 37), (0, 32)):
        manager = make_manager("attention", buckets=make_buckets(max_copies=copies))
        driver = Driver(manager)
        mirror, stream = Mirror(), driver.manager.listen()
        driver.serve("a", list(range(37)), 1)
        follow(stream, mirror)
        query = [*range(37), 7, 8]
        assert mirror.restorable(query) == reused(driver.manager, query, None) == wanted


def test_a_window_needs_only_the_pages_that_it_sees() -> None:
    """Pages that a window has passed may go; those that it still sees may not."""
    driver = Driver(make_manager("two groups"))
    mirror, stream = Mirror(), driver.manager.listen()
    prompt = list(range(128))
    driver.serve("a", prompt)
    batch = stream.take()
    assert batch is not None
    mirror.apply(batch)
    stored = [e for e in batch.events if isinstance(e, PagesStored) and e.group == 1]
    hashes = [name for event in stored for name in event.hashes]
    query = [*prompt, 7]
    assert mirror.restorable(query) == 128

    def without(group: int, gone: list[int], sequence: int) -> int:
        event = PagesRemoved(hashes=gone, group=group)
        mirror.apply(
            Batch(sequence=sequence, timestamp=0.0, rank=0, events=[event]),
        )
        return mirror.restorable(query)

    # At 128 a window of 24 sees tokens from 105 on: pages 6 and 7 of 16 tokens.
    assert without(1, hashes[:6], 1) == 128
    assert without(1, hashes[6:7], 2) == 0


def test_a_stream_that_nobody_takes_begins_anew() -> None:
    driver = Driver(make_manager("hybrid"))
    manager = driver.manager
    mirror, stream = Mirror(), manager.listen()
    follow(stream, mirror)
    stream._max_pending = 3
    for number in range(4):
        driver.serve(number, [number, *range(40)])
    assert stream.num_dropped > 3
    assert len(stream._pending) <= 3
    assert follow(stream, mirror) > 3
    assert_same_contents(mirror, manager)


def test_a_gap_in_the_sequence_is_refused_by_name() -> None:
    driver = Driver(make_manager("hybrid"))
    mirror, stream = Mirror(), driver.manager.listen()
    batches = []
    for number in range(4):
        driver.serve(number, [number, *range(40)])
        batches.append(stream.take())
    first, second, third, fourth = (batch for batch in batches if batch is not None)
    with pytest.raises(ValueError, match="no batch has come yet"):
        mirror.restorable([1, 2])
    with pytest.raises(SequenceGap, match="must begin with AllCleared"):
        mirror.apply(second)
    mirror.apply(first)
    before = contents(mirror)
    with pytest.raises(SequenceGap, match="batches 1 to 2 are missing") as gap:
        mirror.apply(fourth)
    assert (gap.value.expected, gap.value.got) == (1, 3)
    assert contents(mirror) == before
    mirror.apply(second)
    with pytest.raises(SequenceGap, match="batch 2 was to come"):
        mirror.apply(second)
    mirror.apply(third)
    mirror.apply(fourth)
    assert_same_contents(mirror, driver.manager)
    stream.restate()
    batch = stream.take()
    assert batch is not None
    other = Mirror()
    other.apply(batch)
    assert contents(other) == contents(mirror)
    # What is told anew is all there is.
    cleared = Batch(sequence=0, timestamp=0.0, rank=0, events=batch.events[:1])
    other.apply(cleared)
    assert (other.num_pages, other.num_snapshots) == (0, 0)


def test_a_page_in_another_tier_outlives_the_one_on_the_device() -> None:
    driver = Driver(make_manager("attention"))
    mirror, stream = Mirror(), driver.manager.listen()
    driver.serve("a", list(range(32)))
    batch = stream.take()
    assert batch is not None
    mirror.apply(batch)
    event = next(e for e in batch.events if isinstance(e, PagesStored))
    copies = PagesStored(
        hashes=event.hashes,
        parent=event.parent,
        tokens=event.tokens,
        tokens_per_page=event.tokens_per_page,
        tier="CPU",
        group=0,
        kind=event.kind,
        position=event.position,
        scope=None,
    )
    gone = PagesRemoved(hashes=event.hashes, group=0)
    also = PagesRemoved(hashes=event.hashes, tier="CPU", group=0)
    query = np.arange(40)
    mirror.apply(Batch(sequence=1, timestamp=0.0, rank=0, events=[copies, gone]))
    assert mirror.restorable(query) == 32
    mirror.apply(Batch(sequence=2, timestamp=0.0, rank=0, events=[also]))
    assert mirror.restorable(query) == 0
