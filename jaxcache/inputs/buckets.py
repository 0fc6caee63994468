"""Step buckets: the few static shapes that steps have.

The packed array of a step, section after section:

    token_ids | snapshot_position | seat | start | len | snapshot_entry | .. slot | ..
    D + N     | M                 | D+P  | D+P   | P   | M              | M       |

followed by copies `[3, C]` and updates `[4, U]`.
"""

import bisect
import dataclasses
import functools

from jaxcache.layouts.arguments import MAX_SIZE, integer

# A scatter with one index becomes a dynamic-update-slice, and that copies the pool on
# CPU when the pool is read later in the same step (JAX 0.12).
MIN_INDICES = 2


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The static shape of a step.

    Attributes:
        decode: Decode entries, D.
        prefill_seqs: Prefill entries, P. The last one is always padding: padding tokens
            belong to it, so no real entry ever has a token that is not its own.
        prefill_tokens: Tokens of all prefill entries, N.
        snapshots: Snapshots emitted inside the step, M.
        copies: Pages copied before the step, C.
        updates: Changes of page tables and row index that travel in the packed array.
    """

    decode: int
    prefill_seqs: int
    prefill_tokens: int
    snapshots: int
    copies: int
    updates: int

    @property
    def num_tokens(self) -> int:
        """Tokens, T = D + N."""
        return self.decode + self.prefill_tokens

    @property
    def num_entries(self) -> int:
        """Entries, E = D + P."""
        return self.decode + self.prefill_seqs

    @functools.cached_property
    def sections(self) -> dict[str, slice]:
        """Where each part of the packed array lies."""
        lengths = {
            "token_ids": self.num_tokens,
            "snapshot_position": self.snapshots,
            "seat": self.num_entries,
            "start": self.num_entries,
            "len": self.prefill_seqs,
            "snapshot_entry": self.snapshots,
            "snapshot_slot": self.snapshots,
            "copies": 3 * self.copies,
            "updates": 4 * self.updates,
        }
        sections, start = {}, 0
        for name, length in lengths.items():
            sections[name] = slice(start, start + length)
            start += length
        return sections

    @property
    def num_packed(self) -> int:
        """Length of the packed array."""
        return int(self.sections["updates"].stop)


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The step shapes there are, and so the bound on the number of compilations.

    Attributes:
        decode: Sizes of the decode part, ascending, each at least 2.
        prefill_tokens: Sizes of the prefill part in tokens, ascending, each at least 2;
            empty where a process only decodes.
        max_prefill_seqs: Most sequences in the prefill part.
        max_snapshots: Most snapshots emitted inside one step; 0 or at least 2.
        max_copies: Most pages copied before one step; 0 or at least 2.
    """

    decode: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    max_prefill_seqs: int = 8
    max_snapshots: int = 16
    max_copies: int = 8

    def __post_init__(self) -> None:
        for name in ("decode", "prefill_tokens"):
            sizes = getattr(self, name)
            is_tuple = isinstance(sizes, tuple)
            for size in sizes if is_tuple else ():
                integer(f"each size of {name}", size, maximum=MAX_SIZE)
            good = is_tuple and all(size >= MIN_INDICES for size in sizes)
            if not good or list(sizes) != sorted(set(sizes)):
                raise ValueError(
                    f"{name} must be an ascending tuple of different sizes, each at "
                    f"least {MIN_INDICES}, got {sizes!r}"
                )
        if not self.decode and not self.prefill_tokens:
            raise ValueError("decode and prefill_tokens must not both be empty")
        for name in ("max_snapshots", "max_copies"):
            value = integer(name, getattr(self, name), maximum=MAX_SIZE)
            if value < 0 or value == 1:
                raise ValueError(
                    f"{name} must be 0 or at least {MIN_INDICES}, got {value!r}"
                )
        integer("max_prefill_seqs", self.max_prefill_seqs, 1, MAX_SIZE)

    @classmethod
    def powers_of_two(
        cls, max_decode: int, max_prefill_tokens: int, **limits: int
    ) -> "Buckets":
        """Returns buckets that waste at most half of a step.

        Args:
            max_decode: Most decode entries in a step.
            max_prefill_tokens: Most prefill tokens in a step.
            **limits: `max_prefill_seqs`, `max_snapshots`, `max_copies`.
        """
        max_decode = integer("max_decode", max_decode, 1, MAX_SIZE)
        max_prefill_tokens = integer(
            "max_prefill_tokens", max_prefill_tokens, 1, MAX_SIZE
        )

        def sizes(largest: int, smallest: int) -> tuple[int, ...]:
            steps = []
            while smallest < largest:
                steps.append(smallest)
                smallest *= 2
            return (*steps, max(largest, MIN_INDICES))

        return cls(sizes(max_decode, 2), sizes(max_prefill_tokens, 16), **limits)

    @property
    def max_decode(self) -> int:
        """Most decode entries in a step."""
        return self.decode[-1] if self.decode else 0

    @property
    def max_prefill_tokens(self) -> int:
        """Most prefill tokens in a step."""
        return self.prefill_tokens[-1] if self.prefill_tokens else 0

    @functools.cached_property
    def shapes(self) -> dict[tuple[int, int], Bucket]:
        """Every bucket by its decode entries and prefill tokens."""
        return {
            (decode, tokens): self._shape(decode, tokens)
            for decode in (0, *self.decode)
            for tokens in (0, *self.prefill_tokens)
            if decode or tokens
        }

    def _shape(self, decode: int, tokens: int) -> Bucket:
        prefill = tokens > 0
        seqs = self.max_prefill_seqs + 1 if prefill else 0
        return Bucket(
            decode=decode,
            prefill_seqs=seqs,
            prefill_tokens=tokens,
            snapshots=self.max_snapshots if prefill else 0,
            copies=self.max_copies if prefill else 0,
            # What a step usually changes: a page for some entries, the pages and both
            # rows of a few new ones. A burst travels in `extra_updates`.
            updates=max(16, decode) + tokens // 16 + 4 * seqs,
        )

    @property
    def count(self) -> int:
        """How many shapes a step can have."""
        return len(self.shapes)

    def select(
        self, num_decode: int, num_prefill_seqs: int, num_prefill_tokens: int
    ) -> Bucket:
        """Returns the smallest bucket that holds a step.

        Args:
            num_decode: Decode entries of the step.
            num_prefill_seqs: Prefill entries of the step.
            num_prefill_tokens: Their tokens together.

        Raises:
            ValueError: naming the limit that the step exceeds.
        """
        if num_decode > self.max_decode:
            raise ValueError(
                f"num_decode must be at most {self.max_decode}, the largest decode "
                f"bucket, got {num_decode}"
            )
        if num_prefill_tokens > self.max_prefill_tokens:
            raise ValueError(
                f"num_prefill_tokens must be at most {self.max_prefill_tokens}, the "
                f"largest prefill bucket, got {num_prefill_tokens}"
            )
        if num_prefill_seqs > self.max_prefill_seqs:
            raise ValueError(
                f"num_prefill_seqs must be at most max_prefill_seqs = "
                f"{self.max_prefill_seqs}, got {num_prefill_seqs}"
            )
        if num_decode < 1 and num_prefill_tokens < 1:
            raise ValueError("num_decode or num_prefill_tokens must be at least 1")
        decode = tokens = 0
        if num_decode:
            decode = self.decode[bisect.bisect_left(self.decode, num_decode)]
        if num_prefill_tokens:
            index = bisect.bisect_left(self.prefill_tokens, num_prefill_tokens)
            tokens = self.prefill_tokens[index]
        return self.shapes[decode, tokens]
