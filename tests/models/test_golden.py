"""Three checkpoints from the cache give what transformers computes with them."""

import numpy as np
import pytest

from tests.models.driver import Driver, Prefill
from tests.models.golden import (
    NAMES,
    Golden,
    check_logits,
    check_state,
    compiled,
    load_golden,
)

pytestmark = pytest.mark.parametrize("name", NAMES)


def check_continuation(driver: Driver, golden: Golden, seat: int, token: int) -> None:
    assert driver.generate(seat, token, 48) == golden.generated.tolist()


@pytest.mark.parametrize("chunk", [150, 64, 16, 7, 1])
def test_a_prompt_prefilled_in_chunks_of_any_size_is_golden(
    name: str, chunk: int
) -> None:
    golden, driver = load_golden(name), Driver(compiled(name))
    driver.start(0)
    logits = driver.prefill(0, golden.prompt, chunk)
    check_logits(name, golden, logits, 0)
    check_continuation(driver, golden, 0, logits[-1].argmax())
    check_state(driver, golden, 0, driver.pages(0))


@pytest.mark.parametrize("position", [37, 64, 96, 149])
def test_a_snapshot_emitted_inside_anothers_chunk_is_golden(
    name: str, position: int
) -> None:
    golden, driver = load_golden(name), Driver(compiled(name))
    other = golden.prompt.copy()
    other[position:] = (other[position:] + 1) % 256
    snapshot = driver.row(7)
    driver.start(1)
    driver.prefill(1, other, 150, {position: snapshot})
    driver.start(2, snapshot=snapshot, reuse_of=1, length=position)
    logits = driver.prefill(2, golden.prompt[position:], 150)
    check_logits(name, golden, logits, position)
    check_continuation(driver, golden, 2, logits[-1].argmax())
    whole = position // driver.size.tokens_per_page
    pages = driver.pages(1)[:whole] + driver.pages(2)[whole:]
    check_state(driver, golden, 2, pages)


def test_several_snapshots_of_one_chunk_are_each_golden(name: str) -> None:
    golden, driver = load_golden(name), Driver(compiled(name))
    positions = {5: driver.row(5), 16: driver.row(6), 64: driver.row(7)}
    driver.start(0)
    driver.prefill(0, golden.prompt[:70], 150, positions)
    for position, row in positions.items():
        driver.start(1, snapshot=row, reuse_of=0, length=position)
        logits = driver.prefill(1, golden.prompt[position:], 150)
        check_logits(name, golden, logits, position)


def test_a_request_among_others_is_golden(name: str) -> None:
    golden, driver = load_golden(name), Driver(compiled(name))
    rng = np.random.default_rng(0)
    others = rng.integers(256, size=(2, 60))
    for seat in range(4):
        driver.start(seat)
    # Seat 0 decodes throughout; 1 and 3 prefill beside the golden prompt in seat 2.
    first = driver.run(
        prefill=[
            Prefill(1, others[0, :9].tolist()),
            Prefill(2, golden.prompt[:83].tolist(), [(40, driver.row(8))]),
        ]
    )[2]
    second = driver.run(
        {0: 17, 1: 5},
        [
            Prefill(3, others[1].tolist(), [(60, driver.row(9))]),
            Prefill(2, golden.prompt[83:].tolist()),
        ],
    )[2]
    check_logits(name, golden, np.concatenate([first, second]), 0)
    tokens = []
    token = int(second[-1].argmax())
    for step in range(48):
        tokens.append(token)
        decode = {0: step, 2: token, 3: 2 * step}
        if step % 8 == 0:
            prefill = [Prefill(1, [step, 3, 4])]
            token = int(driver.run(decode, prefill)[2][0].argmax())
        else:
            token = int(driver.run(decode)[2][0].argmax())
    assert tokens == golden.generated.tolist()
    check_state(driver, golden, 2, driver.pages(2))


@pytest.mark.parametrize("num_shards", [2, 4])
def test_a_request_on_a_mesh_is_golden(name: str, num_shards: int) -> None:
    # Two KV heads, B/C groups and key heads: four devices hold each of them twice.
    golden, driver = load_golden(name), Driver(compiled(name, num_shards))
    for seat in range(3):
        driver.start(seat)
    # Every step has both parts, so that there is one program to compile.
    logits = driver.run({1: 7}, [Prefill(0, golden.prompt.tolist())])[0]
    check_logits(name, golden, logits, 0)
    tokens = []
    token = int(logits[-1].argmax())
    for step in range(48):
        tokens.append(token)
        token = int(driver.run({0: token}, [Prefill(2, [step, 1])])[0][0].argmax())
    assert tokens == golden.generated.tolist()
    check_state(driver, golden, 0, driver.pages(0))


def test_a_snapshot_on_a_mesh_is_golden(name: str) -> None:
    golden, driver = load_golden(name), Driver(compiled(name, 4))
    snapshot = driver.row(7)
    other = golden.prompt.copy()
    other[37:] = (other[37:] + 1) % 256
    driver.start(0)
    driver.start(1)
    # As above, seat 0 decodes in every step so that there is one program.
    for start in range(0, 150, 64):
        emitted = [(37, snapshot)] if start == 0 else []
        part = other[start : start + 64].tolist()
        driver.run({0: 7}, [Prefill(1, part, emitted)])
    driver.start(2, snapshot=snapshot, reuse_of=1, length=37)
    parts = []
    for start in range(37, 150, 64):
        part = golden.prompt[start : start + 64].tolist()
        parts.append(driver.run({0: 7}, [Prefill(2, part)])[2])
    check_logits(name, golden, np.concatenate(parts), 37)
    driver.start(3)
    tokens = []
    token = int(parts[-1][-1].argmax())
    for step in range(48):
        tokens.append(token)
        token = int(driver.run({2: token}, [Prefill(3, [step, 1])])[2][0].argmax())
    assert tokens == golden.generated.tolist()
    check_state(driver, golden, 2, driver.pages(1)[:2] + driver.pages(2)[2:])
