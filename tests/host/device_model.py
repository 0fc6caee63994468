"""A device that remembers instead of computing.

The key and value of a token depend on all tokens before it, and so does a recurrent
state. So a page holds, for each of its tokens, a digest of the history up to that
token, and a row holds the digest of all that it has absorbed. Every step checks that
each read gives exactly the history of its own request, and samples a token that depends
on all of it: if any slot ever held anything else, a check fails at once.
"""

import functools
import zlib
from collections.abc import Hashable

import numpy as np
import numpy.typing as npt

from jaxcache.inputs.packing import NEXT_TOKEN, PackedInputs
from jaxcache.layouts import NULL_SLOT, CacheLayout, CacheSize
from jaxcache.prefixes.nodes import Node

Digests = npt.NDArray[np.int64]

EMPTY = 17
POISON = -1


def absorb(digest: int, token: int, scope: Hashable) -> int:
    """Digest of a history with one more token, never negative."""
    return hash((digest, token, _number(scope))) & ((1 << 62) - 1)


@functools.cache
def _number(scope: Hashable) -> int:
    """A number for a scope, the same in every process: hashes of strings are not."""
    return zlib.crc32(repr(scope).encode())


def sample(digest: int, vocab: int) -> int:
    return digest % vocab


class Truth:
    """The tokens of one request and the digests of their prefixes."""

    def __init__(self, prompt: list[int], scope: Hashable) -> None:
        self.scope = scope
        self.prompt_length = len(prompt)
        self.tokens: list[int] = []
        self.digests = [EMPTY]
        for token in prompt:
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.digests.append(absorb(self.digests[-1], token, self.scope))


