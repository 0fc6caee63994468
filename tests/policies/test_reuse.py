"""The index against a search over all horizons, counts against single ones."""

import math
import random

import numpy as np
import pytest

from jaxcache.policies import reuse
from jaxcache.policies.policy import BRANCH, KINDS, RESPONSE
from jaxcache.policies.reuse import (
    AGES,
    CHAIN_STEP,
    HITS_STEP,
    KIND_STEP,
    NEW_STEP,
    NUM_AGES,
    NUM_CLASSES,
    SUPERSEDED_STEP,
    SWEEP,
    UNKNOWN_RESPONSE,
    ReuseTables,
    bucket_of,
    class_of,
    gittins,
    hazards,
    response_of,
)


def brute_force_index(hazard: np.ndarray, start: int) -> float:
    """P(a hit within T) / E[time until the hit or T], for every T, in small steps."""
    widths = np.diff(AGES, append=2 * AGES[-1])
    best, alive, waited = 0.0, 1.0, 0.0
    for age in range(start, len(hazard)):
        steps = 2000
        step = widths[age] / steps
        for _ in range(steps):
            died = alive * -math.expm1(-hazard[age] * step)
            waited += (alive - died / 2) * step
            alive -= died
        best = max(best, (1 - alive) / waited)
    return best


@pytest.mark.parametrize("seed", range(3))
def test_index_is_the_best_rate_over_all_horizons(seed: int) -> None:
    rng = np.random.default_rng(seed)
    hazard = 10 ** rng.uniform(-6, -1, NUM_AGES)
    index = gittins(hazard[:, None])[:, 0]
    for start in range(0, NUM_AGES, 5):
        assert index[start] == pytest.approx(brute_force_index(hazard, start), rel=0.01)


def test_index_looks_past_a_pause() -> None:
    hazard = np.full((NUM_AGES, 1), 1e-6)
    hazard[bucket_of(128)] = 0.05
    index = gittins(hazard)[:, 0]
    assert index[bucket_of(64)] > 100 * 1e-6
    assert index[bucket_of(128)] == pytest.approx(0.05)
    assert index[bucket_of(256)] == pytest.approx(1e-6)


def test_index_of_a_certain_hit_is_finite() -> None:
    assert np.isfinite(gittins(np.full((NUM_AGES, 2), 50.0))).all()


def test_hazard_goes_from_the_prior_to_the_evidence() -> None:
    none = hazards(np.zeros(1), np.zeros(1), 0.01, 1.0)
    much = hazards(np.full(1, 1e6), np.full(1, 4e6), 0.01, 1.0)
    assert none[0] == pytest.approx(0.01)
    assert much[0] == pytest.approx(0.25, rel=1e-3)


def test_each_age_has_its_bucket() -> None:
    for age in (*range(1, 70), 511, 512, 8191, 8192, 10**6):
        bucket = bucket_of(age)
        assert AGES[bucket] <= age
        assert bucket + 1 == NUM_AGES or age < AGES[bucket + 1]


def test_fields_of_a_class() -> None:
    seen = set()
    for chain in range(6):
        for new_tokens in (0, 255, 256, 1023, 1024, 4095, 4096, 10**6):
            rest = class_of(chain, new_tokens)
            assert rest // CHAIN_STEP == min(chain, 3)
            assert rest % CHAIN_STEP // NEW_STEP == sum(
                new_tokens >= border for border in (256, 1024, 4096)
            )
            assert rest % NEW_STEP == UNKNOWN_RESPONSE
            seen.add(rest)
    assert len(seen) == 16
    assert [response_of(tokens) for tokens in (1, 99, 100, 299, 300, 699, 700)] == [
        *(0, 0, 1, 1, 2, 2, 3)
    ]
    top = (len(KINDS) - 1) * KIND_STEP + 4 * HITS_STEP + SUPERSEDED_STEP
    assert top + class_of(9, 10**6) == NUM_CLASSES - 1


