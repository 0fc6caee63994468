"""Drives a model step by step with hand-made work: no manager, no engine."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxcache.device.state import CacheState, init_cache
from jaxcache.device.step import jit_step
from jaxcache.device.step_inputs import StepInputs
from jaxcache.inputs.buckets import Buckets
from jaxcache.inputs.packing import Packer, StepWork
from jaxcache.layouts import NULL_SLOT, CacheLayout
from jaxcache.models import HybridModel

Array = np.ndarray[Any, Any]

TOKENS_PER_PAGE = 16
MAX_SEQS = 4
MAX_TOKENS = 208
NUM_ROWS = 12
BUCKETS = Buckets(
    decode=(MAX_SEQS,),
    prefill_tokens=(160,),
    max_prefill_seqs=2,
    max_snapshots=4,
    max_copies=2,
)


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Prompt tokens for one seat; snapshots are (position, row)."""

    seat: int
    tokens: Sequence[int]
    snapshots: Sequence[tuple[int, int]] = ()


class Compiled:
    """A model's step, compiled once a bucket however many drivers use it."""

    def __init__(self, model: HybridModel, mesh: Mesh | None = None) -> None:
        num_shards = 1 if mesh is None else mesh.shape["tensor"]
        self.layout = CacheLayout(model.layout, TOKENS_PER_PAGE, num_shards)
        self.mesh = mesh
        self.params, step = step_function(model)
        self.step = jit_step(step)


def step_function(
    model: HybridModel,
) -> tuple[nnx.State[Any, Any], Callable[..., tuple[CacheState, jax.Array]]]:
    """Returns the weights, and a step that gives the logits of every token."""
    graph, params = nnx.split(model)

    def step(
        params: nnx.State[Any, Any], state: CacheState, inputs: StepInputs
    ) -> tuple[CacheState, jax.Array]:
        model = nnx.merge(graph, params)
        state, hidden = model(state, inputs)
        return state, model.logits(hidden)

    return params, step


