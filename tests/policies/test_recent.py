"""The order of least recent use."""

from jaxcache.policies.policy import Arrival
from jaxcache.policies.recent import Lru
from tests.policies.fake_tree import PAGE, FakeSnapshot, FakeTree


def add(policy: Lru, tree: FakeTree, name: str) -> FakeSnapshot:
    bundle = policy.arrive(Arrival(320, 0, 0, None))
    (node,) = tree.grow(((name, 320),))
    snapshot = tree.add(node, 320, "boundary", 0)
    policy.added(bundle, snapshot)
    return snapshot


def test_order_of_victims() -> None:
    policy, tree = Lru(tokens_per_page=PAGE), FakeTree()
    first, second, third = (add(policy, tree, name) for name in "abc")
    policy.used(policy.arrive(Arrival(321, 320, 320, first)), first)
    assert policy.victim(tree, needs_pages=False) is second
    second.holds = 1
    assert policy.victim(tree, needs_pages=False) is third
    tree.set_row(third, -1)
    policy.evicted(third, None)
    assert policy.victim(tree, needs_pages=True) is first
    first.holds = 1
    assert policy.victim(tree, needs_pages=True) is None
    assert list(policy.expired()) == [third]
    assert list(policy.expired()) == []


def test_one_that_frees_pages_is_preferred_if_pages_are_short() -> None:
    policy, tree = Lru(tokens_per_page=PAGE), FakeTree()
    bundle = policy.arrive(Arrival(640, 0, 0, None))
    (node,) = tree.grow((("a", 640),))
    inner = tree.add(node, 320, "ladder_50", 0)
    leaf = tree.add(node, 640, "boundary", 0)
    policy.added(bundle, inner)
    policy.added(bundle, leaf)
    assert policy.victim(tree, needs_pages=False) is inner
    assert policy.victim(tree, needs_pages=True) is leaf
    leaf.holds = 1
    assert policy.victim(tree, needs_pages=True) is inner


def test_takes_every_candidate() -> None:
    policy = Lru(tokens_per_page=PAGE)
    bundle = policy.arrive(Arrival(2048, 0, 1040, None))
    wishes = policy.wishes(bundle, 0, 0)
    assert all(wish.worth_a_row for wish in wishes)
    assert (1040, "branch", True) in wishes
    assert policy.wants_response(bundle, 2100, 53, 0)
