"""Decode steps that go on from the last plan are those that would be planned anew."""

import dataclasses
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest

from jaxcache.host.errors import Refused
from jaxcache.host.manager import CacheManager
from jaxcache.host.plans import StepPlan
from jaxcache.layouts import NULL_SLOT
from tests.host.caches import KINDS, make_manager


class Twins:
    """Two managers that are asked the same; the second one plans every step anew."""

    def __init__(self, **options: Any) -> None:
        self.both = (make_manager(**options), make_manager(**options))
        self.goes_on = 0

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any, **keywords: Any) -> Any:
            first, second = (
                getattr(manager, name)(*args, **keywords) for manager in self.both
            )
            np.testing.assert_equal(first, second)
            return first

        return ask

    def plan(self, work: list[tuple[int, int]]) -> tuple[StepPlan, StepPlan] | None:
        first, second = self.both
        try:
            plan = first.plan(work)
        except Refused as refusal:
            with pytest.raises(type(refusal)):
                second.plan(work)
            return None
        self.goes_on += first._core.run is not None
        second._core.stop_run()
        other = second.plan(work)
        assert plan.inputs.bucket == other.inputs.bucket
        np.testing.assert_array_equal(plan.inputs.packed, other.inputs.packed)
        np.testing.assert_equal(plan.inputs.extra_updates, other.inputs.extra_updates)
        assert plan.entries == other.entries
        np.testing.assert_array_equal(plan.seats, other.seats)
        assert plan.inputs.packed.ctypes.data % 64 == 0
        return plan, other

    def complete(self, plans: tuple[StepPlan, StepPlan], tokens: Any) -> None:
        for manager, plan in zip(self.both, plans, strict=True):
            manager.complete(plan, tokens)

    def abandon(self, plans: tuple[StepPlan, StepPlan], ran: bool) -> None:
        for manager, plan in zip(self.both, plans, strict=True):
            manager.abandon(plan, ran=ran)

    def compare(self) -> None:
        for manager in self.both:
            manager.check()
        first, second = (
            dataclasses.replace(manager.stats, plan_ns=0, complete_ns=0)
            for manager in self.both
        )
        assert first == second


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(6))
def test_going_on_plans_what_planning_anew_would(kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    twins = Twins(kind=kind, num_pages=54, num_rows=14, max_tokens=160, max_seqs=6)
    running: list[int] = []
    flying: list[tuple[StepPlan, StepPlan]] = []
    number, late = 0, bool(seed % 2)

    def complete() -> None:
        plans = flying.pop(0)
        sampled = rng.integers(0, 99, len(plans[0].seats))
        twins.complete(plans, sampled.astype(rng.choice(["i4", "i8", "u4"])))

    for _ in range(400):
        chance = rng.random()
        if chance < 0.03 and len(running) < 6:
            prompt = rng.integers(0, 2, rng.integers(1, 60), np.int32)
            twins.add(number, prompt)
            running.append(number)
            number += 1
        elif chance < 0.05 and running:
            end = twins.finish if rng.random() < 0.7 else twins.cancel
            end(running.pop(int(rng.integers(len(running)))))
        elif chance < 0.07 and flying:
            ran = rng.random() < 0.3
            twins.abandon(flying.pop(), ran)
        elif chance < 0.10 and running:
            request = int(rng.choice(running))
            twins.tokens(request)
            twins.history(request)
            twins.remaining(request)
        elif chance < 0.11:
            twins.compare()
        elif running:
            while len(flying) > late:
                complete()
            work = [(request, 40) for request in running]
            try:
                plans = twins.plan(work)
            except ValueError as error:
                # Full, or halted until the plan before is completed.
                if flying:
                    complete()
                elif "max_tokens" in str(error):
                    twins.finish(running.pop(0))
                continue
            if plans is not None:
                flying.append(plans)
            elif flying:
                complete()
            else:
                twins.cancel(running.pop())
    while flying:
        complete()
    for request in running:
        twins.tokens(request)
        twins.finish(request)
    twins.compare()
    assert twins.goes_on > 30


def decoding(contexts: list[int], **options: Any) -> tuple[CacheManager, list[Any]]:
    """Returns a manager in the midst of decoding, and its work."""
    manager = make_manager(max_seqs=8, max_tokens=4096, num_pages=3000, **options)
    for request, tokens in enumerate(contexts):
        manager.add(request, np.full(tokens, request, np.int32))
        plan = manager.plan([(request, tokens)])
        manager.complete(plan, [0])
    work = [(request, 1) for request in range(len(contexts))]
    for _ in range(3):
        manager.complete(manager.plan(work), np.zeros(len(contexts), np.int32))
    return manager, work


def test_sampled_tokens_are_written_down_however_long_nobody_asks() -> None:
    manager, work = decoding([5, 6, 7])
    for step in range(200):
        tokens = np.array([3, 4, 5]) + 10 * step
        manager.complete(manager.plan(work), tokens)
        tokens[:] = 0  # The caller's array again.
    expected = 4 + 10 * np.arange(200)
    np.testing.assert_array_equal(manager.tokens(1)[-200:], expected)
    assert manager.history(1) == len(manager.tokens(1)) - 1
    manager.check()


def test_wrong_tokens_change_nothing_in_a_run() -> None:
    manager, work = decoding([5, 6])
    plan = manager.plan(work)
    assert plan.run is not None
    for wrong in ([1, -1], [1 << 31, 0], [0.5, 1.0], [1]):
        with pytest.raises(ValueError, match="next_tokens must be"):
            manager.complete(plan, wrong)
    manager.complete(plan, [8, 9])
    assert manager.tokens(1)[-1] == 9


@pytest.mark.parametrize("number", [True, 1.0, 0, "1"])
def test_a_run_does_not_take_for_one_what_only_equals_it(number: Any) -> None:
    manager, work = decoding([5, 6])
    with pytest.raises(ValueError, match="at least 1 token"):
        manager.plan([work[0], (1, number)])
    assert manager.plan([(0, 1), (1, 1)]).run is not None


def arrays(plan: StepPlan) -> tuple[Any, ...]:
    ends = (plan.starts, plan.ends, plan.grown_indices)
    return (plan.inputs.packed, plan.updates, *ends)


def test_what_was_handed_out_never_changes() -> None:
    manager, work = decoding([9, 30, 47])
    plans, copies = [], []
    for step in range(100):
        plan = manager.plan(work)
        plans.append(plan)
        copies.append([array.copy() for array in arrays(plan)])
        manager.complete(plan, np.full(3, step))
    for plan, before in zip(plans, copies, strict=True):
        for array, copy in zip(arrays(plan), before, strict=True):
            np.testing.assert_array_equal(array, copy)
    pages = [plan.updates[3] for plan in plans]
    assert NULL_SLOT not in np.concatenate(pages)


def cost(contexts: list[int]) -> tuple[int, int, int]:
    """Returns calls, most bytes allocated and bytes uploaded of 32 decode steps."""
    manager, work = decoding(contexts)
    tokens = np.zeros(len(contexts), np.int32)
    calls = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    uploaded = manager.stats.bytes_uploaded
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    sys.setprofile(count)
    try:
        for _ in range(32):
            manager.complete(manager.plan(work), tokens)
    finally:
        sys.setprofile(None)
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
    return calls, peak, manager.stats.bytes_uploaded - uploaded


def test_the_work_of_a_decode_step_does_not_grow_with_the_context() -> None:
    short = cost([20, 21, 22, 23])
    long = cost([4020 - 16, 4021 - 16, 4022 - 16, 4023 - 16])
    assert long[0] == short[0]
    assert long[1] < short[1] + 4096
    assert long[2] == short[2]
