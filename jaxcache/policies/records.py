"""What is known of each snapshot, in columns that one call can weigh.

A snapshot's record is its row in these columns, from the day it is added until it is
forgotten, resident or not. A resident *serves*, besides itself, ghosts deeper on its
path that have no nearer resident: who comes back for one of them begins from it.

    density = (sum of the index of all that it serves) * gain / cost

    gain    tokens that would be computed again without it: down to the next shallower
            resident, which would serve in its place
    cost    its row, and the pages that would be free without it
"""

import numpy as np
import numpy.typing as npt

from jaxcache.policies.policy import Geometry, Snapshot
from jaxcache.policies.reuse import AGE_BUCKET, NO_CLASS, NUM_AGES, OLDEST

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

NOBODY = 0
# A resident serves itself and at most the best seven ghosts.
MAX_SERVED = 8


class Records:
    """Columns by record, and the list of the residents.

    Attributes:
        class_id: The class of each; `NO_CLASS` for one that is free.
        last: The request that last came back to its bundle.
        gain: Tokens that a resident saves, when it was last measured.
        pages: Columns of pages that it would free; NaN if that must be measured anew.
        served: `i64[records, MAX_SERVED]`, itself and ghosts; `NOBODY` where none.
        residents: The records of residents, in no order, and nothing after them.
        num_residents: How many there are.
    """

    def __init__(self) -> None:
        self.class_id: Ints = np.full(64, NO_CLASS)
        self.last: Ints = np.zeros(64, np.int64)
        self.gain: Floats = np.zeros(64)
        self.pages: Floats = np.zeros(64)
        self.served: Ints = np.zeros((64, MAX_SERVED), np.int64)
        self.residents: Ints = np.zeros(64, np.int64)
        self.num_residents = 0
        self._snapshots: list[Snapshot | None] = [None]
        self._server = [NOBODY]
        self._place = [-1]
        self._free: list[int] = []

    def new(self, snapshot: Snapshot, class_id: int, last: int) -> int:
        """Returns the record of a new snapshot."""
        if self._free:
            record = self._free.pop()
            self._snapshots[record] = snapshot
        else:
            record = len(self._snapshots)
            self._snapshots.append(snapshot)
            self._server.append(NOBODY)
            self._place.append(-1)
            if record == len(self.class_id):
                self._grow()
        self.class_id[record] = class_id
        self.last[record] = last
        return record

    def _grow(self) -> None:
        size = len(self.class_id)
        for name in ("class_id", "last", "gain", "pages", "served", "residents"):
            column = getattr(self, name)
            setattr(self, name, np.concatenate([column, np.zeros_like(column)]))
        self.class_id[size:] = NO_CLASS

    def snapshot(self, record: int) -> Snapshot:
        """Returns the snapshot of a record."""
        snapshot = self._snapshots[record]
        assert snapshot is not None
        return snapshot

    def knows(self, snapshot: Snapshot) -> bool:
        """Returns whether a snapshot was added and is not forgotten."""
        record = snapshot.record
        return record is not None and self._snapshots[record] is snapshot

    def position(self, record: int) -> int:
        """Returns the position of a record's snapshot."""
        return self.snapshot(record).position

    def is_resident(self, record: int) -> bool:
        """Returns whether a record's snapshot has a row."""
        return self._place[record] >= 0

    def forget(self, record: int) -> Snapshot:
        """Frees the record of a ghost."""
        snapshot = self.snapshot(record)
        self._leave_server(record)
        self.class_id[record] = NO_CLASS
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
        self._place[record] = self.num_residents
        self.residents[self.num_residents] = record
        self.num_residents += 1

    def unsettle(self, record: int) -> list[int]:
        """Makes a resident a ghost, and returns the ghosts that it served."""
        ghosts = [each for each in self.served[record, 1:].tolist() if each != NOBODY]
        for ghost in ghosts:
            self._server[ghost] = NOBODY
        self.num_residents -= 1
        place, self._place[record] = self._place[record], -1
        moved = int(self.residents[self.num_residents])
        if moved != record:
            self.residents[place] = moved
            self._place[moved] = place
        return ghosts

    def serve(self, server: int, ghosts: list[int], index: Floats, now: int) -> None:
        """Has a resident serve more ghosts; of all of them it keeps the likeliest."""
        if server == NOBODY or not ghosts:
            return
        for ghost in ghosts:
            self._leave_server(ghost)
        row = self.served[server]
        everyone = [each for each in row[1:].tolist() if each != NOBODY]
        everyone += ghosts
        if len(everyone) >= MAX_SERVED:
            for each in everyone:
                self._server[each] = NOBODY
            rates = self._index(np.array(everyone), index, now)
            best = np.argsort(-rates, kind="stable")[: MAX_SERVED - 1].tolist()
            everyone = [everyone[number] for number in best]
        row[1:] = NOBODY
        row[1 : 1 + len(everyone)] = everyone
        for each in everyone:
            self._server[each] = server

    def _leave_server(self, record: int) -> None:
        server = self._server[record]
        if server != NOBODY:
            self._server[record] = NOBODY
            row = self.served[server]
            row[row == record] = NOBODY

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
        total: Floats = self._index(self.served[residents], index, now).sum(axis=1)
        return total

    def _index(self, records: Ints, index: Floats, now: int) -> Floats:
        ages = np.minimum(now - self.last[records], OLDEST)
        buckets = AGE_BUCKET.take(ages)
        return index.take(self.class_id[records] * NUM_AGES + buckets)
