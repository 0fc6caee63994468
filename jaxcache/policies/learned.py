"""The default policy: what goes first is what saves the least for what it takes up.

Every request leaves a *bundle* of snapshots behind: one for each candidate in its
prompt and one at its end. Most are ghosts from the start. They are there to be scored:
when a later request comes back, the deepest one that it meets is credited, and so each
kind shows what a row for it would have been worth, without being paid for.

    place    one of a bundle gets a row: the one that promises the most tokens a byte.
             It is never refused; it has to prove itself at the next eviction
    evict    the least dense of a random sample (`jaxcache.policies.records`): it is
             weighed as of now, which a heap of old weights would not be

Rows and pages are two pools, and usually one of them is the short one. Their prices
follow: a page gets dearer with each eviction for pages, a row with each one for a row.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from jaxcache.policies.candidates import candidates
from jaxcache.policies.policy import (
    BRANCH,
    KINDS,
    NO_ROW,
    RESPONSE,
    Arrival,
    Geometry,
    Snapshot,
    Wish,
)
from jaxcache.policies.records import NOBODY, Ints, Records
from jaxcache.policies.reuse import (
    HITS_STEP,
    KIND_STEP,
    MAX_HITS,
    NUM_AGES,
    SUPERSEDED_STEP,
    UNKNOWN_RESPONSE,
    ReuseTables,
    class_of,
    response_of,
)

KIND_NUMBER = {kind: number for number, kind in enumerate(KINDS)}
_BRANCH, _RESPONSE = KIND_NUMBER[BRANCH], KIND_NUMBER[RESPONSE]

# How many residents are weighed for a victim, and how often if none of them will do.
SAMPLES = 64
SAMPLINGS = 4

# A ghost is forgotten this many requests after its bundle was last used.
GHOST_REQUESTS = 4096

# A ghost that was met this often, or is a branch, may get a row again.
OFTEN = 9

# A branch this close behind a snapshot that is known would serve the same requests.
NEAR_TOKENS = 64

# Where the end of a request is supposed to be as long as it runs.
EXPECTED_RESPONSE = 256

# How far one eviction moves the prices (in logarithms), and how far they move in all.
PRICE_STEP = 0.05
PRICE_LIMIT = 3.0


class Bundle:
    """The snapshots of one request: they share a history, and they age together.

    Attributes:
        arrival: What the tree knew of the prompt.
        begun: The record of the snapshot that its request began from, or `NOBODY`.
        class_base: The class of its snapshots, but for their kind and uses.
        chain: How many requests of its conversation went before.
        last: The request that last came back to one of them.
        records: Their records.
        response_known: Whether the request has ended.
        counted: Whether the tables count them yet.
        superseded: Whether a later request went on from one of them.
        places_response: Whether the row that it may place is for its end.
        deepest: The deepest position at which it has a row, or began from one.
    """

    __slots__ = (
        "arrival",
        "begun",
        "chain",
        "class_base",
        "counted",
        "deepest",
        "last",
        "places_response",
        "records",
        "response_known",
        "superseded",
    )

    def __init__(self, arrival: Arrival, chain: int, now: int) -> None:
        self.arrival = arrival
        self.class_base = class_of(chain, arrival.prompt_tokens - arrival.matched)
        self.chain = chain
        self.begun = NOBODY
        self.last = now
        self.records: list[int] = []
        self.response_known = False
        self.counted = False
        self.superseded = False
        self.places_response = False
        self.deepest = arrival.reused


class Learned:
    """Keeps what is likely to be used again, as far as it was seen of its like.

    Args:
        row_bytes: Bytes of one row.
        page_bytes: Bytes of one column of pages.
        tokens_per_page: Tokens of one page.
        seed: Of the samples; with the same calls it gives the same answers.
    """

    def __init__(
        self, *, row_bytes: int, page_bytes: int, tokens_per_page: int, seed: int = 0
    ) -> None:
        self._page_tokens = tokens_per_page
        self._row_bytes, self._page_bytes = row_bytes, page_bytes
        # How much dearer rows are than their bytes, and pages cheaper; a logarithm.
        self._lean = 0.0
        self._random = np.random.default_rng(seed)
        self._tables = ReuseTables()
        self._records = Records()
        # By record.
        self._bundles: list[Bundle | None] = [None]
        self._kinds = [0]
        self._uses = [0]
        # The ghosts to look at, by request; the last request that was looked at.
        self._due: dict[int, list[int]] = {}
        self._looked_at = 0

    # ---- a request ----

    def arrive(self, arrival: Arrival) -> Bundle:
        """Notes a new request and credits the snapshot that it came back to."""
        self._tables.tick()
        credited, chain = arrival.credited, 0
        if credited is not None and credited.record is not None:
            bundle = self._credit(credited.record)
            if self._kinds[credited.record] != _BRANCH:
                chain = bundle.chain + 1
        return Bundle(arrival, chain, self._tables.requests)

    def _credit(self, record: int) -> Bundle:
        """Counts a use of a snapshot; its whole bundle begins to age anew."""
        bundle = self._bundle(record)
        tables, members = self._tables, bundle.records
        class_ids, now = self._records.class_id, tables.requests
        tables.hit(int(class_ids[record]), bundle.last)
        if bundle.counted:
            tables.leave(class_ids[members].tolist(), bundle.last)
        self._uses[record] += 1
        if self._uses[record] <= MAX_HITS:
            class_ids[record] += HITS_STEP
        if not bundle.superseded:
            bundle.superseded = True
            others = [each for each in members if self._kinds[each] != _BRANCH]
            class_ids[others] += SUPERSEDED_STEP
        bundle.last = now
        bundle.counted = True
        self._records.last[members] = now
        tables.enter(class_ids[members].tolist(), now)
        return bundle

    def wishes(self, bundle: Bundle, reused: int, free_rows: int) -> Sequence[Wish]:
        """Returns every candidate; one is worth a row, more while rows are free."""
        kinds, again = self._candidates(bundle, reused, free_rows)
        index, base = self._tables.index, bundle.class_base
        classes = [base + KIND_NUMBER[kind] * KIND_STEP for kind in kinds.values()]
        positions = list(kinds)
        if again is not None:
            classes[positions.index(again.position)] = self._class(again)
        positions.append(bundle.arrival.prompt_tokens + EXPECTED_RESPONSE)
        classes.append(base + _RESPONSE * KIND_STEP)
        row_price, page_price = self._prices()
        token_price = page_price / self._page_tokens
        # A snapshot serves who comes back to it or to a ghost behind it.
        rate, best, best_density = 0.0, 0, -1.0
        for number in reversed(range(len(positions))):
            rate += index[classes[number] * NUM_AGES]
            gain = positions[number] - reused
            density = rate * gain / (row_price + token_price * gain)
            if density > best_density:
                best, best_density = number, density
        bundle.deepest = reused
        bundle.places_response = best == len(kinds)
        worth = {best}
        if free_rows > 0:
            telling = sorted(range(len(kinds)), key=classes.__getitem__)
            worth.update(telling[:free_rows])
        return [
            Wish(position, kind, number in worth)
            for number, (position, kind) in enumerate(kinds.items())
        ]

    def _candidates(
        self, bundle: Bundle, reused: int, free_rows: int
    ) -> tuple[dict[int, str], Snapshot | None]:
        """Returns the kinds by position, and the credited ghost if it is one."""
        arrival = bundle.arrival
        matched, credited, again = arrival.matched, arrival.credited, None
        if credited is not None and credited.record is not None:
            record = credited.record
            if free_rows <= 0 and matched - credited.position <= NEAR_TOKENS:
                matched = 0
            if credited.row == NO_ROW and credited.position > reused:
                if self._kinds[record] == _BRANCH or self._uses[record] >= OFTEN:
                    again = credited
        kinds = candidates(arrival.prompt_tokens, reused, matched, self._page_tokens)
        if again is not None:
            kinds[again.position] = again.kind
            kinds = {position: kinds[position] for position in sorted(kinds)}
        return kinds, again

    def wants_response(
        self, bundle: Bundle, position: int, response_tokens: int, free_rows: int
    ) -> bool:
        """Returns whether the end of the request is what its bundle places."""
        del position
        change = response_of(response_tokens) - UNKNOWN_RESPONSE
        bundle.class_base += change
        bundle.response_known = True
        members, class_ids = bundle.records, self._records.class_id
        if members:
            if bundle.counted:
                self._tables.leave(class_ids[members].tolist(), bundle.last)
            class_ids[members] += change
            self._tables.enter(class_ids[members].tolist(), bundle.last)
        bundle.counted = True
        return free_rows > 0 or bundle.places_response

    def added(self, bundle: Bundle, snapshot: Snapshot) -> None:
        """Begins to keep the record of a snapshot."""
        kind = KIND_NUMBER[snapshot.kind]
        class_id = bundle.class_base + kind * KIND_STEP
        if bundle.superseded and kind != _BRANCH:
            class_id += SUPERSEDED_STEP
        record = self._records.new(snapshot, class_id, bundle.last)
        if record == len(self._bundles):
            self._bundles.append(bundle)
            self._kinds.append(kind)
            self._uses.append(0)
        else:
            self._bundles[record] = bundle
            self._kinds[record] = kind
            self._uses[record] = 0
        snapshot.record = record
        bundle.records.append(record)
        if bundle.counted:
            self._tables.enter([class_id], bundle.last)
        if snapshot.row == NO_ROW:
            self._look_later(record, bundle)
        else:
            self._settle(bundle, record, snapshot.position)
        if kind == _RESPONSE:
            self._share_ghosts(bundle)

    def _settle(self, bundle: Bundle, record: int, position: int) -> None:
        """Makes a snapshot resident; what it saves and takes up is a first guess."""
        beyond = max(position - bundle.deepest, 0)
        bundle.deepest += beyond
        self._records.settle(record, beyond, beyond // self._page_tokens)

    def _share_ghosts(self, bundle: Bundle) -> None:
        """Gives the ghosts on a bundle's path to the next shallower resident there."""
        records, tables = self._records, self._tables
        server, ghosts = bundle.begun, list[int]()
        if not records.is_resident(server):
            server = NOBODY
        members = list(bundle.records)
        credited = bundle.arrival.credited
        if credited is not None and records.knows(credited):
            members.append(self._record(credited))
        for record in sorted(members, key=records.position):
            if not records.is_resident(record):
                ghosts.append(record)
                continue
            records.serve(server, ghosts, tables.index, tables.requests)
            server, ghosts = record, []
        records.serve(server, ghosts, tables.index, tables.requests)

    def revived(self, bundle: Bundle, snapshot: Snapshot) -> None:
        """Notes that a ghost is resident again."""
        self._settle(bundle, self._record(snapshot), snapshot.position)

    def used(self, bundle: Bundle, snapshot: Snapshot) -> None:
        """Notes where a request begins; the credit was given at its arrival."""
        bundle.begun = self._record(snapshot)

    # ---- ghosts ----

    def evicted(self, snapshot: Snapshot, shallower: Snapshot | None) -> None:
        """Hands a ghost, and the ghosts that it served, on to the next resident."""
        record = self._record(snapshot)
        records, tables = self._records, self._tables
        ghosts = records.unsettle(record)
        if shallower is not None:
            server = self._record(shallower)
            records.serve(server, [record, *ghosts], tables.index, tables.requests)
            records.pages[server] = np.nan
        self._look_later(record, self._bundle(record))

    def _look_later(self, record: int, bundle: Bundle) -> None:
        """Has a ghost looked at when it will be old enough to be forgotten."""
        due = max(bundle.last + GHOST_REQUESTS, self._looked_at + 1)
        self._due.setdefault(due, []).append(record)

    def expired(self) -> Iterable[Snapshot]:
        """Forgets the ghosts of bundles that were not used for long."""
        forgotten, records, now = [], self._records, self._tables.requests
        while self._looked_at < now:
            self._looked_at += 1
            for record in self._due.pop(self._looked_at, ()):
                bundle = self._bundles[record]
                if bundle is None or records.is_resident(record):
                    continue
                if bundle.last + GHOST_REQUESTS > self._looked_at:
                    self._look_later(record, bundle)
                    continue
                if bundle.counted:
                    class_id = int(records.class_id[record])
                    self._tables.leave([class_id], bundle.last)
                bundle.records.remove(record)
                self._bundles[record] = None
                forgotten.append(records.forget(record))
        return forgotten

    # ---- what goes first ----

    def victim(self, geometry: Geometry, needs_pages: bool) -> Snapshot | None:
        """Returns the least dense resident of a sample."""
        step = -PRICE_STEP if needs_pages else PRICE_STEP
        self._lean = min(max(self._lean + step, -PRICE_LIMIT), PRICE_LIMIT)
        records = self._records
        count = records.num_residents
        residents = records.residents[:count]
        for _ in range(SAMPLINGS):
            sample = residents
            if count > SAMPLES:
                sample = residents[self._random.integers(0, count, SAMPLES)]
            victim = self._least(sample, geometry, needs_pages)
            if victim is not None or count <= SAMPLES:
                break
        if victim is None and needs_pages:
            victim = self._least(sample, geometry, needs_pages=False)
        if victim is None:
            free = (records.snapshot(each) for each in residents.tolist())
            victim = next((each for each in free if not each.holds), None)
        return victim

    def _least(
        self, sample: Ints, geometry: Geometry, needs_pages: bool
    ) -> Snapshot | None:
        """Returns the least dense of a sample, as the tree says at this moment.

        What residents save and free is remembered from when the tree was last asked.
        The one that would go is asked for again, until the answer is a fresh one.
        """
        records, tables = self._records, self._tables
        row_price, page_price = self._prices()
        for number in np.isnan(records.pages[sample]).nonzero()[0].tolist():
            records.measure(int(sample[number]), geometry)
        rates = records.rates(sample, tables.index, tables.requests)
        pages = records.pages[sample]
        density = rates * records.gain[sample] / (row_price + page_price * pages)
        if needs_pages:
            density[pages <= 0] = math.inf
        asked = -1
        while True:
            number = int(density.argmin())
            record = int(sample[number])
            if density[number] == math.inf:
                return None
            snapshot = records.snapshot(record)
            if record == asked:
                return snapshot
            if snapshot.holds:
                density[sample == record] = math.inf
                continue
            gain, freed = records.measure(record, geometry)
            fresh = rates[number] * gain / (row_price + page_price * freed)
            density[sample == record] = fresh if freed or not needs_pages else math.inf
            asked = record

    def _prices(self) -> tuple[float, float]:
        """Returns what a row and a column of pages cost."""
        lean = math.exp(self._lean)
        return self._row_bytes * lean, self._page_bytes / lean

    def _bundle(self, record: int) -> Bundle:
        bundle = self._bundles[record]
        assert bundle is not None
        return bundle

    def _class(self, snapshot: Snapshot) -> int:
        return int(self._records.class_id[self._record(snapshot)])

    def _record(self, snapshot: Snapshot) -> int:
        record: int | None = snapshot.record
        assert record is not None
        return record
