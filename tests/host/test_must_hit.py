"""What must hit, with room for everything: the contract's table, row by row."""

import random
from collections.abc import Hashable, Iterator, Sequence

import pytest

from jaxcache import Learned, Lru, PolicyMaker
from tests.host.caches import make_manager
from tests.host.driver import Driver

PAGES = (16, 32)

# The policy of every manager here, set for each test by the fixture below.
EVICTION: list[PolicyMaker] = []


POLICIES: dict[str, PolicyMaker] = {"learned": Learned, "lru": Lru}


@pytest.fixture(params=POLICIES, autouse=True)
def eviction(request: pytest.FixtureRequest) -> Iterator[None]:
    EVICTION[:] = [POLICIES[request.param]]
    yield
    EVICTION.clear()


def make_driver(tokens_per_page: int, kind: str = "hybrid") -> Driver:
    return Driver(
        make_manager(
            kind,
            tokens_per_page=tokens_per_page,
            num_pages=6000,
            num_rows=600,
            eviction=EVICTION[0] if EVICTION else Lru,
        )
    )


def random_tokens(seed: object, count: int) -> list[int]:
    rng = random.Random(f"{seed}")
    return [rng.randrange(50) for _ in range(count)]


@pytest.mark.parametrize("page", PAGES)
def test_a_prompt_again_reuses_up_to_its_last_page_boundary(page: int) -> None:
    driver = make_driver(page)
    prompt = random_tokens("prompt", 2040)
    _, first = driver.serve("first", prompt, 8)
    reused, second = driver.serve("second", prompt, 8)
    assert reused == 2039 // page * page >= 2016
    assert second == first


@pytest.mark.parametrize("page", PAGES)
def test_a_prompt_again_reuses_all_but_one_token_if_that_is_marked(page: int) -> None:
    driver = make_driver(page)
    prompt = random_tokens("prompt", 2040)
    driver.serve("first", prompt, points=[2039])
    assert driver.serve("second", prompt)[0] == 2039


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("chunk", [77, 4096])
def test_the_next_turn_reuses_all_but_the_last_token_sampled(
    page: int, chunk: int
) -> None:
    driver = make_driver(page)
    prompt = random_tokens("prompt", 700)
    known = 0
    for turn in range(4):
        reused, answer = driver.serve(turn, prompt, 37, chunk=chunk)
        assert reused == known
        known = len(prompt) + len(answer) - 1
        prompt = prompt + answer + random_tokens(turn, 500)


@pytest.mark.parametrize("page", PAGES)
def test_siblings_hit_from_the_third_on(page: int) -> None:
    driver = make_driver(page)
    shared = random_tokens("shared", 1040)
    reused = [
        driver.serve(i, shared + random_tokens(f"tail {i}", 300))[0] for i in range(3)
    ]
    # The learned policy has a snapshot at 1,024 before it knows of any branch.
    assert reused[:2] == [0, 1024 if EVICTION == [Learned] else 0]
    assert reused[2] >= 1024


@pytest.mark.parametrize("page", PAGES)
def test_siblings_hit_from_the_second_on_if_their_parting_is_marked(page: int) -> None:
    driver = make_driver(page)
    shared = random_tokens("shared", 1040)
    reused = [
        driver.serve(i, shared + random_tokens(f"tail {i}", 300), points=[1040])[0]
        for i in range(3)
    ]
    assert reused == [0, 1040, 1040]


@pytest.mark.parametrize("page", PAGES)
def test_a_short_prompt_again_hits(page: int) -> None:
    driver = make_driver(page)
    prompt = random_tokens("prompt", 400)
    driver.serve("first", prompt)
    assert driver.serve("second", prompt)[0] >= 384


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("length", [512, 1037])
def test_every_sibling_reuses_a_system_prompt_that_was_served_alone(
    page: int, length: int
) -> None:
    driver = make_driver(page)
    system = random_tokens("system", length)
    driver.serve("alone", system, 3)
    for i in range(3):
        reused, _ = driver.serve(i, system + random_tokens(f"tail {i}", 200))
        assert reused == length // page * page


@pytest.mark.parametrize("page", PAGES)
def test_two_conversations_that_alternate_both_hit_from_their_second_turn_on(
    page: int,
) -> None:
    driver = make_driver(page)
    prompts = {name: random_tokens(name, 60) for name in "AB"}
    known = dict.fromkeys(prompts, 0)
    for turn in range(20):
        for name, prompt in prompts.items():
            reused, answer = driver.serve((name, turn), prompt, 11)
            assert reused == known[name]
            known[name] = len(prompt) + len(answer) - 1
            prompts[name] = prompt + answer + random_tokens((name, turn), 30)


@pytest.mark.parametrize("page", PAGES)
def test_the_same_trace_reuses_the_same_at_concurrency_1_and_32(page: int) -> None:
    trace = conversations(32, 3)
    alone, together = make_driver(page), make_driver(page)
    for request_id, prompt in trace:
        alone.serve(request_id, prompt, 5)
    for begin in range(0, len(trace), 32):
        serve_together(together, trace[begin : begin + 32], 5)
    ours, theirs = alone.manager.stats, together.manager.stats
    assert theirs.requests == ours.requests == 96
    assert theirs.reused_tokens == ours.reused_tokens > 0
    assert theirs.computed_tokens == ours.computed_tokens
    together.manager.check()


def conversations(count: int, turns: int) -> list[tuple[object, list[int]]]:
    """Turns of many conversations; the user says the answer's place is known."""
    prompts = {i: random_tokens(("conversation", i), 50 + i) for i in range(count)}
    trace: list[tuple[object, list[int]]] = []
    for turn in range(turns):
        for i in range(count):
            trace.append(((i, turn), prompts[i]))
            prompts[i] = prompts[i] + random_tokens(("more", i, turn), 40)
    return trace


