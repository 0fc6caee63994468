"""Three checkpoints through the whole stack: the tokens that transformers computes."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcache.engine import Engine, Request, Result
from tests.engine.serving import Golden, make_prompt, serve_and_watch
from tests.models.golden import check_cache, load_golden as load_state

NEW_TOKENS = 48


def ask(golden: Golden, name: str = "golden", **options: object) -> Request:
    return Request(
        id=name,
        prompt=golden.prompt,
        max_new_tokens=NEW_TOKENS,
        **options,  # type: ignore[arg-type]
    )


def serve_one(engine: Engine, request: Request) -> Result:
    (result,) = engine.serve([request])
    engine.check()
    return result


@pytest.mark.parametrize("token_budget", [1, 7, 16, 64, 150])
def test_a_prompt_in_chunks_of_any_size_continues_as_golden(
    golden: Golden, token_budget: int
) -> None:
    engine = golden.engine(token_budget=token_budget)
    result = serve_one(engine, ask(golden))
    assert result.tokens == golden.generated
    assert (result.reused_tokens, result.computed_tokens) == (0, 150)


def test_the_same_prompt_again_reuses_its_last_page_boundary(golden: Golden) -> None:
    engine = golden.engine()
    serve_one(engine, ask(golden, "first"))
    again = serve_one(engine, ask(golden, "second"))
    assert again.tokens == golden.generated
    assert again.reused_tokens >= 144
    assert again.computed_tokens == 150 - again.reused_tokens


@pytest.mark.parametrize("position", [37, 64, 96, 149])
def test_a_snapshot_inside_anothers_chunk_continues_as_golden(
    golden: Golden, position: int
) -> None:
    engine = golden.engine()
    other = np.concatenate([golden.prompt[:position], make_prompt(position, 50)])
    other[position] = (golden.prompt[position] + 1) % 256
    serve_one(
        engine,
        Request(id="other", prompt=other, max_new_tokens=3, points=(position,)),
    )
    result = serve_one(engine, ask(golden))
    assert result.reused_tokens == position
    assert result.tokens == golden.generated


def test_the_next_turn_reuses_the_answer(model: Golden) -> None:
    engine = model.engine()
    serve_one(engine, Request(id="turn 1", prompt=model.prompt, max_new_tokens=20))
    history = [*model.prompt.tolist(), *model.generated[:20]]
    result = serve_one(engine, Request(id="turn 2", prompt=history, max_new_tokens=28))
    # All but the token that was sampled last, which nobody has computed yet.
    assert result.reused_tokens == 169
    assert result.tokens == model.generated[20:]


def test_what_was_evicted_is_computed_again(golden: Golden) -> None:
    engine = golden.engine()
    serve_one(engine, ask(golden, "before"))
    for seed in range(4):
        prompt = make_prompt(seed, 170)
        serve_one(engine, Request(id=seed, prompt=prompt, max_new_tokens=4))
    # One token more than is golden, so that the last golden one reaches the cache.
    more = dataclasses.replace(ask(golden, "after"), max_new_tokens=NEW_TOKENS + 1)
    after, pages, row = serve_and_watch(engine, more)
    assert after.reused_tokens < 144
    assert after.tokens[:NEW_TOKENS] == golden.generated
    check_cache(engine.pipeline.state, load_state(golden.name), pages, row)
    engine.check()
    assert serve_one(engine, ask(golden, "again")).tokens == golden.generated


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_among_others_continues_as_golden(
    golden: Golden, overlap: bool
) -> None:
    engine = golden.engine(token_budget=64, overlap=overlap)
    others = [
        Request(id=seed, prompt=make_prompt(seed, 20 + 9 * seed), max_new_tokens=9)
        for seed in range(6)
    ]
    twin = ask(golden, "twin")
    results = engine.serve([*others[:3], ask(golden), *others[3:], twin])
    tokens = {result.id: result.tokens for result in results}
    assert tokens["golden"] == tokens["twin"] == golden.generated
    engine.check()


def test_old_bits_never_reach_a_fresh_request(golden: Golden) -> None:
    engine = golden.engine(token_budget=64)
    state = engine.pipeline.state
    engine.pipeline.state = dataclasses.replace(
        state, pools=tuple(pool.at[1:].set(jnp.nan) for pool in state.pools)
    )
    results = engine.serve([ask(golden, "one"), ask(golden, "two")])
    assert [result.tokens for result in results] == [golden.generated] * 2
    assert serve_one(engine, ask(golden, "again")).tokens == golden.generated
