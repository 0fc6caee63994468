"""Convolution windows equal a token-by-token convolution, wherever they are emitted."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from jaxcache.models.chunks import build_chunk_table
from jaxcache.models.convolution import convolve_token, convolve_tokens
from tests.models.oracle import convolution_steps
from tests.models.segments import (
    CHUNK_SIZE,
    Segments,
    check_emissions,
    pad_entries,
    pad_tokens,
    segments,
)

UNITS, DIM = 3, 2


@functools.partial(jax.jit, static_argnames="has_bias")
def run(inputs, x, initial, weight, bias, has_bias):  # type: ignore[no-untyped-def]
    table = build_chunk_table(inputs, CHUNK_SIZE)
    bias = bias if has_bias else None
    return convolve_tokens(x, initial, weight, bias, table)


@hypothesis.given(segments(), st.integers(0, 2**16), st.sampled_from([2, 4]))
def test_windows_and_outputs_follow_the_definition(
    drawn: Segments, seed: int, num_taps: int
) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(sum(drawn.lengths), UNITS, DIM))
    initial = rng.normal(size=(len(drawn.lengths), UNITS, DIM, num_taps - 1))
    weight = rng.normal(size=(UNITS, DIM, num_taps)).astype(np.float32)
    bias = rng.normal(size=(UNITS, DIM)).astype(np.float32)
    x, initial = x.astype(np.float32), initial.astype(np.float32)
    y, windows = run(
        drawn.inputs(), pad_tokens(x), pad_entries(initial), weight, bias, True
    )
    steps = [
        convolution_steps(x[part], window, weight, bias)
        for part, window in zip(drawn.slices, initial, strict=True)
    ]
    want = np.concatenate([outputs for outputs, _ in steps])
    np.testing.assert_allclose(y[: len(x)], want, rtol=0, atol=1e-5)
    # Windows are inputs that were moved, not computed.
    check_emissions(drawn, windows, [after for _, after in steps], tolerance=0)


@pytest.mark.parametrize("has_bias", [True, False])
def test_one_token_equals_the_definition(has_bias: bool) -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(5, UNITS, DIM)).astype(np.float32)
    initial = rng.normal(size=(5, UNITS, DIM, 3)).astype(np.float32)
    weight = rng.normal(size=(UNITS, DIM, 4)).astype(np.float32)
    bias = rng.normal(size=(UNITS, DIM)).astype(np.float32) if has_bias else None
    y, windows = jax.jit(convolve_token)(x, initial, weight, bias)
    for i in range(5):
        want_y, want = convolution_steps(x[i : i + 1], initial[i], weight, bias)
        np.testing.assert_allclose(y[i], want_y[0], rtol=0, atol=1e-5)
        np.testing.assert_array_equal(windows[i], want[-1].astype(np.float32))
