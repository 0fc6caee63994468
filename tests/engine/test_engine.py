"""Ends of requests, early and late; refusals; errors that leave nothing behind."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxcache.engine import (
    Engine,
    Finish,
    Progress,
    Request,
    Result,
    default_buckets,
)
from jaxcache.host.plans import StepPlan
from jaxcache.inputs.buckets import Buckets
from tests.engine.serving import SIZE, Golden, make_prompt


def ask(name: object, prompt: Any, new_tokens: int = 8, **options: Any) -> Request:
    return Request(id=name, prompt=prompt, max_new_tokens=new_tokens, **options)


def run(engine: Engine) -> dict[object, Result]:
    results: dict[object, Result] = {}
    while len(engine):
        results.update((result.id, result) for result in engine.step().finished)
        engine.manager.check()
    engine.check()
    return results


def used(engine: Engine) -> tuple[int, ...]:
    """Seats, rows and pages that are reserved."""
    room, all_of_it = engine._roster.room, engine._roster.capacity
    return (all_of_it.seats - room.seats, all_of_it.rows - room.rows)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_a_request_ends_with_the_first_end_token(
    model: Golden, length: int, overlap: bool
) -> None:
    eos = model.generated[length - 1]
    assert eos not in model.generated[: length - 1]
    engine = model.engine(overlap=overlap)
    (result,) = engine.serve(
        [ask("a", model.prompt, 48, eos_ids=frozenset({eos, 999}))]
    )
    assert result.finish is Finish.EOS
    assert result.tokens == model.generated[:length]
    engine.check()
    assert used(engine) == (0, 0)


@pytest.mark.parametrize(("overlap", "end_computed"), [(True, 1), (False, 0)])
def test_an_answer_that_ended_early_is_reused_by_the_next_turn(
    model: Golden, overlap: bool, end_computed: int
) -> None:
    engine = model.engine(overlap=overlap)
    eos = model.generated[6]
    (first,) = engine.serve([ask("a", model.prompt, 48, eos_ids=frozenset({eos}))])
    history = [*model.prompt.tolist(), *first.tokens]
    (second,) = engine.serve([ask("b", [*history, *model.generated[7:9]], 39)])
    # With overlap the step after the end token was under way, and computed it.
    assert second.reused_tokens == len(history) - 1 + end_computed
    assert second.tokens == model.generated[9:]


def test_a_request_may_be_cancelled_while_it_waits_prefills_or_decodes(
    model: Golden,
) -> None:
    for steps in (0, 1, 2, 3, 5, 8, 11):
        engine = model.engine(token_budget=40)
        engine.submit(ask("a", model.prompt, 20))
        engine.submit(ask("b", make_prompt(1, 90), 20))
        results: dict[object, Result] = {}
        for _ in range(steps):
            results.update((r.id, r) for r in engine.step().finished)
        engine.cancel("a")
        results |= run(engine)
        with pytest.raises(ValueError, match="request_id 'a' is not under way"):
            engine.cancel("a")
        assert results["a"].finish is Finish.CANCELLED
        assert results["a"].tokens == model.generated[: len(results["a"].tokens)]
        assert results["b"].finish is Finish.LENGTH
        assert used(engine) == (0, 0)


@pytest.mark.parametrize(("overlap", "most"), [(True, 2), (False, 1)])
def test_steps_in_flight_are_bounded_and_overlap_uses_the_bound(
    model: Golden, monkeypatch: pytest.MonkeyPatch, overlap: bool, most: int
) -> None:
    engine = model.engine(overlap=overlap)
    seen = []
    launch = engine.pipeline.launch

    def count(plan: StepPlan) -> None:
        launch(plan)
        seen.append(engine.steps_in_flight)

    monkeypatch.setattr(engine.pipeline, "launch", count)
    engine.serve([ask("a", model.prompt, 10)])
    assert max(seen) == most
    # One step a token, and one for the prompt, which samples the first.
    assert len(seen) == 10


def test_a_budget_below_the_number_of_requests_serves_them_in_turn(
    model: Golden,
) -> None:
    engine = model.engine(token_budget=2)
    brought: list[Progress] = []
    requests = [ask(seed, make_prompt(seed, 2), 6) for seed in range(4)]
    results = engine.serve(requests, progress=brought.append)
    assert all(len(result.tokens) == 6 for result in results)
    assert max(progress.computed_tokens for progress in brought) == 2


def test_far_more_requests_than_the_cache_holds_are_all_served(model: Golden) -> None:
    engine = model.engine()
    requests = [ask(seed, make_prompt(seed, 120), 8) for seed in range(9)]
    results = engine.serve(requests)
    assert all(len(result.tokens) == 8 for result in results)
    engine.check()


def test_progress_brings_every_token_once(model: Golden) -> None:
    engine = model.engine()
    brought: dict[object, list[int]] = {}

    def note(progress: Progress) -> None:
        for name, token in progress.new_tokens.items():
            brought.setdefault(name, []).append(token)

    requests = [ask(seed, make_prompt(seed, 30), 5) for seed in range(3)]
    for result in engine.serve(requests, progress=note):
        assert tuple(brought[result.id]) == result.tokens


def test_times_are_ordered(model: Golden) -> None:
    (result,) = model.engine().serve([ask("a", model.prompt, 3)])
    assert result.time_to_first_token_s is not None
    assert 0 < result.time_to_first_token_s < result.total_s


def test_scopes_share_nothing(model: Golden) -> None:
    engine = model.engine()
    for scope, reused in (("x", 0), ("y", 0)):
        (result,) = engine.serve([ask(scope, model.prompt, 2, scope=scope)])
        assert result.reused_tokens == reused
    (result,) = engine.serve([ask("again", model.prompt, 2, scope="x")])
    assert result.reused_tokens >= 144


def test_a_request_may_decline_reuse(model: Golden) -> None:
    engine = model.engine()
    for name in ("a", "b"):
        (result,) = engine.serve([ask(name, model.prompt, 2, reuse=False)])
        assert result.reused_tokens == 0


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        (ask("a", []), r"prompt of request 'a' must have shape \(n,\), n at least 1"),
        (ask("a", [[1]]), r"must have shape \(n,\), n at least 1, got \(1, 1\)"),
        (ask("a", [1.5]), "prompt of request 'a' must hold integers, got float64"),
        (ask("a", [1, 256]), "must have token ids from 0 to 255, got 1 to 256"),
        (ask("a", [-1]), "prompt of request 'a' must hold token ids >= 0, got -1"),
        (ask("a", [[1], [2, 3]]), r"prompt of request 'a' must be an array of shape"),
        (ask("a", [1], 0), "max_new_tokens of request 'a' must be at least 1, got 0"),
        (
            ask("a", np.zeros(200, np.int32), 10),
            "are 200 and 10 tokens and need room for 209; max_tokens is 208",
        ),
        (ask("a", [1, 2], points=(3,)), "points of request 'a' must be ascending"),
        (
            ask("a", [1, 2], points=(1,), reuse=False),
            r"points of request 'a' must be empty without reuse, got \(1,\)",
        ),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    model: Golden, request_: Request, complaint: str
) -> None:
    engine = model.engine()
    with pytest.raises(ValueError, match=complaint):
        engine.serve([ask("fine", [1, 2, 3]), request_])
    assert not len(engine)
    assert len(engine.serve([ask("fine", [1, 2, 3])])) == 1


def test_an_id_under_way_is_refused(model: Golden) -> None:
    engine = model.engine()
    engine.submit(ask("a", [1]))
    with pytest.raises(ValueError, match="id 'a' is already under way"):
        engine.submit(ask("a", [2]))
    with pytest.raises(RuntimeError, match="serve needs an idle engine, but 1"):
        engine.serve([])
    assert len(run(engine)) == 1


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"max_seqs": 0}, "max_seqs must be an integer >= 1, got 0"),
        ({"token_budget": 0}, "token_budget must be an integer >= 1, got 0"),
        ({"num_rows": 3}, "num_rows must be at least max_seqs = 4"),
        ({"num_pages": 12}, "num_pages of group 0 must be at least 13"),
        ({"buckets": Buckets((), (16,))}, "buckets must have decode and prefill"),
    ],
)
def test_an_engine_that_cannot_work_is_refused(
    model: Golden, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        model.engine(**{**SIZE, **options})


class Interrupted(Exception):
    """Raised by a test in the middle of serving."""


@pytest.mark.parametrize("after", [1, 4, 9])
def test_an_error_while_serving_leaves_nothing_behind(
    model: Golden, after: int
) -> None:
    engine = model.engine(token_budget=50)
    count = 0

    def interrupt(progress: Progress) -> None:
        nonlocal count
        del progress
        count += 1
        if count == after:
            raise Interrupted

    requests = [ask("a", model.prompt, 9), ask("b", make_prompt(3, 60), 9)]
    with pytest.raises(Interrupted):
        engine.serve(requests, progress=interrupt)
    assert not len(engine)
    assert engine.steps_in_flight == 0
    assert used(engine) == (0, 0)
    engine.check()
    (result,) = engine.serve([ask("a", model.prompt, 48)])
    assert result.tokens == model.generated


def test_a_step_that_loses_the_cache_leaves_an_empty_engine(
    model: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model.engine()
    engine.serve([ask("before", model.prompt, 2)])

    def lose(plan: object) -> None:
        del plan
        for pool in engine.pipeline.state.pools:
            pool.delete()
        raise Interrupted

    monkeypatch.setattr(engine.pipeline, "launch", lose)
    with pytest.raises(Interrupted):
        engine.serve([ask("a", model.prompt, 48)])
    assert not len(engine)
    (result,) = engine.serve([ask("a", model.prompt, 48)])
    assert (result.reused_tokens, result.tokens) == (0, model.generated)
    engine.check()


def test_warming_up_compiles_every_shape_and_serving_none(model: Golden) -> None:
    engine = model.engine()
    told: list[tuple[int, int]] = []
    engine.warm_up(lambda done, total: told.append((done, total)))
    assert told == [(done, 5) for done in range(6)]
    compiled = engine.compilations
    assert compiled >= engine.buckets.count == 5
    (result,) = engine.serve([ask("a", model.prompt, 48)])
    assert result.tokens == model.generated
    assert engine.compilations == compiled


def test_a_request_that_finds_no_room_waits_and_changes_no_token(
    model: Golden,
) -> None:
    # One row a request and none to spare: a request that starts from a snapshot finds
    # no row of its own while the others run.
    tight = {
        "num_rows": SIZE["max_seqs"],
        "buckets": Buckets(decode=(4,), prefill_tokens=(16,), max_prefill_seqs=4),
        "token_budget": 16,
    }
    requests = [
        ask(seed, [*model.prompt[: 9 + 8 * (seed % 5)], seed, *range(seed)], 5)
        for seed in range(16)
    ]
    engine = model.engine(**tight)
    alone = [
        engine.serve([dataclasses.replace(request, reuse=False)])[0].tokens
        for request in requests
    ]
    assert engine.manager.stats.hits == 0
    results = engine.serve(requests)
    assert [result.tokens for result in results] == alone
    assert engine.manager.stats.refused > 0
    assert engine.manager.stats.hits > 0
    engine.check()
    assert used(engine) == (0, 0)


def test_default_buckets_are_few_and_hold_what_the_engine_may_plan() -> None:
    assert default_buckets(8, 256).count == 5
    smallest = default_buckets(1, 1)
    assert (smallest.decode, smallest.prefill_tokens) == ((2,), (2,))
    assert smallest.count == 3
