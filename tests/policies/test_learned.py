"""The default policy on a small tree: what is kept, what goes, what is forgotten."""

import random

import numpy as np
import pytest

from jaxcache.policies import learned
from jaxcache.policies.learned import Bundle, Learned
from jaxcache.policies.lru import Lru
from jaxcache.policies.policy import Arrival
from jaxcache.policies.reuse import NUM_AGES
from jaxcache.prefixes.nodes import NO_ROW
from tests.policies.fake_tree import PAGE, FakeSnapshot, FakeTree, Segments, Server

LARGE_ROW, SMALL_ROW = 102_137_856, 1 << 20


def make(seed: int = 0, row_bytes: int = LARGE_ROW) -> Learned:
    return Learned(
        row_bytes=row_bytes, page_bytes=262_144, tokens_per_page=PAGE, seed=seed
    )


def make_lru() -> Lru:
    return Lru(row_bytes=1, page_bytes=1, tokens_per_page=PAGE)


def serve_families(server: Server[Bundle], families: list[int], first: int = 0) -> None:
    for number, family in enumerate(families, first):
        prompt = ((f"family {family}", 2304), (f"own {number}", 1792))
        server.serve(prompt, ((f"response {number}", 64),))


def serve_talks[B](
    server: Server[B], talks: int, turns: int = 20, system: Segments = ()
) -> None:
    past: dict[int, Segments] = dict.fromkeys(range(talks), system)
    for turn in range(turns):
        for talk in range(talks):
            prompt = (*past[talk], (f"question {talk} {turn}", 300))
            response = (f"response {talk} {turn}", 200)
            server.serve(prompt, (response,))
            past[talk] = (*prompt, response)


# What must hit, with room for everything.


def test_the_same_prompt_again() -> None:
    server = Server(make(), rows=1000, pages=10_000)
    for tokens in (2040, 400):
        prompt = ((f"prompt of {tokens}", tokens),)
        server.serve(prompt, (("a", 10),))
        assert server.serve(prompt, (("b", 10),)) >= (tokens - 1) // PAGE * PAGE


def test_the_next_turn_reuses_all_but_the_last_token() -> None:
    server = Server(make(), rows=1000, pages=10_000)
    server.serve((("question", 700),), (("response", 50),))
    again = (("question", 700), ("response", 50), ("next", 500))
    assert server.serve(again, (("b", 10),)) == 749


def test_siblings_hit_from_the_third_on() -> None:
    server = Server(make(), rows=1000, pages=10_000)
    hits = [
        server.serve((("shared", 1040), (f"own {n}", 900)), ((f"r{n}", 20),))
        for n in range(3)
    ]
    assert hits[2] >= 1024


def test_siblings_of_a_prompt_that_came_alone() -> None:
    server = Server(make(), rows=1000, pages=10_000)
    server.serve((("system", 1024),), (("a", 10),))
    for n in range(3):
        prompt = (("system", 1024), (f"own {n}", 300))
        assert server.serve(prompt, ((f"r{n}", 20),)) >= 1024


def test_every_turn_hits_with_two_alternating() -> None:
    server = Server(make(), rows=1000, pages=20_000)
    serve_talks(server, talks=2)
    missed = 2 * (300 + 19 * 301)
    assert server.asked - server.reused == missed


# Scans, conversations, change.


@pytest.mark.parametrize("rows", [800, 200, 164])
def test_a_scan_does_not_wash_out_what_is_shared(rows: int) -> None:
    server = Server(make(), rows=rows, pages=40_960)
    serve_families(server, [number % 50 for number in range(2000)])
    assert server.hit >= 0.53


def test_families_in_random_order() -> None:
    rng = random.Random(0)
    server = Server(make(), rows=164, pages=40_960)
    serve_families(server, [rng.randrange(50) for _ in range(2000)])
    assert server.hit >= 0.526


def test_many_at_once() -> None:
    server = Server(make(), rows=264, pages=50_000, in_flight=32)
    serve_families(server, [number % 50 for number in range(2000)])
    assert server.hit >= 0.5


@pytest.mark.parametrize(("talks", "rows"), [(60, 40), (30, 100)])
def test_conversations_do_not_lose_to_the_recent(talks: int, rows: int) -> None:
    ours = Server(make(), rows=rows, pages=12_000)
    theirs = Server(make_lru(), rows=rows, pages=12_000)
    serve_talks(ours, talks)
    serve_talks(theirs, talks)
    assert ours.hit > theirs.hit + 0.1


@pytest.mark.parametrize("row_bytes", [LARGE_ROW, SMALL_ROW])
@pytest.mark.parametrize("talks", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [2, 3, 4, 6, 8, 12])
def test_a_few_conversations_do_not_lose_to_the_recent_before_anything_is_known(
    talks: int, rows: int, row_bytes: int
) -> None:
    system = (("system", 512),)
    ours = Server(make(row_bytes=row_bytes), rows=rows, pages=12_000)
    theirs = Server(make_lru(), rows=rows, pages=12_000)
    serve_talks(ours, talks, turns=12, system=system)
    serve_talks(theirs, talks, turns=12, system=system)
    assert ours.hit > theirs.hit - 0.03


