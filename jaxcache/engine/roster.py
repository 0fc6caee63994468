"""The requests that an engine holds, and how far each has got: no cache, no device."""

import collections
import dataclasses
from collections.abc import Hashable, Iterator

import numpy as np

from jaxcache.engine.request import Finish, Request, Result
from jaxcache.engine.schedule import Limits, Need, Schedule, may_start, schedule
from jaxcache.host.plans import Entry


@dataclasses.dataclass(slots=True, eq=False)
class Active:
    """A request from `submit` to its result.

        0          reused        planned       prompt end        + max_new_tokens
        |  from the  |  went to    | prompt_left | new_left        |
        |  cache     |  the device |             |                 |

    Attributes:
        request: What was asked.
        prompt: `i32[prompt tokens]`.
        need: The most it will ever hold.
        submitted_s: When it was submitted.
        prompt_left: Tokens of the prompt that no plan has taken yet.
        new_left: Tokens that later plans may sample.
        reused: Tokens of the prompt that came from the cache.
        computed: Tokens of the prompt that went to the device.
        steps_in_flight: Steps with this request that have not landed.
        tokens: What it sampled so far.
        first_token_s: When the first of them was known.
        ending: Why it takes no further part, once that is known.
        has_started: Whether it holds anything of the cache.
    """

    request: Request
    prompt: np.ndarray
    need: Need
    submitted_s: float
    prompt_left: int
    new_left: int
    reused: int = 0
    computed: int = 0
    steps_in_flight: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list)
    first_token_s: float | None = None
    ending: Finish | None = None
    has_started: bool = False

    def sampled(self, token: int, now_s: float) -> None:
        """Takes a token from a step that landed; may be the request's last."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        self.tokens.append(token)
        if token in self.request.eos_ids:
            self.ending = Finish.EOS
        elif len(self.tokens) == self.request.max_new_tokens:
            self.ending = Finish.LENGTH

    def result(self, now_s: float) -> Result:
        """What became of it."""
        assert self.ending is not None
        first = self.first_token_s
        return Result(
            id=self.request.id,
            tokens=tuple(self.tokens),
            finish=self.ending,
            prompt_tokens=len(self.prompt),
            reused_tokens=self.reused,
            computed_tokens=self.computed,
            time_to_first_token_s=None if first is None else first - self.submitted_s,
            total_s=now_s - self.submitted_s,
        )


class Roster:
    """All requests, in the order in which they are served.

    A request waits, then prefills, then decodes; one that is ending is in none of the
    three but still holds what it needs until its last step has landed.

    Args:
        room: What the cache can hold.
        limits: What a step can hold.
    """

    def __init__(self, room: Need, limits: Limits) -> None:
        self.capacity = room
        self.room = room
        self._limits = limits
        self._turns = min(limits.token_budget, limits.decode_seqs)
        self._held: dict[Hashable, Active] = {}
        self._waiting: collections.deque[Active] = collections.deque()
        self._prefilling: dict[Hashable, Active] = {}
        self._decoding: dict[Hashable, Active] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: Hashable) -> bool:
        return request_id in self._held

    def __getitem__(self, request_id: Hashable) -> Active:
        return self._held[request_id]

    def add(self, active: Active) -> None:
        """Puts a request at the end of the line."""
        self._held[active.request.id] = active
        self._waiting.append(active)

    def __iter__(self) -> Iterator[Active]:
        return iter(self._held.values())

    def schedule(self) -> Schedule:
        """The work of the next step for the requests that run."""
        return schedule(
            list(self._decoding),
            ((i, active.prompt_left) for i, active in self._prefilling.items()),
            self._limits,
        )

    def start_next(self, step: Schedule) -> Active | None:
        """Starts the request that has waited longest, if its need fits beside all."""
        if not self._waiting or not may_start(self._waiting[0].need, self.room, step):
            return None
        active = self._waiting.popleft()
        active.has_started = True
        self.room = self.room.minus(active.need)
        self._prefilling[active.request.id] = active
        return active

    def postpone(self, active: Active) -> None:
        """Takes a start back: the request is first in line again."""
        del self._prefilling[active.request.id]
        self.room = self.room.plus(active.need)
        active.has_started = False
        self._waiting.appendleft(active)

    def planned(self, entry: Entry) -> None:
        """Notes that a step was launched with this part of a request."""
        request_id = entry.request_id
        active = self._held[request_id]
        active.steps_in_flight += 1
        if active.prompt_left:
            if not active.computed:
                # The first plan looks again, and may have found more to reuse.
                active.reused = entry.start
            active.computed += entry.num_tokens
            active.prompt_left = len(active.prompt) - entry.start - entry.num_tokens
            if active.prompt_left:
                return
            del self._prefilling[request_id]
            self._decoding[request_id] = active
        elif len(self._decoding) > self._turns:
            # Not all can decode in one step, so those that did go to the end.
            self._decoding[request_id] = self._decoding.pop(request_id)
        active.new_left -= 1
        if not active.new_left:
            del self._decoding[request_id]

    def withdraw(self, active: Active) -> None:
        """Takes the request out of the line; it keeps what it holds until `remove`."""
        self._prefilling.pop(active.request.id, None)
        self._decoding.pop(active.request.id, None)

    def remove(self, active: Active) -> None:
        """Forgets a request and gives its need back."""
        self.withdraw(active)
        if active.has_started:
            self.room = self.room.plus(active.need)
        else:
            self._waiting.remove(active)
        del self._held[active.request.id]