class Driver:
    """A cache full of NaN but for the null slots, and requests at fixed pages of it.

    Seat `s` uses the pages after those of seat `s - 1` and row `s`, unless told others.
    """

    def __init__(self, compiled: Compiled) -> None:
        self.compiled = compiled
        state = init_cache(
            compiled.layout,
            MAX_SEQS * -(-MAX_TOKENS // TOKENS_PER_PAGE),
            NUM_ROWS,
            compiled.mesh,
            max_seqs=MAX_SEQS,
            max_tokens=MAX_TOKENS,
        )
        poisoned = jax.jit(_poison, donate_argnums=0)(state)
        self.state: CacheState = poisoned
        self.size = state.size
        self.packer = Packer(compiled.layout, state.size, BUCKETS)
        self.histories: dict[int, int] = {}
        self._updates: dict[tuple[int, int, int], int] = {}
        self._copies: list[tuple[int, int, int]] = []
        self._settle: list[int] = []

    def pages(self, seat: int) -> list[int]:
        """The pages of a seat."""
        count = self.size.max_pages
        first = self.size.first_slot + seat * count
        return list(range(first, first + count))

    def row(self, index: int) -> int:
        """Row number `index` of those for requests."""
        return self.size.first_slot + index

    def start(
        self,
        seat: int,
        *,
        snapshot: int = NULL_SLOT,
        reuse_of: int = 0,
        length: int = 0,
    ) -> None:
        """Seats a request, maybe on the first `length` tokens of another seat's."""
        pages = self.pages(seat)
        whole, rest = divmod(length, TOKENS_PER_PAGE)
        shared = self.pages(reuse_of)[:whole]
        if rest:
            self._copies.append((0, self.pages(reuse_of)[whole], pages[whole]))
        table = self.compiled.layout.num_page_groups
        for column, page in enumerate(shared + pages[whole:]):
            self._updates[0, seat, column] = page
        self._updates[table, seat, 0] = snapshot
        self._updates[table, seat, 1] = self.row(seat)
        self._settle.append(seat)
        self.histories[seat] = length

    def run(
        self, decode: dict[int, int] | None = None, prefill: Sequence[Prefill] = ()
    ) -> dict[int, Array]:
        """Runs one step; returns the logits of each seat's tokens."""
        decode = decode or {}
        seats = [*decode, *(p.seat for p in prefill)]
        starts = [self.histories[seat] for seat in seats]
        counts = [1] * len(decode) + [len(p.tokens) for p in prefill]
        snapshots = [
            (entry, position, row)
            for entry, p in enumerate(prefill)
            for position, row in p.snapshots
        ]
        work = StepWork(
            decode_seats=_i32(seats[: len(decode)]),
            decode_positions=_i32(starts[: len(decode)]),
            decode_tokens=_i32(list(decode.values())),
            prefill_seats=_i32(seats[len(decode) :]),
            prefill_starts=_i32(starts[len(decode) :]),
            prefill_lens=_i32(counts[len(decode) :]),
            prefill_tokens=_i32([token for p in prefill for token in p.tokens]),
            snapshot_entries=_i32([entry for entry, _, _ in snapshots]),
            snapshot_positions=_i32([position for _, position, _ in snapshots]),
            snapshot_slots=_i32([row for _, _, row in snapshots]),
            updates=_i32([(*key, value) for key, value in self._updates.items()])
            .reshape(-1, 4)
            .T.copy(),
            copies=_i32(self._copies).reshape(-1, 3).T.copy(),
        )
        packed = self.packer.pack(work)
        self.state, logits = self.compiled.step(
            self.compiled.params, self.state, packed
        )
        self._updates.clear()
        self._copies.clear()
        table = self.compiled.layout.num_page_groups
        for seat in [seat for seat in self._settle if seat in seats]:
            # From the second step on a request reads the row that it writes.
            self._updates[table, seat, 0] = self.row(seat)
            self._settle.remove(seat)
        scores = np.asarray(logits)
        first = {seat: entry for entry, seat in enumerate(decode)}
        at = packed.bucket.decode
        for p in prefill:
            first[p.seat] = at
            at += len(p.tokens)
        for seat, count in zip(seats, counts, strict=True):
            self.histories[seat] += count
        return {
            seat: scores[first[seat] : first[seat] + count]
            for seat, count in zip(seats, counts, strict=True)
        }

    def prefill(
        self,
        seat: int,
        tokens: Array,
        chunk: int,
        snapshots: dict[int, int] | None = None,
    ) -> Array:
        """Prefills a prompt in chunks; returns the logits of all its tokens."""
        logits = []
        while len(tokens):
            start = self.histories[seat]
            part, tokens = tokens[:chunk], tokens[chunk:]
            inside = [
                (position, row)
                for position, row in (snapshots or {}).items()
                if start < position <= start + len(part)
            ]
            work = Prefill(seat, part.tolist(), inside)
            logits.append(self.run(prefill=[work])[seat])
        return np.concatenate(logits)

    def generate(self, seat: int, token: int, count: int) -> list[int]:
        """Decodes greedily: `token` and what follows it, `count` tokens in all.

        All of them are run, so that the cache holds every one.
        """
        tokens = []
        for _ in range(count):
            tokens.append(token)
            token = int(self.run(decode={seat: token})[seat][0].argmax())
        return tokens

    def buffer(self, layer_id: int, role: str, slots: Sequence[int]) -> Array:
        """Reads `[slots, units, *unit_shape]`, the model's own units."""
        return read_units(self.state, layer_id, role, slots)

    def tokens_of(
        self, seat: int, layer_id: int, role: str, pages: Sequence[int]
    ) -> Array:
        """Reads `[units, history, dim]` of a page role."""
        return read_tokens(self.state, layer_id, role, pages)[:, : self.histories[seat]]


def read_units(
    state: CacheState, layer_id: int, role: str, slots: Sequence[int]
) -> Array:
    """Reads `[slots, units, *unit_shape]` of a cache, the model's own units.

    Units that are repeated over shards must be equal.
    """
    layout = state.layout
    where = layout.locate(layer_id, role)
    values = np.asarray(state.pools[where.pool])[list(slots), :, where.buffer]
    units, cache_units = layout.units(layer_id, role), values.shape[1]
    copies = values.reshape(len(slots), units, cache_units // units, *values.shape[2:])
    for copy in range(1, copies.shape[2]):
        np.testing.assert_array_equal(copies[:, :, copy], copies[:, :, 0])
    return np.asarray(copies[:, :, 0])


def read_tokens(
    state: CacheState, layer_id: int, role: str, pages: Sequence[int]
) -> Array:
    """Reads `[units, tokens, dim]` of a page role, all tokens of the pages."""
    values = np.moveaxis(read_units(state, layer_id, role, pages), 0, 1)
    return values.reshape(values.shape[0], -1, values.shape[-1])


def _poison(state: CacheState) -> CacheState:
    return dataclasses.replace(
        state,
        pools=tuple(pool.at[1:].set(jnp.nan) for pool in state.pools),
    )


def _i32(values: Sequence[Any]) -> Array:
    return np.array(values, np.int32)
