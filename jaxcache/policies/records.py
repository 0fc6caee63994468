"""What is known of each snapshot, in columns that one call can weigh.

A snapshot's record is its row in these columns, from the day it is added until it is
forgotten, resident or not. A resident *serves*, besides itself, ghosts deeper on its
path that have no nearer resident: who comes back for one of them begins from it.

    density = (sum of the index of all that it serves) * gain / cost

    gain    tokens that would be computed again without it: down to the next shallower
            resident, which would serve in its place
    cost    its row, and the pages that would be free without it
"""

from typing import TypeGuard

import numpy as np

from jaxcache.policies.reuse import AGE_BUCKET, Floats, Ints
from jaxcache.prefixes.nodes import Snapshot
from jaxcache.prefixes.order import Geometry

NOBODY = 0
# A resident serves itself and at most the best seven ghosts.
MAX_SERVED = 8
_ONES = np.ones(MAX_SERVED)


class Records:
    """Columns by record, and the list of the residents.

    Attributes:
        offset: Where the index of its class begins.
        last: The request that last came back to its bundle.
        gain: Tokens that a resident saves, when it was last measured.
        pages: Columns of pages that it would free, when it was last measured.
        unmeasured: Residents of which both are not known any more.
        served: `i64[records, MAX_SERVED]`, itself and ghosts; `NOBODY` where none.
        residents: The records of residents, in no order, and nothing after them.
        num_residents: How many there are.
    """

    def __init__(self) -> None:
        self.offset: Ints = np.zeros(64, np.int64)
        self.last: Ints = np.zeros(64, np.int64)
        self.gain: Floats = np.zeros(64)
        self.pages: Floats = np.zeros(64)
        self.served: Ints = np.zeros((64, MAX_SERVED), np.int64)
        self.residents: Ints = np.zeros(64, np.int64)
        self.num_residents = 0
        self.unmeasured: list[int] = []
        self._snapshots: list[Snapshot | None] = [None]
        self._server = [NOBODY]
        self._ghosts: list[list[int]] = [[]]
        self._seat = [-1]
        self._free: list[int] = []

    def new(self, snapshot: Snapshot, offset: int, last: int) -> int:
        """Returns the record of a new snapshot."""
        if self._free:
            record = self._free.pop()
            self._snapshots[record] = snapshot
        else:
            record = len(self._snapshots)
            self._snapshots.append(snapshot)
            self._server.append(NOBODY)
            self._ghosts.append([])
            self._seat.append(-1)
            if record == len(self.offset):
                self._grow()
        self.offset[record] = offset
        self.last[record] = last
        return record

    def _grow(self) -> None:
        for name in ("offset", "last", "gain", "pages", "served", "residents"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))

    def snapshot(self, record: int) -> Snapshot:
        """Returns the snapshot of a record."""
        snapshot = self._snapshots[record]
        assert snapshot is not None
        return snapshot

    def knows(self, snapshot: Snapshot | None) -> TypeGuard[Snapshot]:
        """Returns whether a snapshot was added and is not forgotten."""
        if snapshot is None or snapshot.record is None:
            return False
        return self._snapshots[snapshot.record] is snapshot

    def position(self, record: int) -> int:
        """Returns the position of a record's snapshot."""
        return self.snapshot(record).position

    def is_resident(self, record: int) -> bool:
        """Returns whether a record's snapshot has a row."""
        return self._seat[record] >= 0

    def forget(self, record: int) -> Snapshot:
        """Frees the record of a ghost."""
        snapshot = self.snapshot(record)
        self._leave_server(record)
        self._snapshots[record] = None
        self._free.append(record)
        return snapshot

    def settle(self, record: int, gain: float, pages: float) -> None:
        """Makes a snapshot a resident that serves itself."""
        self._leave_server(record)
        self.gain[record] = gain
        self.pages[record] = pages
        self.served[record] = NOBODY
        self.served[record, 0] = record
        self._seat[record] = self.num_residents
        self.residents[self.num_residents] = record
        self.num_residents += 1

    def unsettle(self, record: int) -> list[int]:
        """Makes a resident a ghost, and returns the ghosts that it served."""
        self.num_residents -= 1
        seat, self._seat[record] = self._seat[record], -1
        moved = int(self.residents[self.num_residents])
        if moved != record:
            self.residents[seat] = moved
            self._seat[moved] = seat
        ghosts, self._ghosts[record] = self._ghosts[record], []
        for ghost in ghosts:
            self._server[ghost] = NOBODY
        return ghosts

    def serve(self, server: int, ghosts: list[int], index: Floats, now: int) -> None:
        """Has a resident serve more ghosts; of all of them it keeps the likeliest."""
        for ghost in ghosts:
            self._leave_server(ghost)
        everyone = self._ghosts[server] + ghosts
        if len(everyone) >= MAX_SERVED:
            for ghost in everyone:
                self._server[ghost] = NOBODY
            rates = self._index(np.array(everyone), index, now)
            best = np.argsort(-rates, kind="stable")[: MAX_SERVED - 1].tolist()
            everyone = [everyone[number] for number in best]
        for ghost in everyone:
            self._server[ghost] = server
        self._ghosts[server] = everyone
        nobody = [NOBODY] * (MAX_SERVED - 1 - len(everyone))
        self.served[server] = [server, *everyone, *nobody]

    def _leave_server(self, record: int) -> None:
        server = self._server[record]
        if server != NOBODY:
            self._server[record] = NOBODY
            ghosts = self._ghosts[server]
            at, last = ghosts.index(record), ghosts.pop()
            if last != record:
                ghosts[at] = last
                self.served[server, at + 1] = last
            self.served[server, len(ghosts) + 1] = NOBODY

    def measure_again(self, geometry: Geometry) -> None:
        """Asks the tree about the residents that changed without its saying so."""
        for record in self.unmeasured:
            if self.is_resident(record):
                self.measure(record, geometry)
        self.unmeasured.clear()

    def measure(self, record: int, geometry: Geometry) -> tuple[float, float]:
        """Asks the tree what a resident saves and what it would free."""
        snapshot = self.snapshot(record)
        shallower = geometry.shallower(snapshot)
        gain = snapshot.position - (shallower.position if shallower else 0)
        pages = geometry.pages_freed(snapshot)
        self.gain[record] = gain
        self.pages[record] = pages
        return gain, pages

    def rates(self, residents: Ints, index: Floats, now: int) -> Floats:
        """Returns the sum of the index of all that each resident serves."""
        served = self.served.take(residents, axis=0)
        total: Floats = self._index(served, index, now) @ _ONES
        return total

    def _index(self, records: Ints, index: Floats, now: int) -> Floats:
        ages = AGE_BUCKET.take(now - self.last.take(records), mode="clip")
        ages += self.offset.take(records)
        return index.take(ages)
