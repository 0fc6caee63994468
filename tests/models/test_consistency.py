"""Out of the box a token is worth the same in prefill and in decode.

Reuse rests on it. transformers does not keep to it for these two, so its tokens cannot
say whether the models do, see docs/models.md.
"""

import numpy as np
import pytest

from jaxcache.layouts.roles import KEY, VALUE
from tests.models.driver import Driver
from tests.models.golden import check_logits, compiled, load_golden

# Measured: logits 1e-5 apart, state 6e-6. What transformers does
# puts them 3e-3 apart and more.
TOLERANCE = 5e-5


@pytest.mark.parametrize("name", ["bamba", "nemotron_h"])
def test_decode_computes_what_prefill_computes(name: str) -> None:
    golden = load_golden(name)
    driver = Driver(compiled(name, match_transformers=False))
    driver.start(0)
    driver.start(1)
    whole = driver.prefill(0, golden.tokens, 150)
    parts = [driver.prefill(1, golden.prompt, 150)]
    parts += [driver.run({1: token})[1] for token in golden.generated.tolist()]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=TOLERANCE)
    layout = driver.compiled.layout
    for layer_id in layout.model.layer_ids:
        for role in layout.row_roles(layer_id):
            once, stepped = driver.buffer(
                layer_id, role, [driver.row(0), driver.row(1)]
            )
            np.testing.assert_allclose(stepped, once, rtol=0, atol=TOLERANCE)
        if not layout.row_roles(layer_id):
            for role in (KEY, VALUE):
                once, stepped = (
                    driver.tokens_of(seat, layer_id, role, driver.pages(seat))
                    for seat in (0, 1)
                )
                np.testing.assert_allclose(stepped, once, rtol=0, atol=TOLERANCE)


def test_bamba_is_golden_until_a_rotation_counts() -> None:
    golden = load_golden("bamba")
    driver = Driver(compiled("bamba", match_transformers=False))
    driver.start(0)
    logits = driver.prefill(0, golden.prompt, 150)
    check_logits("bamba", golden, logits, 0)
    tokens = driver.generate(0, int(logits[-1].argmax()), 6)
    assert tokens[:5] == golden.generated[:5].tolist()
    assert tokens[5] != golden.generated[5]


def test_nemotron_h_takes_smaller_steps_than_golden() -> None:
    golden = load_golden("nemotron_h")
    driver = Driver(compiled("nemotron_h", match_transformers=False))
    driver.start(0)
    logits = driver.prefill(0, golden.prompt, 150)
    assert 0.012 < np.abs(logits - golden.logits).max() < 0.013
    tokens = driver.generate(0, int(logits[-1].argmax()), 48)
    assert tokens == golden.generated.tolist()