class Device:
    """What the pools and tables hold."""

    def __init__(self, layout: CacheLayout, size: CacheSize, vocab: int) -> None:
        self.size = size
        self.vocab = vocab
        self.has_rows = layout.has_recurrent
        self.groups = layout.num_page_groups
        page = size.tokens_per_page
        self.pages: list[Digests] = [
            np.full((size.page_slots(group), page), POISON, np.int64)
            for group in range(self.groups)
        ]
        self.rows: Digests = np.full(size.row_slots, POISON, np.int64)
        self.rows[NULL_SLOT] = EMPTY
        seats = size.num_seats
        self.page_table = np.full((self.groups, seats, size.max_pages), 1, np.int32)
        self.row_index = np.full((2, seats), 1, np.int32)
        self.last_token = np.full(seats, POISON, np.int64)

    def poison(self, pages: list[npt.NDArray[np.int32]], rows: list[int]) -> None:
        """Spoils slots that nobody owns."""
        for group, slots in enumerate(pages):
            self.pages[group][slots] = POISON
        self.rows[rows] = POISON

    def run(
        self, inputs: PackedInputs, truths: dict[int, Truth], samples: list[bool]
    ) -> list[int]:
        """Runs a step.

        Args:
            inputs: The step.
            truths: What the request in each seat should have, by seat. Sampled tokens
                are appended.
            samples: Whether each entry samples, decode entries first.

        Returns:
            What each entry sampled; 0 where it does not.
        """
        bucket, packed = inputs.bucket, inputs.packed
        part = {name: packed[place] for name, place in bucket.sections.items()}
        self._update(part["updates"].reshape(4, -1))
        if inputs.extra_updates is not None:
            self._update(inputs.extra_updates)
        for group, source, destination in part["copies"].reshape(3, -1).T.tolist():
            if group < self.groups:
                assert destination >= self.size.first_slot
                self.pages[group][destination] = self.pages[group][source]
        entries = self._entries(part, bucket.decode)
        for seat, start, _ in entries:
            self._read(seat, start, truths[seat])
        outcome = []
        emissions = self._emissions(part)
        real = 0
        for index, (seat, start, tokens) in enumerate(entries):
            truth = truths[seat]
            for offset, token in enumerate(tokens):
                if token == NEXT_TOKEN:
                    token = int(self.last_token[seat])
                if start + offset == len(truth.tokens):
                    truth.append(token)
                assert truth.tokens[start + offset] == token
            self._write(seat, start, start + len(tokens), truth, emissions)
            if samples[index]:
                token = sample(truth.digests[start + len(tokens)], self.vocab)
                self.last_token[seat] = token
                outcome.append(token)
            else:
                outcome.append(0)
            real += 1
        assert real == len(samples)
        assert not emissions, "each emission is inside its chunk"
        return outcome

    def _update(self, updates: npt.NDArray[np.int32]) -> None:
        for table, seat, column, value in updates.T.tolist():
            if table < self.groups:
                self.page_table[table, seat, column] = value
            elif table == self.groups:
                self.row_index[column, seat] = value

    def _entries(
        self, part: dict[str, npt.NDArray[np.int32]], num_decode: int
    ) -> list[tuple[int, int, list[int]]]:
        entries = []
        at = num_decode
        tokens = part["token_ids"].tolist()
        for index, seat in enumerate(part["seat"].tolist()):
            length = 1
            if index >= num_decode:
                length = int(part["len"][index - num_decode])
            if seat != self.size.padding_seat:
                begin = index if index < num_decode else at
                start = int(part["start"][index])
                entries.append((seat, start, tokens[begin : begin + length]))
            if index >= num_decode:
                at += length
        return entries

    def emissions(self, inputs: PackedInputs) -> dict[tuple[int, int], int]:
        """Returns the rows that a step writes inside its chunks, by seat, position."""
        sections = inputs.bucket.sections.items()
        return self._emissions({name: inputs.packed[place] for name, place in sections})

    def _emissions(
        self, part: dict[str, npt.NDArray[np.int32]]
    ) -> dict[tuple[int, int], int]:
        """Rows to write, by seat and position."""
        seats = part["seat"].tolist()
        return {
            (seats[entry], position): row
            for position, entry, row in zip(
                part["snapshot_position"].tolist(),
                part["snapshot_entry"].tolist(),
                part["snapshot_slot"].tolist(),
                strict=True,
            )
            if position >= 0
        }

    def _read(self, seat: int, start: int, truth: Truth) -> None:
        page = self.size.tokens_per_page
        count = -(-start // page)
        for group in range(self.groups):
            slots = self.page_table[group, seat, :count]
            held = self.pages[group][slots].reshape(-1)[:start]
            wanted = np.array(truth.digests[1 : start + 1], np.int64)
            assert np.array_equal(held, wanted), (
                f"seat {seat} reads other tokens at {np.flatnonzero(held != wanted)} "
                f"of {start} in group {group}"
            )
        if self.has_rows:
            row = self.row_index[0, seat]
            assert self.rows[row] == truth.digests[start], (
                f"seat {seat} reads row {row}, which has not its {start} tokens"
            )

    def _write(
        self,
        seat: int,
        start: int,
        end: int,
        truth: Truth,
        emissions: dict[tuple[int, int], int],
    ) -> None:
        page = self.size.tokens_per_page
        for group in range(self.groups):
            for position in range(start, end):
                slot = self.page_table[group, seat, position // page]
                assert slot >= self.size.first_slot
                digest = truth.digests[position + 1]
                self.pages[group][slot, position % page] = digest
        if self.has_rows:
            for position in range(start + 1, end + 1):
                row = emissions.pop((seat, position), None)
                if row is not None:
                    self.rows[row] = truth.digests[position]
            row = int(self.row_index[1, seat])
            assert row >= self.size.first_slot
            self.rows[row] = truth.digests[end]

    def check_node(self, node: Node, scope: Hashable) -> None:
        """Checks that the pages and snapshots of a node hold what its tokens say."""
        path = node.path()
        tokens = [token for n in path for token in n.tokens.tolist()]
        digests = np.array(Truth(tokens, scope).digests, np.int64)
        page = self.size.tokens_per_page
        first = node.start // page
        for group in range(self.groups):
            for index, slot in enumerate(node.pages[group].tolist(), first):
                wanted = digests[1 + index * page : 1 + (index + 1) * page]
                assert np.array_equal(self.pages[group][slot], wanted)
            if node.tail is not None:
                wanted = digests[1 + node.tail_end // page * page : node.tail_end + 1]
                held = self.pages[group][node.tail[group], : len(wanted)]
                assert np.array_equal(held, wanted)
        for snapshot in node.snapshots:
            if snapshot.is_resident:
                assert self.rows[snapshot.row] == digests[snapshot.position]
