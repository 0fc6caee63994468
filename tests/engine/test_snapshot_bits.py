"""Snapshots cost no copy: on the device, only what a step writes anyway changes."""

import numpy as np
import pytest

from jaxcache.device.state import WRITE
from jaxcache.engine import Engine, Request
from jaxcache.host.plans import StepPlan
from jaxcache.inputs.packing import PackedInputs
from tests.engine.serving import Golden


def rows_of(engine: Engine) -> np.ndarray:
    """The bits of every row: `u8[rows, bytes of a row]`."""
    state = engine.pipeline.state
    group = state.layout.recurrent_group
    assert group is not None
    pools = [np.asarray(state.pools[pool]) for pool in group.pools]
    return np.concatenate(
        [pool.reshape(len(pool), -1).view(np.uint8) for pool in pools], axis=1
    )


def written_by(engine: Engine, packed: PackedInputs) -> tuple[set[int], set[int]]:
    """The rows that a step wrote: of the requests in it, and emitted snapshots."""
    sections, size = packed.bucket.sections, engine.size
    seats = packed.packed[sections["seat"]]
    written = np.asarray(engine.pipeline.state.row_index)[WRITE, seats]
    slots = packed.packed[sections["snapshot_slot"]]
    live = set(written[seats < size.max_seqs].tolist())
    return live, set(slots[slots >= size.first_slot].tolist())


def test_only_rows_of_running_requests_and_emissions_change(
    model: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model.engine(token_budget=40, overlap=False)
    prompts = [model.prompt[:n].tolist() for n in (64, 100, 150)]
    prompts += [[*model.prompt[:70].tolist(), *range(30)], prompts[2]]
    for name, prompt in enumerate(prompts):
        engine.submit(
            Request(id=name, prompt=prompt, max_new_tokens=6, points=(len(prompt),))
        )
    launch = engine.pipeline.launch
    packed: list[PackedInputs] = []

    def note(plan: StepPlan) -> None:
        packed.append(plan.inputs)
        launch(plan)

    monkeypatch.setattr(engine.pipeline, "launch", note)
    before = rows_of(engine)
    changed_rows = 0
    while len(engine):
        engine.step()
        after = rows_of(engine)
        changed = set(np.flatnonzero((before != after).any(axis=1)).tolist())
        live, emitted = written_by(engine, packed[-1])
        assert changed <= live | emitted
        assert emitted <= changed
        changed_rows += len(changed)
        before = after
    stats = engine.manager.stats
    assert stats.snapshots_handed_over > 0
    assert stats.snapshots_emitted > 0
    assert stats.hits > 0
    assert changed_rows > 0
    assert engine.bytes_copied_for_snapshots == 0
