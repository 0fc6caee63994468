"""Any sequence of steps and moves leaves the pools, bit by bit, as the oracle's.

Pools start full of NaN, the null slots aside, and every operation is compared over all
slots: what no operation names must not change, sinks and null slots included.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jaxcache.device.movers import Mover, jit_mover
from jaxcache.device.pools import (
    after_read,
    clear_pages,
    clear_rows,
    copy_pages,
    copy_rows,
    emit_snapshots,
    read_pages,
    read_rows,
    update_tables,
    write_rows,
    write_tokens,
)
from jaxcache.device.state import CacheState
from jaxcache.device.step import Step, jit_step
from jaxcache.device.step_inputs import StepInputs
from jaxcache.inputs.packing import Packer, StepWork
from jaxcache.layouts import Order
from tests.device.caches import (
    BUCKETS,
    Array,
    bits,
    cache,
    canonical,
    hybrid,
    mesh_of,
    poisoned,
    work,
)
from tests.device.oracle import Oracle

SEATS, COLUMNS, PAGES, ROWS, FIRST = 4, 4, 16, 12, 3
ATTENTION, RECURRENT = (0, 1, 2, 4), (3, 4)
ROLES = ("key", "value")


def token_value(token: Any, position: Any, layer: int, role: str) -> Any:
    """A number that says which token of which layer was written where it stands."""
    return token * 16 + position + layer * 1024 + ROLES.index(role) * 512


def row_value(seat: Any, position: Any, layer: int, role: str) -> Any:
    return seat * 64 + position + layer * 1024 + len(role) * 256


def spread(number: Any, shape: tuple[int, ...], xp: Any) -> Any:
    """`f32[..., *shape]` with a different value for each element of the last axes."""
    own = xp.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    number = xp.asarray(number, np.float32)
    number = number.reshape(number.shape + (1,) * len(shape))
    both = xp.broadcast_to(own, (*number.shape[: number.ndim - len(shape)], *shape))
    return number + both


def step(state: CacheState, inputs: StepInputs) -> tuple[CacheState, Any]:
    layout, out = state.layout, {}
    for layer in ATTENTION:
        group = layout.group_of(layer, "key")
        shape = (layout.units(layer, "key"), 4)
        values = {
            role: spread(
                token_value(inputs.token_ids, inputs.positions, layer, role), shape, jnp
            )
            for role in ROLES
        }
        state = write_tokens(state, inputs, layer, values)
        pages = read_pages(state, layer, "key", inputs.page_tables[group])
        state, out[layer, "key"] = after_read(state, pages)
    ends = inputs.context_lens + inputs.query_lens
    for layer in RECURRENT:
        state, rows = read_rows(state, layer, inputs.state_read)
        out |= {(layer, role): row for role, row in rows.items()}
        specs = {role: layout.buffer_spec(layer, role) for role in rows}

        def states(
            seat: Any, position: Any, layer: int = layer, specs: Any = specs
        ) -> Any:
            return {
                role: spread(
                    row_value(seat, position, layer, role),
                    (spec.units, *spec.unit_shape),
                    jnp,
                )
                for role, spec in specs.items()
            }

        emitting = inputs.seat[inputs.snapshot_entry]
        state = emit_snapshots(
            state, inputs, layer, states(emitting, inputs.snapshot_position)
        )
        state = write_rows(state, layer, inputs.state_write, states(inputs.seat, ends))
    return state, {str(key): value for key, value in out.items()}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What is compiled once for all examples of one order and mesh."""

    order: Order
    shards: int
    step: Step
    movers: dict[str, Mover]


@functools.cache
def compiled(order: Order, shards: int) -> Compiled:
    def on(fn: Callable[..., CacheState], *static: int) -> Mover:
        return jit_mover(lambda state, ids: fn(state, *static, *ids))

    movers = {
        "copy_pages0": on(copy_pages, 0),
        "copy_pages1": on(copy_pages, 1),
        "copy_rows": on(copy_rows),
        "clear_pages0": on(clear_pages, 0),
        "clear_pages1": on(clear_pages, 1),
        "clear_rows": on(clear_rows),
        "update_tables": jit_mover(update_tables),
    }
    return Compiled(order, shards, jit_step(step, state_argnum=0), movers)


# Ids of every sort: wild ones, reserved ones, live ones.
ids = st.integers(-3, FIRST + PAGES + 2)
seeds = st.randoms(use_true_random=False)


