"""Steps in flight: the state goes from launch to launch, tokens come back later.

host    | plan 1 | plan 2 | land 1, plan 3 | land 2, plan 4 | ...
device           | step 1      | step 2         | step 3    | ...
"""

import collections
import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jaxcache.device.state import CacheState, init_cache
from jaxcache.engine.model_step import ModelStep
from jaxcache.host.plans import StepPlan
from jaxcache.inputs.buckets import Bucket, Buckets
from jaxcache.inputs.packing import Packer, StepWork
from jaxcache.layouts import CacheLayout, CacheSize


@dataclasses.dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was launched and has not landed."""

    plan: StepPlan
    tokens: jax.Array


class Pipeline:
    """The device side of an engine: one cache, and the steps that run on it.

    Attributes:
        state: The cache. Every launch donates it and puts the new one here.
        last_tokens: `i32[num_seats]`, the last token of each seat.
        max_in_flight: The most steps that are launched and have not landed.
        num_launched: Steps launched so far.
    """

    def __init__(
        self,
        step: ModelStep,
        layout: CacheLayout,
        size: CacheSize,
        mesh: jax.sharding.Mesh | None,
        max_in_flight: int,
    ) -> None:
        """Allocates the cache."""
        self._step = step
        self.state: CacheState = init_cache(
            layout,
            size.num_pages,
            size.num_rows,
            mesh,
            max_seqs=size.max_seqs,
            max_tokens=size.max_tokens,
        )
        self.last_tokens = jnp.zeros(
            size.num_seats, jnp.int32, device=self.state.replicated
        )
        self.max_in_flight = max_in_flight
        self.num_launched = 0
        self._flights: collections.deque[_Flight] = collections.deque()

    def __len__(self) -> int:
        """Steps in flight."""
        return len(self._flights)

    def launch(self, plan: StepPlan) -> None:
        """Hands a step to the device; comes back while it runs."""
        self.state, sampled = self._step(self.state, plan.inputs, self.last_tokens)
        self.last_tokens = sampled.last_tokens
        sampled.tokens.copy_to_host_async()
        self._flights.append(_Flight(plan, sampled.tokens))
        self.num_launched += 1

    def oldest(self) -> tuple[StepPlan, np.ndarray]:
        """Waits for the oldest step in flight; gives its plan and `i32[E]` tokens.

        The step counts as in flight until `landed`.
        """
        flight = self._flights[0]
        return flight.plan, np.asarray(flight.tokens)

    def landed(self) -> None:
        """Forgets the oldest step: its outcome is known to everyone."""
        self._flights.popleft()

    def give_up(self) -> None:
        """Forgets every step in flight, whatever comes of it."""
        self._flights.clear()

    @property
    def is_lost(self) -> bool:
        """Whether a step took the cache and failed before it gave it back."""
        try:
            jax.block_until_ready(self.state)
        except Exception:  # the error of the step, or of the array that is gone
            return True
        return False

    def warm_up(
        self, buckets: Buckets, progress: Callable[[int, int], None] | None
    ) -> None:
        """Compiles every shape of a step and runs it once, on padding alone."""
        packer = Packer(self.state.layout, self.state.size, buckets)
        shapes = list(buckets.shapes.values())
        for done, bucket in enumerate(shapes):
            if progress is not None:
                progress(done, len(shapes))
            packed = packer.pack(padding_work(bucket, self.state.size))
            self.state, sampled = self._step(self.state, packed, self.last_tokens)
            sampled.tokens.block_until_ready()
        if progress is not None:
            progress(len(shapes), len(shapes))


def padding_work(bucket: Bucket, size: CacheSize) -> StepWork:
    """A step of this shape whose entries are all dummies: it writes only to sinks."""
    work = StepWork()
    if bucket.decode:
        work.decode_seats = np.full(bucket.decode, size.padding_seat, np.int32)
        work.decode_positions = np.zeros(bucket.decode, np.int32)
        work.decode_tokens = np.zeros(bucket.decode, np.int32)
    if bucket.prefill_tokens:
        # The last entry of a bucket belongs to padding tokens.
        num_entries = bucket.prefill_seqs - 1
        num_tokens = min(bucket.prefill_tokens, num_entries * size.max_tokens)
        lens = [len(part) for part in np.array_split(np.empty(num_tokens), num_entries)]
        work.prefill_lens = np.array([n for n in lens if n], np.int32)
        num_entries = len(work.prefill_lens)
        work.prefill_seats = np.full(num_entries, size.padding_seat, np.int32)
        work.prefill_starts = np.zeros(num_entries, np.int32)
        work.prefill_tokens = np.zeros(num_tokens, np.int32)
    return work
