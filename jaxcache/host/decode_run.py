"""Decoding on: steps in which the same requests decode, one after the other.

That is most of what a server does. From one such step to the next, positions grow by
one, tokens are those sampled last, and some entries get one more page; which do, and
in which step, is known from the start, as all advance together. So such a step is
neither sized nor sorted nor checked again, and costs the same however long the
contexts are. What it changes in the arrays over seats waits here until somebody reads
them there.
"""

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxcache.host.requests import Request, Seats
from jaxcache.host.tables import DeviceTables, Growth
from jaxcache.inputs.buckets import Bucket
from jaxcache.inputs.packing import NEXT_TOKEN, DecodeForm, PackedInputs
from jaxcache.layouts import CacheSize
from jaxcache.prefixes.nodes import Int32s, Int64s

# So many sampled tokens of each request wait to be written down, at most.
_WAITING = 64


class DecodeRun:
    """The requests that decode, and where they are.

    It holds while no other plan is made, none is abandoned and no request ends: so a
    run is only valid for one epoch, and right after its own last plan.

    Attributes:
        requests: The requests.
        seats: `i64[d]`, their seats.
        taken: The same as a set.
        generations: `i64[d]`, the generations of these.
        number: Number of the last plan of the run.
        epoch: The epoch in which it is valid.
        left: How many more steps `max_tokens` allows.
    """

    def __init__(
        self,
        work: tuple[Any, ...],
        requests: list[Request],
        seats: Int64s,
        array: Seats,
        form: DecodeForm,
        number: int,
        epoch: int,
        size: CacheSize,
    ) -> None:
        self.requests = requests
        self.seats = seats
        self.taken = frozenset(seats.tolist())
        self.generations = array.generation[seats]
        self.number = number
        self.epoch = epoch
        self._work = work
        self._array = array
        self._form = form
        self._page = size.tokens_per_page
        self._positions = array.planned[seats]
        self._history = array.history[seats]
        self._next_token = seats * array.width + array.known[seats]
        self.left = size.max_tokens - int(self._positions.max())
        self._step = 0
        self._growths: dict[int, Growth] = {}
        # Adding an array takes half the time of adding a number.
        self._one = np.ones(seats.size, np.int64)
        self._sampled: Int32s = np.empty((_WAITING, seats.size), np.int32)
        self._waiting = 0
        self._last: Int32s | None = None
        self._catch_up = self.catch_up

    def plan_growth(self, array: Seats, tables: DeviceTables) -> bool:
        """Finds out in which steps which entries need a page; says whether it could."""
        ahead = array.capacity[self.seats] - self._positions
        if not 0 <= ahead.min() <= ahead.max() < self._page:
            return False
        indices = array.capacity[self.seats] // self._page
        self._growths = Growth.of_steps(tables.page_table, self.seats, indices, ahead)
        return True

    def goes_on(self, work: Any) -> bool:
        """Whether a step's work is what it was in the steps before."""
        before = self._work
        if type(work) not in (list, tuple) or len(work) != len(before):
            return False
        # Tuples that are the same objects are the same; else, what is equal to a plain
        # number need not be one.
        return all(map(operator.is_, work, before)) or is_equal_work(
            tuple(work), before
        )

    @property
    def growth(self) -> Growth | None:
        """Which entries need a page in the next step."""
        return self._growths.get(self._step % self._page)

    @property
    def bucket(self) -> Bucket:
        """The shape of its steps."""
        return self._form.bucket

    def advance(
        self, number: int, updates: Int32s, is_sampled: bool
    ) -> tuple[PackedInputs, Int64s, Int64s]:
        """Plans one more step.

        Args:
            number: Number of its plan.
            updates: What it uploads.
            is_sampled: Whether the tokens of the last step are known.

        Returns:
            Its inputs, and the tokens in the cache before and after it.
        """
        starts = self._positions
        tokens: Int32s | int = NEXT_TOKEN
        if is_sampled:
            assert self._last is not None
            tokens = self._last
        inputs = self._form.pack(tokens, starts, updates)
        ends = self._positions = starts + self._one
        self.number = number
        self.left -= 1
        self._step += 1
        self._array.catch_up = self._catch_up
        return inputs, starts, ends

    def complete(self, ends: Int64s, sampled: npt.NDArray[Any]) -> None:
        """Notes what the oldest step in flight sampled, `int[d]`; all are token ids."""
        if self._waiting == _WAITING:
            self.catch_up()
        self._history = ends
        self._last = self._sampled[self._waiting]
        self._last[:] = sampled
        self._waiting += 1
        self._array.catch_up = self._catch_up

    def catch_up(self) -> None:
        """Writes into the arrays over seats what happened since it last did."""
        array, seats = self._array, self.seats
        array.catch_up = None
        array.planned[seats] = self._positions
        array.last_plan[seats] = self.number
        array.history[seats] = self._history
        if self._growths:
            array.capacity[seats] = -(-self._positions // self._page) * self._page
        if count := self._waiting:
            places = self._next_token + np.arange(count)[:, None]
            array.flat_tokens[places] = self._sampled[:count]
            self._next_token += count
            array.known[seats] += count
            self._waiting = 0


def is_equal_work(items: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether work equals other work, whose numbers are plain ones."""
    try:
        if items != before:
            return False
    except ValueError:
        # Arrays that do not say whether they equal something.
        return False
    # True and 1.0 equal 1 as well.
    numbers = map(operator.itemgetter(1), items)
    return {*map(type, numbers)} == {int}
