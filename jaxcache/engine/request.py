"""What is asked of the engine, and what comes back."""

import dataclasses
import enum
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np

from jaxcache.host.core import check_hashable
from jaxcache.layouts.arguments import boolean, integer


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One prompt to continue.

    Attributes:
        id: Unique among the requests that the engine holds.
        prompt: `i32[prompt tokens]` or any sequence of ints; at least one token.
        max_new_tokens: The most tokens to sample; at least one.
        eos_ids: The request ends after sampling one of these.
        scope: Requests of different scope (adapter, salt, tenant) share nothing.
        points: Token positions to take a snapshot at, beside those of the policy.
        reuse: Whether what earlier requests left may be used.

    Raises:
        ValueError: naming the field, if one is of a wrong type.
    """

    id: Hashable
    prompt: Sequence[int] | np.ndarray
    max_new_tokens: int = 64
    eos_ids: frozenset[int] = frozenset()
    scope: Hashable = None
    points: tuple[int, ...] = ()
    reuse: bool = True

    def __post_init__(self) -> None:
        for name in ("id", "scope"):
            check_hashable(f"{name} of a request", getattr(self, name))
        where = f"of request {self.id!r}"
        boolean(f"reuse {where}", self.reuse)
        count = integer(f"max_new_tokens {where}", self.max_new_tokens)
        eos_ids = frozenset(_integers(f"eos_ids {where}", self.eos_ids))
        points = _integers(f"points {where}", self.points)
        object.__setattr__(self, "max_new_tokens", count)
        object.__setattr__(self, "eos_ids", eos_ids)
        object.__setattr__(self, "points", points)


def _integers(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise ValueError(f"{name} must be a sequence of integers, got {values!r}")
    return tuple(integer(name, value) for value in values)


class Finish(enum.Enum):
    """Why a request ended."""

    LENGTH = "it sampled max_new_tokens tokens"
    EOS = "it sampled one of its eos_ids"
    CANCELLED = "it was cancelled"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What became of one request.

    Attributes:
        id: The request's id.
        tokens: What was sampled, in order, the end-of-sequence token included.
        finish: Why it ended.
        prompt_tokens: Length of the prompt.
        reused_tokens: Tokens of the prompt that came from the cache.
        computed_tokens: Tokens of the prompt that went through the model; less than
            the rest if the request was cancelled.
        time_to_first_token_s: From `submit` to the first token on the host; None if the
            request was cancelled before.
        total_s: From `submit` to the end.
    """

    id: Hashable
    tokens: tuple[int, ...]
    finish: Finish
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    time_to_first_token_s: float | None
    total_s: float


@dataclasses.dataclass(frozen=True)
class Progress:
    """What one turn of the engine's loop brought.

    Attributes:
        new_tokens: Tokens sampled for each request, by id; a request without a new
            token is left out.
        finished: Results of the requests that ended.
        computed_tokens: Tokens that the step which ended now had computed.
    """

    new_tokens: dict[Hashable, int]
    finished: tuple[Result, ...] = ()
    computed_tokens: int = 0
