"""Step packing: one step's work as one int32 array whose shape comes from a bucket.

D decode entries bring one token each, P prefill entries share N tokens. What a section
does not use holds padding, so a step of any content has the shape of its bucket.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxcache.inputs.buckets import MIN_INDICES, Bucket, Buckets
from jaxcache.inputs.checks import (
    NO_COPIES,
    NO_UPDATES,
    NOTHING,
    UpdateChecks,
    check_arrays,
    check_copies,
    check_prefill,
    check_seats,
    check_snapshots,
    refuse_bounded,
)
from jaxcache.layouts import CacheLayout, CacheSize
from jaxcache.layouts.arguments import check_kind
from jaxcache.layouts.cache_size import check_layout

# A token id that stands for "the token this seat sampled last".
NEXT_TOKEN = -1

# Elements of 64 bytes; how many arrays, and elements, share one allocation at most.
_ALIGNED = 16
_ARRAYS_A_BLOCK = 64
_BLOCK_ELEMENTS = 16_384

Int32s = npt.NDArray[np.int32]


@dataclasses.dataclass(slots=True, kw_only=True)
class StepWork:
    """What one step does, in host arrays; a step without prefill leaves that out.

    Attributes:
        decode_seats: `i32[d]`.
        decode_positions: `i32[d]`, tokens already in the cache: the token's position.
        decode_tokens: `i32[d]`, token ids or `NEXT_TOKEN`.
        prefill_seats: `i32[p]`.
        prefill_starts: `i32[p]`, tokens already in the cache.
        prefill_lens: `i32[p]`, each at least 1.
        prefill_tokens: `i32[sum(prefill_lens)]`, entry after entry.
        snapshot_entries: `i32[m]`, index among the prefill entries.
        snapshot_positions: `i32[m]`, tokens absorbed: start < position <= start + len.
        snapshot_slots: `i32[m]`, a row for each, owned by nobody else.
        updates: `i32[4, u]`, columns (table, seat, column, value), no element twice.
            Table g is the page table of attention group g; the table after the last one
            is the row index, whose column 0 is the row read and 1 the row written.
        copies: `i32[3, c]`, columns (attention group, source page, destination page).
    """

    decode_seats: Int32s = dataclasses.field(default_factory=lambda: NOTHING)
    decode_positions: Int32s = dataclasses.field(default_factory=lambda: NOTHING)
    decode_tokens: Int32s = dataclasses.field(default_factory=lambda: NOTHING)
    prefill_seats: Int32s = dataclasses.field(default_factory=lambda: NOTHING)
    prefill_starts: Int32s = dataclasses.field(default_factory=lambda: NOTHING)
    prefill_lens: Int32s = dataclasses.field(default_factory=lambda: NOTHING)
    prefill_tokens: Int32s = dataclasses.field(default_factory=lambda: NOTHING)
    snapshot_entries: Int32s = dataclasses.field(default_factory=lambda: NOTHING)
    snapshot_positions: Int32s = dataclasses.field(default_factory=lambda: NOTHING)
    snapshot_slots: Int32s = dataclasses.field(default_factory=lambda: NOTHING)
    updates: Int32s = dataclasses.field(default_factory=lambda: NO_UPDATES)
    copies: Int32s = dataclasses.field(default_factory=lambda: NO_COPIES)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PackedInputs:
    """One step's inputs as they are uploaded; a pytree.

    Attributes:
        packed: `i32[bucket.num_packed]`. A fresh array a step, never written again: JAX
            on CPU reads NumPy memory in place, also after the dispatch.
        extra_updates: `i32[4, 2^k]` updates that did not fit into `packed`, or `None`.
        bucket: The shape. Static.
        size: The cache it was packed for. Static.
    """

    packed: Any
    extra_updates: Any
    bucket: Bucket
    size: CacheSize


def _packed_inputs(
    packed: Int32s, extra_updates: Int32s | None, bucket: Bucket, size: CacheSize
) -> PackedInputs:
    """Makes a `PackedInputs` in a fifth of the time that its frozen fields take."""
    inputs = object.__new__(PackedInputs)
    vars(inputs).update(
        packed=packed, extra_updates=extra_updates, bucket=bucket, size=size
    )
    return inputs


def index_bucket(num_indices: int) -> int:
    """Returns the power of two, at least 2, that `num_indices` are padded to."""
    return max(MIN_INDICES, 1 << (num_indices - 1).bit_length())


class _Memory:
    """Fresh arrays of one length.

    Small ones are cut from blocks and none is used twice: JAX on CPU reads NumPy memory
    in place, also after the dispatch, so rewriting one would reach into a step that has
    not run yet. Each starts at a multiple of 64 bytes, which is what JAX asks of memory
    that it reads in place; any other it copies first. A large one has an allocation of
    its own, which the allocator gives out again once nobody looks at it any more: a
    block of many would be new pages of the system each time, at some 10 us for 64 KB.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._stride = -(-length // _ALIGNED) * _ALIGNED
        self._count = max(1, min(_ARRAYS_A_BLOCK, _BLOCK_ELEMENTS // self._stride))
        self._rows: Iterator[Int32s] = iter(())

    def array(self) -> Int32s:
        """Returns an array that nobody else has, with anything in it."""
        row = next(self._rows, None)
        if row is None:
            self._rows = self._cut_block()
            row = next(self._rows)
        return row

    def _cut_block(self) -> Iterator[Int32s]:
        total = self._count * self._stride
        memory = np.empty(total + _ALIGNED, np.int32)
        start = -memory.ctypes.data // memory.itemsize % _ALIGNED
        block = memory[start : start + total].reshape(self._count, self._stride)
        return iter(block[:, : self._length])


class _Form:
    """Arrays of one bucket, and what their values may be.

    Attributes:
        memory: Where the arrays come from.
        template: One that is all padding.
        tokens: Where its token ids start.
        seats: Where its seats start.
        starts: Where its starts begin.
        lens: Where its lengths begin.
        copies: Where its copies lie.
        updates: Where its updates lie.
    """

    def __init__(
        self, bucket: Bucket, template: Int32s, least: Int32s, most: Int32s
    ) -> None:
        sections = bucket.sections
        self.memory = _Memory(template.size)
        self.template = template
        self.tokens: int = sections["token_ids"].start
        self.seats: int = sections["seat"].start
        self.starts: int = sections["start"].start
        self.lens: int = sections["len"].start
        self.copies = sections["copies"]
        self.updates = sections["updates"]
        self._decode = bucket.decode
        self._tokens_end: int = sections["token_ids"].stop
        # As unsigned numbers, those below the least wrap around and are past the most.
        self._bounded = slice(0, sections["snapshot_slot"].stop)
        self._least = least[self._bounded].view(np.uint32)
        self._range = most[self._bounded].view(np.uint32) - self._least

    def array(self, num_decode: int, num_tokens: int) -> Int32s:
        """Returns an array of padding, but for the token ids that will be written."""
        array, decode, end = self.memory.array(), self._decode, self._tokens_end
        if num_decode < decode:
            array[num_decode:decode] = 0
        if decode + num_tokens < end:
            array[decode + num_tokens : end] = 0
        array[end:] = self.template[end:]
        return array

    def is_within_bounds(self, packed: Int32s) -> bool:
        """Whether tokens, positions, seats and row slots all lie in their bounds."""
        values = packed.view(np.uint32)[self._bounded] - self._least
        return not np.count_nonzero(values > self._range)


class Packer:
    """Packs steps for one cache and checks every id before it is uploaded.

    Attributes:
        layout: The layout of the cache.
        size: Its size.
        buckets: The shapes that steps have.
    """

    def __init__(self, layout: CacheLayout, size: CacheSize, buckets: Buckets) -> None:
        check_layout(layout)
        check_kind("size", size, CacheSize)
        check_kind("buckets", buckets, Buckets)
        self.layout = layout
        self.size = size
        self.buckets = buckets
        groups = layout.num_page_groups
        slots = [size.page_slots(group) for group in range(groups)]
        # By table: the page tables, then the row index.
        self._slots = np.array([*slots, size.row_slots], np.int32)
        columns = np.array([size.max_pages] * groups + [2], np.int32)
        self._check_updates = UpdateChecks(size, self._slots, columns)
        self._forms: dict[Bucket, _Form] = {}

    def pack(self, work: StepWork) -> PackedInputs:
        """Returns the inputs of a step.

        Args:
            work: What the step does. Nothing of it is kept.

        Raises:
            ValueError: naming the field of `work` that has a wrong type or length, or
                an id outside the cache, or the limit of the buckets that it exceeds.
        """
        check_kind("work", work, StepWork)
        check_arrays(work)
        bucket = self.buckets.select(
            len(work.decode_seats), len(work.prefill_seats), len(work.prefill_tokens)
        )
        if work.prefill_seats.size or work.prefill_tokens.size:
            check_prefill(work, self.size)
        if work.snapshot_slots.size:
            check_snapshots(work, self.size, bucket)
        if work.copies.shape[1]:
            check_copies(work.copies, self.size, bucket, self._slots)
        if work.updates.shape[1]:
            self._check_updates(work.updates)
        inputs = self.pack_unchecked(work, bucket, (work.prefill_tokens,))
        if not self._forms[bucket].is_within_bounds(inputs.packed):
            refuse_bounded(work, self.size, NEXT_TOKEN)
        check_seats(work, self.size)
        return inputs

    def pack_unchecked(
        self, work: StepWork, bucket: Bucket, prefill_tokens: Sequence[Int32s]
    ) -> PackedInputs:
        """Returns the inputs of a step that is right for certain.

        For the manager, whose plans are right by construction; its tests have `pack`
        check every one of them.

        Args:
            work: What the step does. Its `prefill_tokens` are not read.
            bucket: The bucket that `Buckets.select` gives.
            prefill_tokens: The prefill tokens in parts, so that they are copied once.
        """
        num_decode, num_seqs = len(work.decode_seats), len(work.prefill_seats)
        num_tokens = sum(map(len, prefill_tokens))
        form = self._forms.get(bucket) or self._form(bucket)
        packed = form.array(num_decode, num_tokens)
        tokens, seats, starts = form.tokens, form.seats, form.starts
        if num_decode:
            packed[tokens : tokens + num_decode] = work.decode_tokens
            packed[seats : seats + num_decode] = work.decode_seats
            packed[starts : starts + num_decode] = work.decode_positions
        if num_tokens:
            skip, lens = bucket.decode, form.lens
            out = packed[tokens + skip : tokens + skip + num_tokens]
            np.concatenate(prefill_tokens, out=out)
            packed[seats + skip : seats + skip + num_seqs] = work.prefill_seats
            packed[starts + skip : starts + skip + num_seqs] = work.prefill_starts
            packed[lens : lens + num_seqs] = work.prefill_lens
        if num_snapshots := len(work.snapshot_slots):
            sections = bucket.sections
            at = sections["snapshot_position"].start
            packed[at : at + num_snapshots] = work.snapshot_positions
            at = sections["snapshot_entry"].start
            packed[at : at + num_snapshots] = work.snapshot_entries + bucket.decode
            at = sections["snapshot_slot"].start
            packed[at : at + num_snapshots] = work.snapshot_slots
        if num_copies := work.copies.shape[1]:
            copies = packed[form.copies].reshape(3, bucket.copies)
            copies[:, :num_copies] = work.copies
        extra = None
        if num_updates := work.updates.shape[1]:
            inline = work.updates
            if (rest := num_updates - bucket.updates) > 0:
                num_updates = bucket.updates
                extra = inline[:, num_updates:]
                extra = self.pad_updates(extra, index_bucket(rest))
                inline = inline[:, :num_updates]
            updates = packed[form.updates].reshape(4, bucket.updates)
            updates[:, :num_updates] = inline
        return _packed_inputs(packed, extra, bucket, self.size)

    def repeat(self, seats: Int32s) -> "DecodeForm":
        """Returns what packs steps in which these seats decode, and nothing else."""
        bucket = self.buckets.select(len(seats), 0, 0)
        form = self._forms.get(bucket) or self._form(bucket)
        return DecodeForm(bucket, self.size, form, seats)

    def pad_updates(self, updates: Int32s, length: int) -> Int32s:
        """Returns `i32[4, length]`: updates, then ones of a table that does not exist.

        Args:
            updates: `i32[4, u]`, as in `StepWork`.
            length: Columns wanted, at least u.
        """
        padded = np.zeros((4, length), np.int32)
        padded[0] = len(self._slots)
        padded[:, : updates.shape[1]] = updates
        return padded

    def _form(self, bucket: Bucket) -> _Form:
        size, sections = self.size, bucket.sections
        template = np.zeros(bucket.num_packed, np.int32)
        template[sections["snapshot_position"]] = -1
        template[sections["seat"]] = size.padding_seat
        template[sections["snapshot_entry"]] = bucket.num_entries - 1
        template[sections["snapshot_slot"]] = size.sink_slot
        copies = template[sections["copies"]].reshape(3, bucket.copies)
        copies[0] = self.layout.num_page_groups
        updates = template[sections["updates"]].reshape(4, bucket.updates)
        updates[0] = len(self._slots)
        least = np.zeros(bucket.num_packed, np.int32)
        least[sections["token_ids"]] = NEXT_TOKEN
        least[sections["snapshot_position"]] = -1
        most = np.zeros(bucket.num_packed, np.int32)
        most[sections["token_ids"]] = np.iinfo(np.int32).max
        most[sections["snapshot_position"]] = size.max_tokens
        most[sections["seat"]] = size.num_seats - 1
        most[sections["start"]] = size.max_tokens - 1
        most[sections["len"]] = size.max_tokens
        most[sections["snapshot_entry"]] = bucket.num_entries - 1
        most[sections["snapshot_slot"]] = size.row_slots - 1
        form = _Form(bucket, template, least, most)
        self._forms[bucket] = form
        return form


class DecodeForm:
    """Packs steps in which the same seats decode: three parts of an array change.

    Attributes:
        bucket: The shape of these steps.
    """

    def __init__(
        self, bucket: Bucket, size: CacheSize, form: _Form, seats: Int32s
    ) -> None:
        self.bucket = bucket
        self._size = size
        self._memory = form.memory
        self._template = form.template.copy()
        self._template[form.seats : form.seats + len(seats)] = seats
        self._tokens = slice(form.tokens, form.tokens + len(seats))
        self._starts = slice(form.starts, form.starts + len(seats))
        self._updates = form.updates

    def pack(
        self, tokens: Int32s | int, positions: npt.NDArray[Any], updates: Int32s
    ) -> PackedInputs:
        """Returns the inputs of a step, unchecked.

        Args:
            tokens: Token ids, or one for all.
            positions: `i64[d]`, tokens already in the cache.
            updates: `i32[4, u]`, as in `StepWork`, at most as many as the bucket takes.
        """
        packed = self._memory.array()
        packed[:] = self._template
        packed[self._tokens] = tokens
        packed[self._starts] = positions
        if count := updates.shape[1]:
            inline = packed[self._updates].reshape(4, self.bucket.updates)
            inline[:, :count] = updates
        return _packed_inputs(packed, None, self.bucket, self._size)
