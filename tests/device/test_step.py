"""Steps in flight: addresses, hazards, dead states, bursts, and what is compiled."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcache.device.pools import read_rows, write_rows
from jaxcache.device.state import CacheState
from jaxcache.device.step import Step, explain_step, jit_step
from jaxcache.device.step_inputs import StepInputs, begin_step
from jaxcache.inputs.packing import Packer, StepWork
from jaxcache.layouts import Order
from tests.device.caches import BUCKETS, MIXED, ORDERS, cache, hybrid, mesh_of, work
from tests.device.steps import unrolled

PARAMS = np.arange(100, dtype=np.float32)


def decode(seed: int, **fields: Any) -> StepWork:
    """A decode step of two requests that differ from step to step."""
    seats = [seed % 4, (seed + 1) % 4]
    return work(
        decode_seats=seats,
        decode_positions=[seed % 16, (seed * 3) % 16],
        decode_tokens=[seed % 100, (seed * 7) % 100],
        **fields,
    )


def prefill(seed: int, **fields: Any) -> StepWork:
    return work(
        prefill_seats=[seed % 4],
        prefill_starts=[seed % 8],
        prefill_lens=[5],
        prefill_tokens=[(seed + i) % 100 for i in range(5)],
        **fields,
    )


def takes_seats(size: Any) -> list[tuple[int, int, int, int]]:
    """Updates that give every seat pages and rows of its own."""
    first = size.first_slot
    pages = [
        (g, s, c, first + 4 * s + c) for g in (0, 1) for s in range(4) for c in range(4)
    ]
    rows = [(2, s, c, first + s) for s in range(4) for c in (0, 1)]
    return pages + rows


def places(state: CacheState) -> list[int]:
    return [
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(state)
        for shard in leaf.addressable_shards
    ]


def light(params: Any, state: CacheState, inputs: StepInputs) -> tuple[CacheState, Any]:
    """A step that compiles in no time."""
    return state, params[inputs.token_ids].sum()


@pytest.mark.parametrize(
    ("order", "shards"), [("units", 1), ("buffers", 1), ("units", 2)]
)
def test_addresses_are_kept_over_200_steps(order: Order, shards: int) -> None:
    """Pools, page tables and index vectors keep address, shape and sharding."""
    state = cache(hybrid(order, shards), mesh_of(shards))
    packer = Packer(state.layout, state.size, BUCKETS)
    step = jit_step(unrolled(state.layout))
    before = places(state)
    shape = [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(state)]
    kept: CacheState | None = None
    for i in range(200):
        burst = takes_seats(state.size) if i % 50 == 0 else [(2, i % 4, 0, 3)]
        todo = decode(i, updates=burst) if i % 3 else prefill(i, updates=burst)
        kept = state
        state, _ = step(PARAMS, state, packer.pack(todo))
    assert places(state) == before
    assert [(x.shape, x.dtype, x.sharding) for x in jax.tree.leaves(state)] == shape
    assert kept is not None
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(kept))
    assert step.compilations == 2


def busy(params: Any, state: CacheState, inputs: StepInputs) -> tuple[CacheState, Any]:
    """A step that takes a while, so that the next ones are packed while it waits."""
    x = params["x"]
    for _ in range(3):
        x = jnp.tanh(x @ params["x"])
    state, rows = read_rows(state, 3, inputs.state_read)
    number = inputs.token_ids.sum() + 10 * inputs.positions.sum()
    new = {
        role: row * jnp.full((), 0.5, row.dtype) + number.astype(row.dtype)
        for role, row in rows.items()
    }
    # The product ties the row's write to the slow part without changing the value.
    zero = (x.sum() * 0).astype(jnp.float32)
    new["ssm"] = new["ssm"] + zero
    return write_rows(state, 3, inputs.state_write, new), number + zero.astype(
        jnp.int32
    )


def test_any_number_of_steps_may_be_in_flight() -> None:
    """Packing the next step never reaches into one that has not run yet."""
    layout = hybrid()
    size = cache(layout).size
    packer = Packer(layout, size, BUCKETS)
    params = {"x": jnp.full((400, 400), 0.01, jnp.float32)}
    step = jit_step(busy)
    results = []
    for wait in (True, False):
        state = cache(layout)
        state, _ = step(
            params, state, packer.pack(decode(0, updates=takes_seats(size)))
        )
        outs, todo = [], decode(1)
        for i in range(40):
            # One StepWork, rewritten in place, as a planner may.
            todo.decode_tokens[:] = i
            todo.decode_positions[:] = (i + 5) % 16, i % 16
            state, out = step(params, state, packer.pack(todo))
            outs.append(jax.block_until_ready(out) if wait else out)
        results.append((state, [int(out) for out in outs]))
    (waited, expected), (flown, came) = results
    assert came == expected
    for a, b in zip(waited.pools, flown.pools, strict=True):
        np.testing.assert_array_equal(a, b)


def test_donated_state_is_dead() -> None:
    state = cache(hybrid())
    packer = Packer(state.layout, state.size, BUCKETS)
    step = jit_step(light, name="model_step")
    new, _ = step(PARAMS, state, packer.pack(decode(0)))
    for todo in (decode(1), prefill(1), decode(2, updates=takes_seats(state.size))):
        with pytest.raises(RuntimeError) as caught:
            step(PARAMS, state, packer.pack(todo))
        message = str(caught.value)
        # What went wrong, what is right, and the way out if it was meant.
        assert "has been donated already" in message
        assert "state, out = model_step(..., state, ...)" in message
        assert "jax.tree.map(jnp.copy, state)" in message
    step(PARAMS, new, packer.pack(decode(3)))


def test_other_dead_arguments_are_not_blamed_on_the_state() -> None:
    state = cache(hybrid())
    packer = Packer(state.layout, state.size, BUCKETS)
    step = jit_step(light)
    params = jnp.asarray(PARAMS)
    state, _ = step(params, state, packer.pack(decode(0)))
    params.delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted") as caught:
        step(params, state, packer.pack(decode(1)))
    assert "donated already" not in str(caught.value)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_number_of_compilations_is_bounded_by_the_buckets() -> None:
    state = cache(hybrid())
    packer = Packer(state.layout, state.size, BUCKETS)
    step = jit_step(light)
    for i in range(30):
        fields = {"updates": takes_seats(state.size)[: i % 3 * 20]}
        todo = decode(i, **fields) if i % 2 else prefill(i, **fields)
        state, _ = step(PARAMS, state, packer.pack(todo))
    assert step.compilations == 2 <= BUCKETS.count
    # Bursts are padded to powers of two and compiled on their own.
    assert 1 <= step.update_compilations <= 3
    assert len(step.reports) == step.compilations
    assert 0 < sum(r.compile_seconds for r in step.reports) < step.compile_seconds
    assert all(report.in_place for report in step.reports)


def test_burst_of_updates_is_seen_by_its_own_step() -> None:
    """Extra updates go first: the step reads the new table, not the old one."""

    def tables(state: CacheState, inputs: StepInputs) -> tuple[CacheState, Any]:
        return state, (inputs.page_tables, inputs.state_write)

    state = cache(hybrid())
    packer = Packer(state.layout, state.size, BUCKETS)
    step = jit_step(tables, state_argnum=0)
    updates = takes_seats(state.size)
    packed = packer.pack(
        work(
            decode_seats=[3], decode_positions=[15], decode_tokens=[1], updates=updates
        )
    )
    assert packed.extra_updates is not None
    state, (pages, rows) = step(state, packed)
    assert pages[0, 0].tolist() == [15, 16, 17, 18]
    assert rows[0] == 6


def test_failed_step_leaves_the_state_alive() -> None:
    """Also one whose burst of table updates would have been applied before it."""

    def fails(state: CacheState, inputs: StepInputs) -> tuple[CacheState, Any]:
        raise KeyError("not in the model")

    state = cache(hybrid())
    packer = Packer(state.layout, state.size, BUCKETS)
    step = jit_step(fails, state_argnum=0)
    for updates in ([], takes_seats(state.size)):
        with pytest.raises(KeyError):
            step(state, packer.pack(decode(0, updates=updates)))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_step_that_fails_as_it_runs_raises_its_own_error() -> None:
    broken = False

    def measure(x: Any) -> Any:
        if broken:
            raise OSError("no such instrument")
        return x

    def measures(
        params: Any, state: CacheState, inputs: StepInputs
    ) -> tuple[CacheState, Any]:
        kind = jax.ShapeDtypeStruct((), jnp.float32)
        return state, jax.pure_callback(measure, kind, params[0])

    state = cache(hybrid())
    packer = Packer(state.layout, state.size, BUCKETS)
    step = jit_step(measures)
    state, out = step(PARAMS, state, packer.pack(decode(0)))
    jax.block_until_ready(out)
    broken = True
    with pytest.raises(RuntimeError, match="no such instrument") as caught:
        jax.block_until_ready(step(PARAMS, state, packer.pack(decode(1))))
    assert "donated already" not in str(caught.value)
    assert step.compilations == 1
    # It was donated all the same.
    broken = False
    with pytest.raises(RuntimeError, match="has been donated already"):
        step(PARAMS, state, packer.pack(decode(1)))


def test_extra_arguments_of_another_shape_make_another_program() -> None:
    def step_fn(
        params: Any, state: CacheState, inputs: StepInputs, bias: Any, *, scale: int = 2
    ) -> tuple[CacheState, Any]:
        return state, params[0] * scale + bias

    state = cache(hybrid())
    packer = Packer(state.layout, state.size, BUCKETS)
    step = jit_step(step_fn)
    packed = packer.pack(decode(0))
    for length in (2, 3, 2, 3, 3):
        state, out = step(PARAMS, state, packed, np.ones(length, np.float32))
        assert out.shape == (length,)
    assert step.compilations == 2


def test_bad_arguments_are_refused_by_name() -> None:
    state = cache(hybrid())
    packed = Packer(state.layout, state.size, BUCKETS).pack(decode(0))
    step = jit_step(light, name="model_step")
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((), "model_step must get a CacheState as argument 1, got 0 arguments"),
        ((PARAMS, packed, state), "must get a CacheState as argument 1, got PackedIn"),
        ((PARAMS, state, None), "must get a PackedInputs as argument 2, got NoneType"),
        ((PARAMS, state), "must get a PackedInputs as argument 2, got 2 arguments"),
    ]
    for args, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            step(*args)


def test_what_is_no_step_is_refused() -> None:
    no_function: Any = None
    with pytest.raises(ValueError, match="fn must be a function, got NoneType"):
        jit_step(no_function)
    for at in ("1", -1, True, None):
        bad: Any = at
        message = f"state_argnum must be an integer >= 0, got {at!r}"
        with pytest.raises(ValueError, match=re.escape(message)):
            jit_step(light, state_argnum=bad)
        with pytest.raises(ValueError, match=re.escape(message)):
            explain_step(light, state_argnum=bad)
    message = "light must get a CacheState as argument 1, got 0 arguments"
    with pytest.raises(ValueError, match=message):
        explain_step(light)
    with pytest.raises(ValueError, match="CacheState as argument 1, got int"):
        explain_step(light, 1, 2)


def test_packed_arrays_of_another_form_are_refused() -> None:
    state = cache(hybrid())
    packed = Packer(state.layout, state.size, BUCKETS).pack(decode(0))
    step = jit_step(light)
    reals = dataclasses.replace(packed, packed=packed.packed.astype(np.float32))
    short = dataclasses.replace(packed, extra_updates=np.zeros((3, 2), np.int32))
    wide = dataclasses.replace(packed, extra_updates=np.zeros((4, 2), np.float32))
    cases = [
        (reals, "packed.packed must be int32, got float32"),
        (short, "updates must be int32[4, U], got int32[3, 2]"),
        (wide, "updates must be int32[4, U], got float32[4, 2]"),
    ]
    for bad, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            begin_step(state, bad)
        with pytest.raises(ValueError, match=re.escape(message)):
            step(PARAMS, state, bad)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_step_must_return_state_and_output() -> None:
    state = cache(hybrid())
    packed = Packer(state.layout, state.size, BUCKETS).pack(decode(0))

    def alone(state: CacheState, inputs: StepInputs) -> CacheState:
        return state

    def other(state: CacheState, inputs: StepInputs) -> tuple[Any, Any]:
        return state.pools, state

    with pytest.raises(ValueError, match=r"alone must return \(state, out\)"):
        jit_step(alone, state_argnum=0)(state, packed)
    with pytest.raises(ValueError, match="other must return a state of structure"):
        jit_step(other, state_argnum=0)(state, packed)


def test_step_can_be_compiled_before_it_is_called() -> None:
    state = cache(hybrid())
    step = jit_step(light, name="model_step")
    report = step.compile(PARAMS, state, MIXED)
    assert report is step.reports[0]
    packer = Packer(state.layout, state.size, BUCKETS)
    mixed = work(
        decode_seats=[0],
        decode_positions=[0],
        decode_tokens=[1],
        prefill_seats=[1],
        prefill_starts=[0],
        prefill_lens=[2],
        prefill_tokens=[1, 2],
    )
    state, _ = step(PARAMS, state, packer.pack(mixed))
    state, _ = step(PARAMS, state, packer.pack(decode(0)))
    assert step.compilations == 2
    # Asked again, it answers from what it knows.
    assert step.compile(PARAMS, state, MIXED) is report
    assert step.compilations == 2


@pytest.mark.parametrize("order", ORDERS)
def test_explain_prints_a_table_of_pools(order: Order) -> None:
    state = cache(hybrid(order))
    report = explain_step(unrolled(state.layout), PARAMS, state, MIXED, name="model")
    lines = str(report).splitlines()
    assert lines[0].startswith("model, compiled for cpu in ")
    assert lines[1].split() == ["bytes", "alias", "copies", "verdict"]
    for line, spec in zip(lines[2:], state.layout.pools, strict=False):
        assert line.startswith(f"{spec.name}  {spec.dtype}[")
        assert line.endswith("full       0  in place")
    assert lines[-2].startswith("state ")
    assert lines[-1].startswith("temporaries ")
    assert report.alias_bytes == report.state_bytes
    assert report.argument_bytes > report.state_bytes
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_explaining_one_step_reports_what_running_it_reports() -> None:
    state = cache(hybrid())
    packed = Packer(state.layout, state.size, BUCKETS).pack(decode(0))
    report = explain_step(light, PARAMS, state, packed)
    step = jit_step(light)
    step(PARAMS, state, packed)
    assert step.reports[0].leaves == report.leaves
    assert step.reports[0].temp_bytes == report.temp_bytes


def test_steps_are_named_after_their_function() -> None:
    assert jit_step(busy).name == "busy"
    assert isinstance(jit_step(busy), Step)
