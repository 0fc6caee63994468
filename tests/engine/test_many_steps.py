"""Hundreds of steps: the cache keeps its addresses, and buckets bound the programs."""

import collections
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jaxcache.device.state import CacheState
from jaxcache.engine import Engine, ModelStep, Request
from jaxcache.inputs.buckets import Bucket, Buckets
from jaxcache.models import TINY_CONFIG, random_model
from tests.device.caches import mesh_of

BUCKETS = Buckets((4,), (16, 64), max_prefill_seqs=3, max_snapshots=4, max_copies=4)
STEPS = 200


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """What was seen of an engine that served two workloads.

    Attributes:
        engine: The engine, idle.
        addresses: By step, of every array of the cache.
        buckets: Shapes of the steps, by how many there were.
        programs: Step shapes and update shapes compiled after each workload.
        compiled: Programs that XLA compiled in the second workload, of whatever kind.
    """

    engine: Engine
    addresses: list[tuple[int, ...]]
    buckets: collections.Counter[Bucket]
    programs: tuple[tuple[int, int], tuple[int, int]]
    compiled: list[str]


def requests(seed: int) -> list[Request]:
    """Conversations: prompts that go on where others stopped, and that do not."""
    rng = np.random.default_rng(seed)
    bases = [rng.integers(0, 256, n).tolist() for n in (70, 41, 16)]
    made = []
    for index in range(44):
        base = bases[index % 3][: 5 + 7 * index]
        made.append(
            Request(
                id=(seed, index),
                prompt=[*base, *rng.integers(0, 256, 9)],
                max_new_tokens=12 + index % 5,
                points=(len(base),),
            )
        )
    return made


def addresses(state: CacheState) -> tuple[int, ...]:
    """Where each array of the cache lies, on each device."""
    return tuple(
        shard.data.unsafe_buffer_pointer()
        for array in (*state.pools, state.page_table, state.row_index)
        for shard in array.addressable_shards
    )


@functools.cache
def served(num_devices: int) -> Served:
    mesh = mesh_of(num_devices)
    step = ModelStep(random_model(TINY_CONFIG, 3), mesh=mesh)
    engine = Engine(
        step,
        num_pages=36,
        num_rows=10,
        max_seqs=4,
        max_tokens=128,
        token_budget=64,
        buckets=BUCKETS,
        mesh=mesh,
    )
    places = [addresses(engine.pipeline.state)]
    buckets: collections.Counter[Bucket] = collections.Counter()
    launch = engine.pipeline.launch

    def note(plan: Any) -> None:
        launch(plan)
        places.append(addresses(engine.pipeline.state))
        buckets[plan.inputs.bucket] += 1

    engine.pipeline.launch = note  # type: ignore[method-assign]
    programs, compiled = [], []

    def listen(event: str, duration_secs: float, **about: Any) -> None:
        del duration_secs
        if "backend_compile" in event:
            compiled.append(str(about.get("fun_name", event)))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for seed in (1, 2):
            compiled.clear()
            engine.serve(requests(seed))
            programs.append((step.compilations, step._step.update_compilations))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    engine.check()
    return Served(engine, places, buckets, (programs[0], programs[1]), compiled)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_cache_keeps_its_addresses_for_hundreds_of_steps(
    num_devices: int,
) -> None:
    seen = served(num_devices)
    assert len(seen.addresses) > STEPS
    first, *later = seen.addresses
    assert len(set(first)) == len(first)
    assert [step for step, now in enumerate(later, 1) if now != first] == []
    # There was some of everything that touches the cache.
    assert any(bucket.decode and bucket.prefill_seqs for bucket in seen.buckets)
    stats = seen.engine.manager.stats
    assert min(stats.snapshots_emitted, stats.snapshots_handed_over) > 0
    assert min(stats.snapshots_evicted, stats.columns_evicted) > 0
    assert min(stats.partial_hits, stats.pages_copied) > 0


@pytest.mark.parametrize("num_devices", [1, 2])
def test_buckets_bound_the_programs(num_devices: int) -> None:
    seen = served(num_devices)
    reached = set(seen.buckets)
    assert reached <= set(BUCKETS.shapes.values())
    assert len(reached) > 2
    (first, updates), second = seen.programs
    assert first <= BUCKETS.count
    assert first == len(reached)
    # Bursts of table updates are padded to powers of two.
    size = seen.engine.size
    changes = size.num_seats * (size.max_pages * seen.engine.layout.num_page_groups + 2)
    assert updates <= changes.bit_length()
    assert second == (first, updates)
    assert seen.compiled == []