@pytest.mark.parametrize("page", PAGES)
def test_only_twins_of_one_step_reuse_less_at_concurrency_32(page: int) -> None:
    """All share a system prompt; each turn goes on from the answer before."""
    alone, together = make_driver(page), make_driver(page)
    system = random_tokens("system", 100)
    prompts = [system + random_tokens(("user", i), 50 + i) for i in range(32)]
    known = [0] * 32
    for turn in range(3):
        requests = [((i, turn), prompt) for i, prompt in enumerate(prompts)]
        ours = [alone.serve(i, prompt, 5) for i, prompt in requests]
        theirs = serve_together(together, requests, 5)
        for i, prompt in enumerate(prompts):
            (most, answer), (reused, same) = ours[i], theirs[i]
            assert same == answer
            # What was known before this turn is reused by both. All else that the one
            # alone reuses is from an earlier request of the same turn: a twin.
            twin = max((count_common(prompt, p) for p in prompts[:i]), default=0)
            assert reused == known[i]
            assert known[i] <= most <= max(known[i], twin)
        if turn == 0:
            assert sum(most for most, _ in ours) >= 30 * (100 // page * page)
        known = [
            len(prompt) + len(answer) - 1
            for prompt, (_, answer) in zip(prompts, ours, strict=True)
        ]
        prompts = [
            prompt + answer + random_tokens(("more", i, turn), 40)
            for i, (prompt, (_, answer)) in enumerate(zip(prompts, ours, strict=True))
        ]
    together.manager.check()


def count_common(left: list[int], right: list[int]) -> int:
    """How many tokens two prompts begin with alike."""
    pairs = enumerate(zip(left, right, strict=False))
    parting = (position for position, (ours, theirs) in pairs if ours != theirs)
    return next(parting, min(len(left), len(right)))


def serve_together(
    driver: Driver, requests: Sequence[tuple[Hashable, list[int]]], new_tokens: int
) -> list[tuple[int, list[int]]]:
    """Serves requests at once; all are added before any of them has run.

    Returns:
        What `Driver.serve` does, for each.
    """
    for request_id, prompt in requests:
        driver.add(request_id, prompt)
    ids = [request_id for request_id, _ in requests]
    driver.step([(i, driver.manager.remaining(i)) for i in ids])
    for _ in range(new_tokens - 1):
        driver.step([(i, 1) for i in ids])
    manager, outcome = driver.manager, []
    for request_id, prompt in requests:
        tokens: list[int] = manager.tokens(request_id)[len(prompt) :].tolist()
        outcome.append((manager.explain(request_id).reused_tokens, tokens))
        driver.finish(request_id)
    return outcome


@pytest.mark.parametrize("page", PAGES)
def test_who_waits_while_its_prefix_is_served_reuses_it_all_the_same(page: int) -> None:
    driver = make_driver(page)
    prompt = random_tokens("prompt", 300)
    driver.add("waits", prompt)
    assert driver.manager.explain("waits").reused_tokens == 0
    driver.serve("first", prompt)
    driver.prefill("waits")
    assert driver.manager.explain("waits").reused_tokens == 299 // page * page


def test_who_waits_reuses_what_a_running_request_has_published_since() -> None:
    driver = make_driver(16, "attention")
    prompt = random_tokens("prompt", 100)
    driver.add("runs", prompt)
    driver.step([("runs", 16)])
    assert driver.add("waits", prompt).reused_tokens == 16
    driver.step([("runs", 32)])
    plan = driver.step([("waits", 1)])
    assert plan.entries[0].start == 48


@pytest.mark.parametrize("page", PAGES)
def test_attention_alone_reuses_to_the_token(page: int) -> None:
    driver = make_driver(page, "attention")
    prompt = random_tokens("prompt", 1000)
    driver.serve("first", prompt)
    assert driver.serve("again", prompt)[0] == 999
    other = [*prompt[:517], 51, *random_tokens("tail", 100)]
    assert driver.serve("sibling", other)[0] == 517


@pytest.mark.parametrize("page", PAGES)
def test_recurrent_layers_alone_reuse_to_the_snapshot(page: int) -> None:
    driver = make_driver(page, "recurrent")
    prompt = random_tokens("prompt", 1000)
    _, answer = driver.serve("first", prompt, 4, points=[517])
    assert driver.serve("again", prompt)[0] == 999 // page * page
    other = [*prompt[:517], 51, *random_tokens("tail", 100)]
    assert driver.serve("sibling", other)[0] == 517
    assert driver.serve("next turn", prompt + answer + [1, 2])[0] == 1003


@pytest.mark.parametrize("kind", ["hybrid", "attention", "recurrent"])
def test_different_scopes_share_nothing(kind: str) -> None:
    driver = make_driver(16, kind)
    prompt = random_tokens("prompt", 200)
    driver.serve("first", prompt, 3, scope="adapter 1", points=[100])
    assert driver.serve("other", prompt, scope="adapter 2")[0] == 0
    assert driver.serve("none", prompt)[0] == 0
    assert driver.serve("same", prompt, scope="adapter 1")[0] >= 192


def test_a_request_without_reuse_uses_and_leaves_nothing() -> None:
    driver = make_driver(16)
    prompt = random_tokens("prompt", 200)
    driver.serve("private", prompt, 3, reuse=False)
    assert driver.serve("first", prompt)[0] == 0
    assert driver.serve("private again", prompt, reuse=False)[0] == 0
    assert driver.serve("second", prompt)[0] == 192
