"""Chunked scans and decode steps equal the recurrence, token by token in float64."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcache.models.chunks import build_chunk_table
from jaxcache.models.decay import segment_sums
from jaxcache.models.gated_delta import (
    gated_delta_token,
    gated_delta_tokens,
    invert_unit_lower,
)
from jaxcache.models.mamba2 import mamba2_token, mamba2_tokens
from tests.models.oracle import Array, gated_delta_steps, mamba2_steps
from tests.models.segments import (
    CHUNK_SIZE,
    Segments,
    check_emissions,
    pad_entries,
    pad_tokens,
    segments,
)

HEADS, GROUPS, INNER, OUTER = 4, 2, 3, 5
TOLERANCE = 3e-6
A = -np.array([0.5, 1.0, 4.0, 16.0], np.float32)


class Mamba2Case:
    """Tokens of a Mamba-2 layer; the state is `[heads, head_dim, state_dim]`."""

    state_shape = (HEADS, INNER, OUTER)

    @staticmethod
    def draw(rng: np.random.Generator, count: int) -> tuple[Array, ...]:
        x = rng.normal(size=(count, HEADS, INNER))
        dt = np.exp(rng.uniform(np.log(1e-3), np.log(2.0), (count, HEADS)))
        b, c = rng.normal(size=(2, count, GROUPS, OUTER))
        return x, dt, b, c

    @staticmethod
    def prefill(table: Any, tokens: Any, initial: Any) -> Any:
        x, dt, b, c = tokens
        return mamba2_tokens(x, dt, jnp.asarray(A), b, c, initial, table)

    @staticmethod
    def token(tokens: Any, state: Any) -> Any:
        x, dt, b, c = tokens
        return mamba2_token(x, dt, jnp.asarray(A), b, c, state)

    @staticmethod
    def steps(tokens: tuple[Array, ...], state: Array) -> tuple[Array, Array]:
        x, dt, b, c = tokens
        return mamba2_steps(x, dt, A, b, c, state)


class GatedDeltaCase:
    """Tokens of a gated delta net; the state is `[heads, key_dim, value_dim]`."""

    state_shape = (HEADS, INNER, OUTER)

    @staticmethod
    def draw(rng: np.random.Generator, count: int) -> tuple[Array, ...]:
        q, k = rng.normal(size=(2, count, GROUPS, INNER))
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        v = rng.normal(size=(count, HEADS, OUTER))
        g = -np.exp(rng.uniform(np.log(1e-3), np.log(60.0), (count, HEADS)))
        beta = rng.uniform(size=(count, HEADS))
        return q, k, v, g, beta

    @staticmethod
    def prefill(table: Any, tokens: Any, initial: Any) -> Any:
        q, k, v, g, beta = tokens
        return gated_delta_tokens(q, k, v, g, beta, initial, table)

    @staticmethod
    def token(tokens: Any, state: Any) -> Any:
        q, k, v, g, beta = tokens
        return gated_delta_token(q, k, v, g, beta, state)

    @staticmethod
    def steps(tokens: tuple[Array, ...], state: Array) -> tuple[Array, Array]:
        q, k, v, g, beta = tokens
        return gated_delta_steps(q, k, v, g, beta, state)


Case = type[Mamba2Case] | type[GatedDeltaCase]
CASES: tuple[Case, ...] = (Mamba2Case, GatedDeltaCase)


def _run(case: Case, inputs: Any, tokens: Any, initial: Any) -> Any:
    return case.prefill(build_chunk_table(inputs, CHUNK_SIZE), tokens, initial)


run = jax.jit(_run, static_argnums=0)


def draw_case(case: Case, drawn: Segments, seed: int) -> tuple[list[Array], Array]:
    rng = np.random.default_rng(seed)
    tokens = case.draw(rng, sum(drawn.lengths))
    initial = rng.normal(size=(len(drawn.lengths), *case.state_shape))
    return [t.astype(np.float32) for t in tokens], initial.astype(np.float32)


@pytest.mark.parametrize("case", CASES)
@hypothesis.given(drawn=segments(), seed=st.integers(0, 2**16))
def test_ragged_chunks_follow_the_recurrence(
    case: Case, drawn: Segments, seed: int
) -> None:
    tokens, initial = draw_case(case, drawn, seed)
    y, states = run(
        case, drawn.inputs(), [pad_tokens(t) for t in tokens], pad_entries(initial)
    )
    steps = [
        case.steps(tuple(t[part] for t in tokens), state)
        for part, state in zip(drawn.slices, initial, strict=True)
    ]
    want = np.concatenate([outputs for outputs, _ in steps])
    np.testing.assert_allclose(
        y[: len(want)], want, rtol=0, atol=TOLERANCE * np.abs(want).max()
    )
    assert not np.asarray(y[len(want) :]).any()
    check_emissions(drawn, states, [after for _, after in steps], TOLERANCE)


@pytest.mark.parametrize("case", CASES)
@hypothesis.given(
    start=st.integers(0, 20), chunks=st.integers(1, 3), seed=st.integers(0, 2**16)
)
def test_a_cut_on_the_chunk_grid_changes_no_bit(
    case: Case, start: int, chunks: int, seed: int
) -> None:
    cut = (start // CHUNK_SIZE + chunks) * CHUNK_SIZE
    whole = Segments((start,), (cut - start + 5,))
    tokens, initial = draw_case(case, whole, seed)
    y, states = run(
        case, whole.inputs(), [pad_tokens(t) for t in tokens], pad_entries(initial)
    )
    count = cut - start
    first = Segments((start,), (count,))
    y_first, between = run(
        case,
        first.inputs(),
        [pad_tokens(t[:count]) for t in tokens],
        pad_entries(initial),
    )
    rest = Segments((cut,), (5,))
    y_rest, end = run(
        case,
        rest.inputs(),
        [pad_tokens(t[count:]) for t in tokens],
        pad_entries(np.asarray(between[:1])),
    )
    np.testing.assert_array_equal(end[0], states[0])
    np.testing.assert_array_equal(
        np.concatenate([y_first[:count], y_rest[:5]]), y[: count + 5]
    )


@pytest.mark.parametrize("case", CASES)
def test_one_token_at_a_time_follows_the_recurrence(case: Case) -> None:
    rng = np.random.default_rng(2)
    tokens = [t.astype(np.float32) for t in case.draw(rng, 40)]
    first = rng.normal(size=case.state_shape).astype(np.float32)
    step = jax.jit(case.token)
    state, ys = jnp.asarray(first)[None], []
    for i in range(40):
        y, state = step([t[i : i + 1] for t in tokens], state)
        ys.append(y[0])
    want, states = case.steps(tuple(tokens), first)
    atol = TOLERANCE * np.abs(want).max()
    np.testing.assert_allclose(np.array(ys), want, rtol=0, atol=atol)
    np.testing.assert_allclose(
        state[0], states[-1], rtol=0, atol=TOLERANCE * np.abs(states[-1]).max()
    )


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_the_inverse_of_a_unit_triangle_is_one(size: int) -> None:
    rng = np.random.default_rng(3)
    lower = np.tril(rng.normal(size=(2, 3, size, size)), -1) / max(size, 4)
    inverse = jax.jit(invert_unit_lower)(lower.astype(np.float32))
    product = (np.eye(size) + lower) @ np.asarray(inverse, np.float64)
    np.testing.assert_allclose(product, np.eye(size) + 0 * lower, atol=2e-6)
    assert not np.triu(np.asarray(inverse), 1).any()


def test_a_segment_between_large_decays_is_summed_precisely() -> None:
    values = np.full(64, -60.0, np.float32)
    values[40:44] = -1e-3
    sums = np.asarray(jax.jit(segment_sums)(values))
    # From the running sums, about -2400, the difference would be off by 1e-4.
    np.testing.assert_allclose(sums[43, 39], -4e-3, rtol=1e-6)
    assert not np.triu(sums).any()
    running = np.cumsum(values.astype(np.float64))
    exact = np.tril(running[:, None] - running[None], -1)
    np.testing.assert_allclose(sums, exact, rtol=3e-6, atol=0)


def test_a_token_without_step_leaves_the_state_alone() -> None:
    rng = np.random.default_rng(4)
    state = rng.normal(size=(1, HEADS, INNER, OUTER)).astype(np.float32)
    for case in CASES:
        tokens = [np.zeros_like(t, np.float32) for t in case.draw(rng, 1)]
        y, after = case.token(tokens, state)
        np.testing.assert_array_equal(after, state)
        assert not np.asarray(y).any()
