"""The serving loop: admits, plans, launches a step, and lands the one before.

Planning hides behind the device, because nothing in plan n + 1 depends on what step n
samples: the tokens stay on the device, and whether a request ends by its length is
known beforehand. A request that ends early, by an end-of-sequence token, has computed
one token too many by then; its pages and row are given back when that last step has
landed.
"""

import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax

from jaxcache.engine.admission import Admission
from jaxcache.engine.model_step import CachedModel, ModelStep
from jaxcache.engine.pipeline import Pipeline
from jaxcache.engine.request import Finish, Progress, Request, Result
from jaxcache.engine.roster import Active, Roster
from jaxcache.engine.schedule import Limits
from jaxcache.host.core import check_hashable
from jaxcache.host.errors import Refused
from jaxcache.host.manager import CacheManager
from jaxcache.host.plans import StepPlan
from jaxcache.inputs.buckets import Buckets
from jaxcache.layouts import CacheLayout, CacheSize
from jaxcache.layouts.arguments import (
    MAX_SIZE,
    boolean,
    check_callable,
    check_kind,
    integer,
)

# One step runs while the next is planned and launched. More in flight would hide
# nothing more and let a request that has ended compute further.
MAX_IN_FLIGHT = 2


class Engine:
    """Serves requests from one cache, many at a time; for one thread.

    Attributes:
        layout: What bytes of the cache lie where.
        size: How much the cache holds.
        buckets: The shapes that a step may have.
        manager: The host side: who holds what, and what can be reused.
        pipeline: The device side: the cache's state, and the steps in flight.
    """

    def __init__(
        self,
        model: CachedModel | ModelStep,
        *,
        num_pages: int | None = None,
        num_rows: int | None = None,
        max_seqs: int = 8,
        max_tokens: int = 4096,
        tokens_per_page: int = 16,
        token_budget: int = 256,
        buckets: Buckets | None = None,
        overlap: bool = True,
        mesh: jax.sharding.Mesh | None = None,
        **manager_options: Any,
    ) -> None:
        """Makes the cache; nothing is compiled yet.

        Args:
            model: A reference model, or a `ModelStep` to share with other engines.
            num_pages: Pages of each page group. Default: twice what `max_seqs` requests
                of `max_tokens` hold.
            num_rows: Rows, of running requests and of snapshots together. Default: four
                for each of `max_seqs`.
            max_seqs: The most requests that run at once.
            max_tokens: The most tokens of a request, prompt and answer together.
            tokens_per_page: Tokens of a page.
            token_budget: The most tokens that a step computes.
            buckets: The shapes that a step may have. Default: few, as large as
                `max_seqs` and `token_budget` need.
            overlap: Whether a step is planned and launched while the one before runs.
            mesh: Devices with an axis `tensor` to split the units over. Default: one
                device.
            **manager_options: Passed on to `CacheManager`, for example `policy`.

        Raises:
            ValueError: naming the argument, if the cache or the steps cannot work.
        """
        max_seqs = integer("max_seqs", max_seqs, 1, MAX_SIZE)
        max_tokens = integer("max_tokens", max_tokens, 1, MAX_SIZE)
        token_budget = integer("token_budget", token_budget, 1, MAX_SIZE)
        boolean("overlap", overlap)
        if mesh is not None:
            check_kind("mesh", mesh, jax.sharding.Mesh)
        if buckets is not None:
            check_kind("buckets", buckets, Buckets)
        if not isinstance(model, ModelStep):
            model = ModelStep(model, mesh=mesh)
        self._step = model
        self._mesh = mesh
        num_shards = 1 if mesh is None else mesh.shape.get("tensor", 1)
        layout = CacheLayout(model.layout, tokens_per_page, num_shards)
        if num_pages is None:
            pages = -(-max_tokens // layout.tokens_per_page)
            num_pages = min(MAX_SIZE, 2 * max_seqs * pages)
        if num_rows is None:
            num_rows = min(MAX_SIZE, 4 * max_seqs) if layout.has_recurrent else 0
        self.layout = layout
        self.size = CacheSize.create(
            layout, num_pages, num_rows, max_seqs=max_seqs, max_tokens=max_tokens
        )
        if buckets is None:
            # Not more than all requests together could ever want.
            largest = min(token_budget, max_seqs * max_tokens)
            buckets = default_buckets(max_seqs, largest)
        self.buckets = buckets
        if not self.buckets.decode or not self.buckets.prefill_tokens:
            raise ValueError(
                f"buckets must have decode and prefill_tokens sizes, got {self.buckets}"
            )
        self._limits = Limits(
            token_budget=token_budget,
            decode_seqs=self.buckets.max_decode,
            prefill_seqs=self.buckets.max_prefill_seqs,
            prefill_tokens=self.buckets.max_prefill_tokens,
        )
        self._max_in_flight = MAX_IN_FLIGHT if overlap else 1
        self._manager_options = manager_options
        self._ended: list[Result] = []
        self._start_empty()

    def _start_empty(self) -> None:
        """Starts over: nothing cached, no requests."""
        self.pipeline = Pipeline(
            self._step, self.layout, self.size, self._mesh, self._max_in_flight
        )
        self.manager = CacheManager(
            self.layout, self.size, self.buckets, **self._manager_options
        )
        self._admission = Admission(
            self.layout, self.size, self._step.vocab_size, self.manager.worst_case_pages
        )
        self._roster = Roster(self._admission.capacity, self._limits)

    def warm_up(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every shape that a step can have and runs each once, on padding.

        Args:
            progress: Called with the number of shapes that are ready, and of all.

        Raises:
            RuntimeError: if requests are under way.
        """
        if progress is not None:
            check_callable("progress", progress)
        self._require_idle("warm_up")
        self.pipeline.warm_up(self.buckets, progress)

    # -- asking ------------------------------------------------------------------------

    def serve(
        self,
        requests: Iterable[Request],
        *,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[Result]:
        """Serves requests to their end.

        Args:
            requests: What to serve; the engine must be idle.
            progress: Called after every step with what it brought.

        Returns:
            One result a request, in the order of the requests.

        Raises:
            ValueError: if a request can never be served, or an argument is none. No
                request has been started then.
            RuntimeError: if requests are under way; mix them by `submit` and `step`.
        """
        check_kind("requests", requests, Iterable)
        if progress is not None:
            check_callable("progress", progress)
        self._require_idle("serve")
        requests = list(requests)
        results: dict[Hashable, Result] = {}
        try:
            for request in requests:
                self.submit(request)
            while len(self):
                brought = self.step()
                results.update((result.id, result) for result in brought.finished)
                if progress is not None:
                    progress(brought)
        except BaseException:
            self.abort()
            raise
        return [results[request.id] for request in requests]

    def submit(self, request: Request) -> None:
        """Puts a request in line; it starts in one of the next steps.

        Raises:
            ValueError: if its id is taken, or it can never be served.
        """
        check_kind("request", request, Request)
        if request.id in self._roster:
            raise ValueError(f"id {request.id!r} is already under way")
        prompt, need = self._admission.examine(request)
        self._roster.add(
            Active(
                request=request,
                prompt=prompt,
                need=need,
                submitted_s=time.perf_counter(),
                prompt_left=len(prompt),
                new_left=request.max_new_tokens,
            )
        )

    def cancel(self, request_id: Hashable) -> None:
        """Ends a request early; the next step brings its result, as far as it came.

        Raises:
            ValueError: if the engine holds no such request.
        """
        check_hashable("request_id", request_id)
        if request_id not in self._roster:
            raise ValueError(f"request_id {request_id!r} is not under way")
        active = self._roster[request_id]
        if active.ending is None:
            active.ending = Finish.CANCELLED
            self._roster.withdraw(active)
            if not active.steps_in_flight:
                self._end(active)

    def abort(self) -> None:
        """Cancels every request at once, without results; what was published stays."""
        self.pipeline.give_up()
        for plan in reversed(self.manager.plans_in_flight):
            self.manager.abandon(plan, ran=True)
        for active in list(self._roster):
            if active.request.id in self.manager:
                self.manager.cancel(active.request.id)
            self._roster.remove(active)
        self._ended.clear()
        if self.pipeline.is_lost:
            self._start_empty()

    # -- the loop ----------------------------------------------------------------------

    def step(self) -> Progress:
        """Launches a step and lands the one before; waits for the device, never spins.

        An error on the way leaves nothing behind: plans are abandoned, all requests are
        cancelled, and the error goes on to the caller.
        """
        try:
            launched = self._launch()
            in_flight = len(self.pipeline)
            if in_flight == self._max_in_flight or (in_flight and not launched):
                new_tokens, computed = self._land()
            elif launched or not self._roster:
                new_tokens, computed = {}, 0
            else:
                raise RuntimeError(
                    f"{len(self._roster)} requests are under way, yet none can run and "
                    f"no step is in flight"
                )
        except BaseException:
            self.abort()
            raise
        finished, self._ended = tuple(self._ended), []
        return Progress(new_tokens, finished, computed)

    def _launch(self) -> bool:
        """Plans the next step and hands it to the device, if there is one."""
        plan = self._plan()
        if plan is None:
            return False
        self.pipeline.launch(plan)
        for entry in plan.entries:
            self._roster.planned(entry)
        return True

    def _plan(self) -> StepPlan | None:
        """Plans the next step; None if nothing can run before a step has landed."""
        refusal: Refused | None = None
        for start in (True, False):
            work = self._schedule(start)
            while work:
                try:
                    return self.manager.plan(work)
                except Refused as error:
                    refusal = error
                    work = self._without(error.request_id, work)
            if refusal is None or len(self.pipeline):
                return None
            # Everyone was refused with nothing under way. What those held who were to
            # start is free again by now, so that whoever runs can go on without them.
        raise RuntimeError(f"no request can run, although all needs fit: {refusal}")

    def _schedule(self, start: bool) -> list[tuple[Hashable, int]]:
        """Who should run in the next step.

        Args:
            start: Whether requests that wait may start; otherwise one does, and only if
                nobody runs.
        """
        schedule = self._roster.schedule()
        while start or not schedule.work:
            active = self._roster.start_next(schedule)
            if active is None:
                break
            request = active.request
            lookup = self.manager.add(
                request.id,
                active.prompt,
                scope=request.scope,
                points=request.points,
                reuse=request.reuse,
            )
            active.prompt_left = len(active.prompt) - lookup.reused_tokens
            schedule.take(request.id, active.prompt_left)
        return schedule.work

    def _without(
        self, request_id: Hashable, work: list[tuple[Hashable, int]]
    ) -> list[tuple[Hashable, int]]:
        """The work without a request; one that has run in no step yet waits again."""
        active = self._roster[request_id]
        if not active.computed:
            self.manager.cancel(request_id)
            self._roster.postpone(active)
        return [item for item in work if item[0] != request_id]

    def _land(self) -> tuple[dict[Hashable, int], int]:
        """Waits for the oldest step in flight and tells everyone what it sampled."""
        plan, tokens = self.pipeline.oldest()
        tokens = tokens[plan.entry_rows]
        self.manager.complete(plan, tokens)
        self.pipeline.landed()
        now_s = time.perf_counter()
        new_tokens: dict[Hashable, int] = {}
        computed = 0
        for entry, token in zip(plan.entries, tokens.tolist(), strict=True):
            active = self._roster[entry.request_id]
            active.steps_in_flight -= 1
            computed += entry.num_tokens
            if entry.samples and active.ending is None:
                new_tokens[entry.request_id] = token
                active.sampled(token, now_s)
                if active.ending is not None:
                    self._roster.withdraw(active)
            if active.ending is not None and not active.steps_in_flight:
                self._end(active)
        return new_tokens, computed

    def _end(self, active: Active) -> None:
        """Gives back what a request holds and keeps its result for the caller."""
        if active.has_started:
            if active.ending is Finish.CANCELLED:
                self.manager.cancel(active.request.id)
            else:
                self.manager.finish(active.request.id)
        self._roster.remove(active)
        assert active.ending is not None
        self._ended.append(active.result(time.perf_counter()))

    # -- questions ---------------------------------------------------------------------

    def __bool__(self) -> bool:
        """Always true: an engine without requests is an engine all the same."""
        return True

    def __len__(self) -> int:
        """Requests that have not brought their result yet."""
        return len(self._roster) + len(self._ended)

    @property
    def steps_in_flight(self) -> int:
        """Steps that were launched and have not landed."""
        return len(self.pipeline)

    @property
    def compilations(self) -> int:
        """Step shapes compiled so far, for all engines that share the model's steps."""
        return self._step.compilations

    @property
    def bytes_copied_for_snapshots(self) -> int:
        """Bytes of rows that were moved to make snapshots, or to read them.

        The manager asks for no such copy and has no way to; this is what the programs
        that ran copy on their own account, by what the compiler made of them.
        """
        group = self.layout.recurrent_group
        launched = self.pipeline.num_launched
        if group is None or not launched:
            return 0
        return launched * self._step.copied_bytes(group.pools)

    def check(self) -> None:
        """Checks every count of the manager, and that an idle engine reserves nothing.

        Raises:
            RuntimeError: with the numbers that disagree.
        """
        self.manager.check()
        if not self._roster and self._roster.room != self._roster.capacity:
            raise RuntimeError(
                f"nothing is under way, yet only {self._roster.room} of "
                f"{self._roster.capacity} is left to reserve"
            )

    def _require_idle(self, what: str) -> None:
        if len(self):
            raise RuntimeError(
                f"{what} needs an idle engine, but {len(self)} requests are under way"
            )


def default_buckets(max_seqs: int, token_budget: int) -> Buckets:
    """Five step shapes: decode only, and small or large prefill with or without it."""
    max_seqs = integer("max_seqs", max_seqs, 1, MAX_SIZE)
    largest = max(2, integer("token_budget", token_budget, 1, MAX_SIZE))
    return Buckets(
        decode=(max(2, max_seqs),),
        prefill_tokens=tuple(sorted({min(64, largest), largest})),
        max_prefill_seqs=max(1, min(8, max_seqs)),
    )
