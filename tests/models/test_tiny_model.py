"""The tiny random model: what it computes does not depend on how tokens came."""

import functools

import numpy as np
import pytest
from flax import nnx

from jaxcache.models import TINY_CONFIG, random_model
from tests.models.driver import Compiled, Driver, Prefill


@functools.cache
def tiny() -> Compiled:
    return Compiled(random_model(TINY_CONFIG, 3))


def tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=count)


def test_a_decoded_token_gives_what_a_prefilled_one_does() -> None:
    driver = Driver(tiny())
    history = tokens(120)
    driver.start(0)
    expected = driver.prefill(0, history, 150)
    driver.start(1)
    logits = [driver.prefill(1, history[:50], 150)]
    for token in history[50:].tolist():
        logits.append(driver.run({1: token})[1])
    np.testing.assert_allclose(np.concatenate(logits), expected, rtol=0, atol=2e-5)


def test_a_cut_on_the_chunk_grid_changes_no_bit() -> None:
    driver = Driver(tiny())
    history = tokens(140)
    driver.start(0)
    whole = driver.prefill(0, history, 150)
    driver.start(1)
    first = driver.prefill(1, history[:64], 150)
    rest = driver.prefill(1, history[64:], 150)
    np.testing.assert_array_equal(np.concatenate([first, rest]), whole)


def test_the_rest_of_a_step_changes_no_bit() -> None:
    driver = Driver(tiny())
    history = tokens(60)
    for seat in range(4):
        driver.start(seat)
    alone = driver.run({3: 1}, [Prefill(0, history.tolist())])[0]
    among = driver.run(
        {2: 5, 3: 2}, [Prefill(1, history.tolist()), Prefill(0, tokens(70, 1).tolist())]
    )[1]
    np.testing.assert_array_equal(among, alone)


def test_the_best_token_is_rarely_a_near_tie() -> None:
    driver = Driver(tiny())
    driver.start(0)
    top = np.sort(driver.prefill(0, tokens(200), 150), axis=-1)[:, -2:]
    gaps = top[:, 1] - top[:, 0]
    assert np.median(gaps) > 0.5
    assert gaps.min() > 1e-3


def test_weights_are_those_of_the_seed() -> None:
    first, same, other = (
        nnx.to_flat_state(nnx.state(random_model(TINY_CONFIG, seed)))
        for seed in (3, 3, 4)
    )
    for (path, one), (_, two), (_, three) in zip(first, same, other, strict=True):
        np.testing.assert_array_equal(one[...], two[...])
        # The skip weights of Mamba-2 are ones for every seed.
        assert path[-1] == "skip" or not np.array_equal(one[...], three[...])


def test_a_chunk_size_that_is_no_power_of_two_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_size must be a power of two, got 48"):
        random_model(TINY_CONFIG, 3, chunk_size=48)