def test_a_new_workload_is_learned_after_another() -> None:
    server = Server(make(), rows=164, pages=40_960)
    serve_talks(server, talks=60)
    serve_families(server, [number % 50 for number in range(500)])
    before, asked = server.reused, server.asked
    serve_families(server, [number % 50 for number in range(500)], first=500)
    assert (server.reused - before) / (server.asked - asked) >= 0.53


# Mechanics.


def test_the_same_calls_give_the_same_answers() -> None:
    rng = random.Random(1)
    families = [rng.randrange(80) for _ in range(700)]
    logs = []
    for seed in (0, 0, 1):
        server = Server(make(seed), rows=300, pages=60_000)
        serve_families(server, families)
        logs.append(server.log)
    assert logs[0] == logs[1]
    assert logs[0] != logs[2]


def test_ghosts_are_forgotten_when_their_bundle_is_old(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(learned, "GHOST_REQUESTS", 50)
    policy = make()
    server = Server(policy, rows=20, pages=2000)
    prompt: Segments = (("kept", 640), ("end", 64))
    server.serve(prompt, (("r", 20),))
    for number in range(300):
        server.serve(((f"own {number}", 640),), ((f"r{number}", 20),))
        if number % 40 == 39:
            server.serve(prompt, ((f"again {number}", 20),))
    ghosts = sum(
        snapshot.row == NO_ROW
        for snapshot in policy._records._snapshots
        if snapshot is not None
    )
    # Five or so a request, of the last fifty requests and what was used since.
    assert ghosts < 60 * 7
    assert server.tree.root.tracked < 60 * 7 + 20
    assert policy._tables._cohorts.sum() <= server.tree.root.tracked + 7
    tracked, _, _ = server.tree.look_up(prompt, 703)
    credited = server.tree.look_up(prompt, 703)[1]
    assert tracked is not None or credited is not None


def test_nothing_held_is_a_victim() -> None:
    policy, tree = make(), FakeTree()
    snapshots = [add(policy, tree, f"p{n}", 320) for n in range(5)]
    for snapshot in snapshots:
        snapshot.holds = 1
    assert policy.victim(tree, needs_pages=False) is None
    assert policy.victim(tree, needs_pages=True) is None
    snapshots[3].holds = 0
    assert policy.victim(tree, needs_pages=True) is snapshots[3]


def test_one_that_frees_pages_is_preferred_if_pages_are_short() -> None:
    policy, tree = make(), FakeTree()
    node = tree.grow((("a", 640), ("b", 640)))
    bundle = policy.arrive(Arrival(1280, 0, 0, None))
    inner = tree.add(node[0], 320, "ladder_50", 0)
    policy.added(bundle, inner)
    leaf = tree.add(node[1], 1280, "boundary", 0)
    policy.added(bundle, leaf)
    assert policy.victim(tree, needs_pages=True) is leaf
    leaf.holds = 1
    assert policy.victim(tree, needs_pages=True) is inner


def add(policy: Learned, tree: FakeTree, name: str, position: int) -> FakeSnapshot:
    bundle = policy.arrive(Arrival(position, 0, 0, None))
    (node,) = tree.grow(((name, position),))
    snapshot = tree.add(node, position, "boundary", 0)
    policy.added(bundle, snapshot)
    return snapshot


def test_a_resident_answers_for_the_ghosts_that_it_would_serve() -> None:
    policy, tree = make(), FakeTree()
    node = tree.grow((("a", 640), ("b", 640)))
    bundle = policy.arrive(Arrival(1280, 0, 0, None))
    inner = tree.add(node[0], 640, "ladder_50", 0)
    leaf = tree.add(node[1], 1280, "boundary", 0)
    policy.added(bundle, inner)
    policy.added(bundle, leaf)
    records, tables = policy._records, policy._tables
    assert inner.record is not None
    sample = np.array([inner.record])
    alone = records.rates(sample, tables.index, tables.requests)[0]
    tree.set_row(leaf, NO_ROW)
    policy.evicted(leaf, inner)
    both = records.rates(sample, tables.index, tables.requests)[0]
    assert both == pytest.approx(2 * alone)
    tree.set_row(leaf, 0)
    policy.revived(bundle, leaf)
    assert records.rates(sample, tables.index, tables.requests)[0] == alone


def test_prices_follow_what_is_short() -> None:
    policy, tree = make(), FakeTree()
    for number in range(4):
        add(policy, tree, f"p{number}", 320)
    row, page = policy._row_price, policy._page_price
    for _ in range(10):
        policy.victim(tree, needs_pages=True)
    assert policy._row_price < row
    assert policy._page_price > page


@pytest.mark.parametrize("kind", ["marked", "of the caller's own"])
def test_marked_positions_are_welcome(kind: str) -> None:
    policy, tree = make(), FakeTree()
    bundle = policy.arrive(Arrival(640, 0, 0, None))
    (node,) = tree.grow((("a", 640),))
    for position in (100, 200, 300):
        policy.added(bundle, tree.add(node, position, kind, 0))
    for _ in range(3 * NUM_AGES):
        hit, credited, matched = tree.look_up((("a", 640),), 639)
        assert hit is not None
        policy.arrive(Arrival(640, hit.position, matched, credited))
    assert policy.victim(tree, needs_pages=False) is not None
