"""Who runs in the next step: pure functions of what waits, what runs and what is free.

One step computes at most `token_budget` tokens. Requests that decode go first, one
token each, so that a long prompt never holds up an answer; the rest of the budget goes
to prompts, first come, first served, in chunks of any length. A waiting request starts
only when the most it will ever need fits beside the most that all running requests will
ever need. So a request that runs always gets its next page, and nothing waits for
itself.
"""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most that one step may hold.

    Attributes:
        token_budget: Tokens of all entries together.
        decode_seqs: Requests that decode.
        prefill_seqs: Requests that prefill.
        prefill_tokens: Tokens of all prompts together.
    """

    token_budget: int
    decode_seqs: int
    prefill_seqs: int
    prefill_tokens: int


@dataclasses.dataclass(frozen=True)
class Need:
    """The most that a request ever holds, or what is left of the cache.

    Attributes:
        seats: Seats; 1 for a request.
        rows: Rows of recurrent state; 1 for a request where the model has any.
        pages: Pages of each page group.
    """

    seats: int
    rows: int
    pages: tuple[int, ...]

    def fits(self, room: "Need") -> bool:
        """Whether this much is left in `room`."""
        return (
            self.seats <= room.seats
            and self.rows <= room.rows
            and all(a <= b for a, b in zip(self.pages, room.pages, strict=True))
        )

    def plus(self, other: "Need") -> "Need":
        """Both together."""
        return Need(
            self.seats + other.seats,
            self.rows + other.rows,
            tuple(a + b for a, b in zip(self.pages, other.pages, strict=True)),
        )

    def minus(self, other: "Need") -> "Need":
        """What is left of this after `other` is taken."""
        return Need(
            self.seats - other.seats,
            self.rows - other.rows,
            tuple(a - b for a, b in zip(self.pages, other.pages, strict=True)),
        )


@dataclasses.dataclass(slots=True)
class Schedule:
    """The work of one step while it is put together.

    Attributes:
        work: Request and number of its tokens; requests that decode come first.
        tokens_left: Budget that nobody took yet.
        prefill_tokens_left: Prompt tokens that still fit.
        prefill_seqs_left: Prompts that still fit.
    """

    work: list[tuple[Hashable, int]]
    tokens_left: int
    prefill_tokens_left: int
    prefill_seqs_left: int

    def take(self, request_id: Hashable, prompt_left: int) -> int:
        """Gives a prompt as many tokens as fit, and says how many; 0 for none."""
        num_tokens = min(prompt_left, self.room)
        if num_tokens > 0:
            self.work.append((request_id, num_tokens))
            self.tokens_left -= num_tokens
            self.prefill_tokens_left -= num_tokens
            self.prefill_seqs_left -= 1
        return num_tokens

    @property
    def room(self) -> int:
        """Tokens that one more prompt may have."""
        if self.prefill_seqs_left == 0:
            return 0
        return min(self.tokens_left, self.prefill_tokens_left)


def schedule(
    decoding: Sequence[Hashable],
    prefilling: Iterable[tuple[Hashable, int]],
    limits: Limits,
) -> Schedule:
    """Divides the budget of a step among the requests that run.

    Args:
        decoding: Requests that decode, the one that has waited longest first. If the
            step has no room for all, the caller moves those that ran to the end, and
            each gets its turn.
        prefilling: Requests within their prompt, oldest first, and the prompt tokens
            that no step has taken yet.
        limits: The most that the step may hold.

    Returns:
        The work, and the room left for requests that have yet to start.
    """
    num_decode = min(len(decoding), limits.token_budget, limits.decode_seqs)
    step = Schedule(
        work=[(request_id, 1) for request_id in decoding[:num_decode]],
        tokens_left=limits.token_budget - num_decode,
        prefill_tokens_left=limits.prefill_tokens,
        prefill_seqs_left=limits.prefill_seqs,
    )
    for request_id, prompt_left in prefilling:
        if not step.take(request_id, prompt_left):
            break
    return step


def may_start(first: Need, room: Need, step: Schedule) -> bool:
    """Whether the request that has waited longest may start in this step.

    Only the first in line is ever asked about: were a smaller one let past it, a large
    request could wait for ever.
    """
    return step.room > 0 and first.fits(room)
