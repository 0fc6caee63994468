"""Any order of arrival and any budget give the tokens of serving one by one."""

import functools

import numpy as np
from hypothesis import given, settings, strategies as st

from jaxcache.engine import Finish, Request, Result
from tests.engine.serving import EXACT, load_golden

NEW_TOKENS = 6


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Prompts that share prefixes in and out of page boundaries, and that do not."""
    rng = np.random.default_rng(7)
    base = rng.integers(0, 256, 150)
    tails = [rng.integers(0, 256, n) for n in (1, 16, 30)]
    made = [base[:16], base[:17], base[:70], base[:150], tails[2]]
    made += [np.concatenate([base[:cut], t]) for cut in (32, 70, 101) for t in tails]
    return tuple(tuple(prompt.tolist()) for prompt in made)


@functools.cache
def alone(index: int) -> tuple[int, ...]:
    """What a prompt is continued with when nothing else was ever served."""
    engine = load_golden(EXACT).engine()
    prompt = prompts()[index]
    (result,) = engine.serve([Request(id=0, prompt=prompt, max_new_tokens=NEW_TOKENS)])
    return result.tokens


arrivals = st.lists(
    st.tuples(
        st.integers(0, 13),  # which prompt
        st.integers(1, NEW_TOKENS),  # tokens wanted
        st.integers(0, 4),  # steps until the next arrives
        st.sampled_from([None, None, None, 0, 2, 5]),  # steps until it is cancelled
    ),
    min_size=1,
    max_size=9,
)


@settings(max_examples=25)
@given(
    arrivals=arrivals,
    token_budget=st.sampled_from([1, 3, 17, 64, 160]),
    overlap=st.booleans(),
)
def test_tokens_do_not_depend_on_who_else_is_served(
    arrivals: list[tuple[int, int, int, int | None]], token_budget: int, overlap: bool
) -> None:
    engine = load_golden(EXACT).engine(token_budget=token_budget, overlap=overlap)
    cancels: list[tuple[int, int]] = []
    results: dict[object, Result] = {}
    now = 0

    def step() -> None:
        nonlocal now
        for when, name in cancels:
            if when == now and name not in results:
                engine.cancel(name)
        results.update((result.id, result) for result in engine.step().finished)
        engine.manager.check()
        now += 1

    for name, (index, new_tokens, wait, cancel_after) in enumerate(arrivals):
        engine.submit(
            Request(id=name, prompt=prompts()[index], max_new_tokens=new_tokens)
        )
        if cancel_after is not None:
            cancels.append((now + cancel_after, name))
        for _ in range(wait):
            step()
    while len(engine):
        step()
    engine.check()
    assert len(results) == len(arrivals)
    for name, (index, new_tokens, _, cancel_after) in enumerate(arrivals):
        result = results[name]
        expected = alone(index)[:new_tokens]
        if result.finish is Finish.CANCELLED:
            assert cancel_after is not None
            expected = expected[: len(result.tokens)]
        assert result.tokens == expected
