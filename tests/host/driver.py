"""A serving loop without a model: a manager and a device that remembers."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from jaxcache.host.manager import CacheManager
from jaxcache.host.plans import StepPlan
from jaxcache.host.sizing import Work
from jaxcache.prefixes.lookup import Lookup
from jaxcache.prefixes.nodes import Int32s
from tests.host.device_model import Device, Truth


class Driver:
    """Runs what a manager plans, and checks it.

    Attributes:
        manager: The manager.
        device: The device.
        truths: What each request under way should have, by id.
        in_place: For each step that ran, the seats whose row it read and wrote.
    """

    def __init__(self, manager: CacheManager, vocab: int = 50) -> None:
        self.manager = manager
        self.device = Device(manager.layout, manager.size, vocab)
        self.truths: dict[Hashable, Truth] = {}
        self.in_place: dict[StepPlan, set[int]] = {}
        self.outcomes: dict[StepPlan, list[int]] = {}
        self._free: dict[StepPlan, tuple[list[Int32s], list[int]]] = {}
        self._truths: dict[StepPlan, dict[int, Truth]] = {}

    def add(
        self,
        request_id: Hashable,
        prompt: Sequence[int] | Int32s,
        *,
        scope: Hashable = None,
        **options: Any,
    ) -> Lookup:
        lookup = self.manager.add(
            request_id, np.array(prompt, np.int32), scope=scope, **options
        )
        self.truths[request_id] = Truth([int(token) for token in prompt], scope)
        return lookup

    def plan(self, work: Work, *, run: bool = True) -> StepPlan:
        plan = self.manager.plan(work)
        core = self.manager._core
        groups = range(core.pages.num_groups)
        free = [core.pages.free_slots(group) for group in groups]
        self._free[plan] = (free, core.rows.free_slots())
        self._truths[plan] = {
            seat: self.truths[entry.request_id]
            for seat, entry in zip(plan.seats.tolist(), plan.entries, strict=True)
        }
        if run:
            self.run(plan)
        return plan

    def run(self, plan: StepPlan) -> None:
        """Runs a step on the device; slots that were free are spoiled before."""
        self.device.poison(*self._free.pop(plan))
        samples = [entry.samples for entry in plan.entries]
        truths = self._truths.pop(plan)
        self.outcomes[plan] = self.device.run(plan.inputs, truths, samples)
        reads, writes = self.device.row_index[:, plan.seats]
        self.in_place[plan] = set(plan.seats[reads == writes].tolist())

    def complete(self, plan: StepPlan) -> None:
        self.manager.complete(plan, np.array(self.outcomes.pop(plan), np.int32))

    def step(self, work: Work) -> StepPlan:
        """Plans, runs and completes a step."""
        plan = self.plan(work)
        self.complete(plan)
        return plan

    def prefill(self, request_id: Hashable, chunk: int = 1 << 20) -> None:
        """Runs a prompt to its end, and samples its first token."""
        while True:
            budget = min(chunk, self.manager.remaining(request_id))
            plan = self.step([(request_id, budget)])
            if any(entry.samples for entry in plan.entries):
                break

    def decode(self, request_id: Hashable, count: int) -> None:
        for _ in range(count):
            self.step([(request_id, 1)])

    def serve(
        self,
        request_id: Hashable,
        prompt: Sequence[int],
        new_tokens: int = 1,
        *,
        chunk: int = 1 << 20,
        **options: Any,
    ) -> tuple[int, list[int]]:
        """Serves one request alone.

        Returns:
            The tokens that it reused, and those that it sampled.
        """
        self.add(request_id, prompt, **options)
        self.prefill(request_id, chunk)
        self.decode(request_id, new_tokens - 1)
        reused = self.manager.explain(request_id).reused_tokens
        tokens: list[int] = self.manager.tokens(request_id)[len(prompt) :].tolist()
        self.finish(request_id)
        return reused, tokens

    def finish(self, request_id: Hashable) -> None:
        self.manager.finish(request_id)

    def cancel(self, request_id: Hashable) -> None:
        self.manager.cancel(request_id)