def test_exposure_is_what_a_count_one_by_one_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each snapshot lives one request at each age until it is used."""
    monkeypatch.setattr(reuse, "KEPT", 1.0)
    rng = random.Random(0)
    tables = ReuseTables()
    offsets = [tables.offset(UNKNOWN_RESPONSE), tables.offset(0)]
    assert offsets == [NUM_AGES, 2 * NUM_AGES]
    counted = np.zeros((NUM_AGES, 2))
    hits = np.zeros((NUM_AGES, 2))
    there: list[tuple[int, int]] = []
    for _ in range(300 * SWEEP):
        tables.tick()
        now = tables.requests
        for class_id, last in there:
            counted[bucket_of(now - last), class_id] += 1
        for each in [each for each in there if rng.random() < 0.02]:
            there.remove(each)
            class_id, last = each
            if class_id == 0:
                tables.hit(offsets[class_id], last)
                hits[bucket_of(now - last), class_id] += 1
            tables.leave([offsets[class_id]], last)
        fresh = rng.randrange(2)
        there.append((fresh, now))
        tables.enter([offsets[fresh]], now)
    for _ in range(SWEEP):
        tables.tick()
    np.testing.assert_array_equal(tables._hits[1:3].T, hits)
    assert tables._cohorts[:, 1:3].sum(axis=0).tolist() == [
        sum(class_id == number for class_id, _ in there) for number in range(2)
    ]
    enough = counted > 1500
    assert enough.sum() > 20
    got = tables._exposure[1:3].T
    np.testing.assert_allclose(got[enough], counted[enough], rtol=0.1)


def test_old_cohorts_keep_their_count() -> None:
    """Past the oldest age nothing is lost, and what leaves late leaves its bucket."""
    tables = ReuseTables()
    assert [tables.offset(class_id) for class_id in range(7)][-1] == 7 * NUM_AGES
    for _ in range(9000):
        tables.tick()
        tables.enter([7 * NUM_AGES], tables.requests)
    for _ in range(9000):
        tables.tick()
    assert tables._aging[7, -1] > 8000
    for last in range(1, 9001):
        tables.leave([7 * NUM_AGES], last)
    for _ in range(SWEEP):
        tables.tick()
    assert not tables._aging.any()
    assert not tables._cohorts.any()


def learn(tables: ReuseTables, class_id: int, age: int, hit: bool) -> None:
    offset = tables.offset(class_id)
    for _ in range(60):
        start = tables.requests
        tables.enter([offset] * 4, start)
        for _ in range(age):
            tables.tick()
        if hit:
            tables.hit(offset, start)
        tables.leave([offset] * 4, start)
    for _ in range(reuse.REFRESH):
        tables.tick()


def test_a_class_without_evidence_borrows_from_the_coarser_one() -> None:
    branch = KINDS.index(BRANCH) * KIND_STEP
    response = KINDS.index(RESPONSE) * KIND_STEP
    tables = ReuseTables()
    learn(tables, branch + class_of(1, 100), 40, hit=True)
    learn(tables, response + class_of(1, 100), 40, hit=False)
    known = tables.fresh_index(tables.offset(branch + class_of(1, 100)))
    like_it = tables.fresh_index(tables.offset(branch + class_of(2, 5000)))
    unlike = tables.fresh_index(tables.offset(response + class_of(2, 5000)))
    nothing = tables.fresh_index(tables.offset(class_of(2, 5000)))  # marked, never met
    assert known == pytest.approx(like_it, rel=0.01)
    assert like_it > 20 * unlike
    assert nothing >= reuse.PRIOR_KNOWN


def test_the_tables_grow_with_the_classes() -> None:
    tables = ReuseTables()
    for class_id in range(0, NUM_CLASSES, 7):
        offset = tables.offset(class_id)
        tables.enter([offset], tables.requests)
        tables.hit(offset, tables.requests)
        tables.tick()
    assert not tables.index[:NUM_AGES].any()
    assert (tables.index[NUM_AGES : offset + NUM_AGES] > 0).all()
    assert tables.offset(14) == 3 * NUM_AGES