class PoolsMachine(RuleBasedStateMachine):
    """Drives a cache and its oracle through the same operations."""

    made: ClassVar[Compiled]

    @initialize(seed=seeds)
    def start(self, seed: Any) -> None:
        layout = hybrid(self.made.order, self.made.shards)
        self.state = poisoned(cache(layout, mesh_of(self.made.shards)))
        self.oracle = Oracle(self.state)
        self.packer = Packer(layout, self.state.size, BUCKETS)
        # Each (seat, column) has a page of its own and each seat two rows, as a manager
        # that gives every slot one owner would have it.
        self.pages = [seed.sample(range(FIRST, FIRST + PAGES), PAGES) for _ in range(2)]
        self.rows = seed.sample(range(FIRST, FIRST + ROWS), ROWS)

    def draw_updates(self, seed: Any, count: int) -> list[tuple[int, int, int, int]]:
        elements = [(t, s, c) for t in (0, 1) for s in range(SEATS) for c in range(4)]
        elements += [(2, s, c) for s in range(SEATS) for c in range(2)]
        updates = []
        for table, seat, column in seed.sample(elements, count):
            if table == 2:
                own = self.rows[2 * seat : 2 * seat + 2]
                read = [0, *range(FIRST, FIRST + ROWS)]
                value = seed.choice([1, *own] if column else read)
            else:
                own_page = self.pages[table][seat * COLUMNS + column]
                value = seed.choice([own_page, own_page, own_page, 0, 1])
            updates.append((table, seat, column, value))
        return updates

    def copies(self, seed: Any) -> list[tuple[int, int, int]]:
        group = seed.randrange(2)
        destinations = seed.sample(range(FIRST, FIRST + PAGES), seed.randrange(3))
        return [(group, seed.randrange(FIRST + PAGES), d) for d in destinations]

    @rule(
        seed=seeds,
        num_decode=st.integers(0, 4),
        lens=st.lists(st.integers(1, 5), max_size=3),
        num_updates=st.integers(0, 12),
    )
    def run_step(
        self, seed: Any, num_decode: int, lens: list[int], num_updates: int
    ) -> None:
        """A step of any content: decode only, prefill only, both."""
        while sum(lens) > 8 or num_decode + len(lens) > SEATS:
            lens = lens[1:]
        if not num_decode and not lens:
            num_decode = 1
        seats = seed.sample(range(SEATS), num_decode + len(lens))
        starts = [seed.randrange(0, 16 - length + 1) for length in lens]
        slots = self.rows[2 * SEATS :]
        emitted = [
            (
                entry,
                start + seed.randint(1, length),
                slots.pop(seed.randrange(len(slots))),
            )
            for entry, (start, length) in enumerate(zip(starts, lens, strict=True))
            if entry < 2 and seed.random() < 0.5
        ]
        todo = work(
            decode_seats=seats[:num_decode],
            decode_positions=[seed.randrange(16) for _ in range(num_decode)],
            decode_tokens=[seed.randrange(9) for _ in range(num_decode)],
            prefill_seats=seats[num_decode:],
            prefill_starts=starts,
            prefill_lens=lens,
            prefill_tokens=[seed.randrange(9) for _ in range(sum(lens))],
            snapshot_entries=[entry for entry, _, _ in emitted],
            snapshot_positions=[position for _, position, _ in emitted],
            snapshot_slots=[slot for _, _, slot in emitted],
            updates=self.draw_updates(seed, num_updates),
            copies=self.copies(seed) if lens else [],
        )
        packed = self.packer.pack(todo)
        self.state, out = self.made.step(self.state, packed)
        self.check_out(todo, out)

    def check_out(self, todo: StepWork, out: dict[str, jax.Array]) -> None:
        """Plays the step in the oracle and compares what it read."""
        oracle = self.oracle
        oracle.begin(todo)
        decode = todo.decode_seats.size
        entries = [
            (int(seat), int(start), [int(token)])
            for seat, start, token in zip(
                todo.decode_seats,
                todo.decode_positions,
                todo.decode_tokens,
                strict=True,
            )
        ]
        tokens = np.split(todo.prefill_tokens, np.cumsum(todo.prefill_lens))[:-1]
        entries += [
            (int(seat), int(start), own.tolist())
            for seat, start, own in zip(
                todo.prefill_seats, todo.prefill_starts, tokens, strict=True
            )
        ]
        # Padding stands between the decode and the prefill entries.
        where = [i if i < decode else i - decode + 4 for i in range(len(entries))]
        if not decode:
            where = list(range(len(entries)))
        for layer in ATTENTION:
            self.play_attention(
                layer, entries, where, np.array(out[str((layer, "key"))])
            )
        for layer in RECURRENT:
            for role in oracle.layout.row_roles(layer):
                read = np.array(out[str((layer, role))])
                self.play_recurrence(layer, role, entries, where, read, todo)

    def play_attention(
        self, layer: int, entries: Any, where: list[int], read: Array
    ) -> None:
        oracle = self.oracle
        group = oracle.layout.group_of(layer, "key")
        shape = (oracle.layout.units(layer, "key"), 4)
        for seat, start, tokens in entries:
            for position, token in enumerate(tokens, start):
                place = oracle.place(group, seat, position)
                for role in ROLES:
                    number = token_value(token, position, layer, role)
                    value = spread(number, shape, np)
                    oracle.write_token(layer, role, *place, value)
        expected = np.zeros_like(read)
        for index, (seat, start, tokens) in zip(where, entries, strict=True):
            for column in range(-(-(start + len(tokens)) // 4)):
                page = int(oracle.page_table[group, seat, column])
                expected[index, column] = oracle.read(layer, "key", page)
        np.testing.assert_array_equal(bits(read), bits(expected))

    def play_recurrence(
        self,
        layer: int,
        role: str,
        entries: Any,
        where: list[int],
        read: Array,
        todo: StepWork,
    ) -> None:
        oracle = self.oracle
        expected = np.zeros_like(read)
        for index, (seat, _, _) in zip(where, entries, strict=True):
            expected[index] = oracle.read(layer, role, oracle.row(seat)[0])
        np.testing.assert_array_equal(bits(read), bits(expected))
        spec = oracle.layout.buffer_spec(layer, role)
        shape = (spec.units, *spec.unit_shape)
        for entry, position, slot in zip(
            todo.snapshot_entries,
            todo.snapshot_positions,
            todo.snapshot_slots,
            strict=True,
        ):
            seat = todo.prefill_seats[entry]
            number = row_value(int(seat), int(position), layer, role)
            oracle.write_row(layer, role, int(slot), spread(number, shape, np))
        for seat, start, tokens in entries:
            number = row_value(seat, start + len(tokens), layer, role)
            slot = oracle.row(seat)[1]
            oracle.write_row(layer, role, slot, spread(number, shape, np))

    def move(self, name: str, *rows: list[int]) -> None:
        padded = np.full((len(rows), 4), -1, np.int32)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = row
        self.state = self.made.movers[name](self.state, padded)

    @rule(
        group=st.integers(0, 2),
        source=st.lists(ids, min_size=4, max_size=4),
        destination=st.lists(ids, max_size=4, unique=True),
    )
    def copy(self, group: int, source: list[int], destination: list[int]) -> None:
        """Also from and to ids that are reserved or do not exist."""
        source = source[: len(destination)]
        name = "copy_rows" if group == 2 else f"copy_pages{group}"
        self.move(name, source, destination)
        self.oracle.copy(group, source, destination)

    @rule(group=st.integers(0, 2), slots=st.lists(ids, max_size=4, unique=True))
    def clear(self, group: int, slots: list[int]) -> None:
        name = "clear_rows" if group == 2 else f"clear_pages{group}"
        self.move(name, slots)
        self.oracle.clear(group, slots)

    @rule(seed=seeds, wild=st.lists(st.tuples(*[st.integers(-2, 9)] * 4), max_size=4))
    def update(self, seed: Any, wild: list[tuple[int, int, int, int]]) -> None:
        """Updates of elements that exist, and of ones that do not."""
        absent = [
            u
            for u in wild
            if not (0 <= u[0] <= 2 and 0 <= u[1] < 6 and 0 <= u[2] < (2, 4)[u[0] < 2])
        ]
        updates = self.draw_updates(seed, 8 - len(absent)) + absent
        array = np.array(updates, np.int32).T.copy()
        self.state = self.made.movers["update_tables"](self.state, array)
        self.oracle.update([list(u) for u in updates])

    @invariant()
    @precondition(lambda self: hasattr(self, "state"))
    def device_equals_oracle(self) -> None:
        for spec, pool, expected in zip(
            self.state.layout.pools,
            canonical(self.state),
            self.oracle.pools,
            strict=True,
        ):
            np.testing.assert_array_equal(bits(pool), bits(expected), spec.name)
            assert not bits(pool)[0].any(), f"{spec.name}: the null slot was written"
        np.testing.assert_array_equal(self.state.page_table, self.oracle.page_table)
        np.testing.assert_array_equal(self.state.row_index, self.oracle.row_index)

    def teardown(self) -> None:
        """One program a bucket, whatever the examples did."""
        assert self.made.step.compilations <= BUCKETS.count


def machine(order: Order, shards: int, max_examples: int) -> Any:
    made = compiled(order, shards)
    kind: Any = type("Machine", (PoolsMachine,), {"made": made})
    case = kind.TestCase
    case.settings = hypothesis.settings(
        max_examples=max_examples, stateful_step_count=8, deadline=None
    )
    return case


TestUnitsOutermost = machine("units", 1, 25)
TestBuffersOutermost = machine("buffers", 1, 25)
# The window layer has one KV head and the B/C groups are two: both are repeated here.
TestFourShards = machine("units", 4, 6)
