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
from collections.abc import Collection, Iterable, Sequence

import numpy as np

from jaxcache.policies.candidates import candidates
from jaxcache.policies.policy import (
    BRANCH,
    KINDS,
    MARKED,
    RESPONSE,
    Arrival,
    Wish,
)
from jaxcache.policies.records import NOBODY, Records
from jaxcache.policies.reuse import (
    HITS_STEP,
    KIND_STEP,
    MAX_HITS,
    NUM_CLASSES,
    SUPERSEDED_STEP,
    UNKNOWN_RESPONSE,
    Floats,
    Ints,
    ReuseTables,
    class_of,
    response_of,
)
from jaxcache.prefixes.nodes import NO_ROW, Snapshot
from jaxcache.prefixes.order import Geometry

_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}
_MARKED, _BRANCH, _RESPONSE = (_NUMBERS[kind] for kind in (MARKED, BRANCH, RESPONSE))


def number_of(kind: str) -> int:
    """Returns the number of a kind; one that is not known is the caller's, marked."""
    return _NUMBERS.get(kind, _MARKED)


# How many residents are weighed for a victim, how often if none of them will do, and
# how many numbers are drawn ahead for it.
SAMPLES = 64
SAMPLINGS = 4
DRAWS = 64 * SAMPLES

# A ghost is forgotten this many requests after its bundle was last used.
GHOST_REQUESTS = 4096

# A ghost that was met this often, or is a branch, may get a row again.
OFTEN = 9

# A branch this close behind a snapshot that is known would serve the same requests.
NEAR_TOKENS = 64

# Where the end of a request is supposed to be as long as it runs.
EXPECTED_RESPONSE = 256

# How far one eviction moves the prices (in logarithms), and how far they move in all.
# The first ones move them by up to one, then by `FIRST_MOVES` over their number, since
# bytes say nothing about which of the two pools is short.
PRICE_STEP = 0.02
FIRST_MOVES = 1.0
PRICE_LIMIT = 3.0


class Bundle:
    """The snapshots of one request: they share a history, and they age together.

    Attributes:
        prompt_tokens: Length of the prompt.
        matched: What the tree knew of it.
        credited: The deepest snapshot there, as long as the request runs.
        passed: Other snapshots on the path of its request, as long as it runs.
        deepest: The deepest position at which it has a row, or began from one.
        places_response: Whether the row that it may place is for its end.
        chain: How many requests of its conversation went before.
        class_base: The class of its snapshots, but for their kind and uses.
        superseded: Whether a later request went on from one of them.
        last: The request that last came back to one of them.
        records: The records of its snapshots.
        classes: Their classes.
        offsets: Where the tables count them; empty as long as they do not.
        queued: Whether it will be looked at for ghosts to forget.
    """

    __slots__ = (
        "chain",
        "class_base",
        "classes",
        "credited",
        "deepest",
        "last",
        "matched",
        "offsets",
        "passed",
        "places_response",
        "prompt_tokens",
        "queued",
        "records",
        "superseded",
    )

    def __init__(self, arrival: Arrival, chain: int, now: int) -> None:
        self.prompt_tokens = arrival.prompt_tokens
        self.matched = arrival.matched
        self.credited = arrival.credited
        self.passed: list[Snapshot] = []
        self.deepest = arrival.reused
        self.places_response = False
        self.chain = chain
        self.class_base = class_of(chain, arrival.prompt_tokens - arrival.matched)
        self.superseded = False
        self.last = now
        self.records: list[int] = []
        self.classes: list[int] = []
        self.offsets: list[int] = []
        self.queued = False


class Learned:
    """Keeps what is likely to be used again, as far as it was seen of its like.

    Args:
        row_bytes: Bytes of one row.
        page_bytes: Bytes of one column of pages.
        tokens_per_page: Tokens of one page.
        kinds: The kinds that it may suggest.
        seed: Of the samples; with the same calls it gives the same answers.
    """

    def __init__(
        self,
        *,
        row_bytes: int,
        page_bytes: int,
        tokens_per_page: int,
        kinds: Collection[str] = KINDS,
        seed: int = 0,
    ) -> None:
        self._page_tokens = tokens_per_page
        self._kinds = frozenset(kinds)
        self._row_bytes, self._page_bytes = row_bytes, page_bytes
        # How much dearer rows are than their bytes, and pages cheaper; a logarithm.
        self._lean = 0.0
        self._moves = 0
        self._row_price, self._page_price = float(row_bytes), float(page_bytes)
        # By what a class is but for its kind: the offset of each kind.
        self._offsets: dict[int, list[int]] = {}
        self._random = np.random.default_rng(seed)
        self._draws: Floats = np.zeros(0)
        self._drawn = 0
        self._tables = ReuseTables()
        self._records = Records()
        # By record.
        self._bundles: list[Bundle | None] = [None]
        self._uses = [0]
        # Bundles to look at, by request; the last request that was looked at.
        self._due: dict[int, list[Bundle]] = {}
        self._looked_at = 0

    # ---- a request ----

    def arrive(self, arrival: Arrival) -> Bundle:
        """Notes a new request and credits the snapshot that it came back to."""
        self._tables.tick()
        credited, chain = arrival.credited, 0
        if self._records.knows(credited):
            record = self._record(credited)
            bundle = self._bundle(record)
            self._credit(bundle, bundle.records.index(record))
            if credited.kind != BRANCH:
                chain = bundle.chain + 1
        return Bundle(arrival, chain, self._tables.requests)

    def _credit(self, bundle: Bundle, member: int) -> None:
        """Counts a use of a snapshot; its whole bundle begins to age anew."""
        record, tables = bundle.records[member], self._tables
        tables.hit(tables.offset(bundle.classes[member]), bundle.last)
        self._uses[record] += 1
        if self._uses[record] <= MAX_HITS:
            bundle.classes[member] += HITS_STEP
        if not bundle.superseded:
            bundle.superseded = True
            for number, class_id in enumerate(bundle.classes):
                if class_id // KIND_STEP != _BRANCH:
                    bundle.classes[number] += SUPERSEDED_STEP
        self._recount(bundle, tables.requests)
        self._records.last[bundle.records] = bundle.last

    def _recount(self, bundle: Bundle, last: int) -> None:
        """Has the tables count a bundle's snapshots by their classes of now."""
        tables = self._tables
        if bundle.offsets:
            tables.leave(bundle.offsets, bundle.last)
        bundle.last = last
        bundle.offsets = [tables.offset(class_id) for class_id in bundle.classes]
        tables.enter(bundle.offsets, last)
        self._records.offset[bundle.records] = bundle.offsets

    def wishes(self, bundle: Bundle, now: Arrival, free_rows: int) -> Sequence[Wish]:
        """Returns every candidate; one is worth a row, more while rows are free."""
        reused = now.reused
        bundle.matched, bundle.prompt_tokens = now.matched, now.prompt_tokens
        kinds, again = self._candidates(bundle, reused, free_rows)
        positions = list(kinds)
        offset_of = self._offsets_of(bundle.class_base)
        offsets = [offset_of[number_of(kind)] for kind in kinds.values()]
        if again is not None:
            record = self._record(again)
            offsets[positions.index(again.position)] = int(self._records.offset[record])
        if RESPONSE in self._kinds:
            positions.append(bundle.prompt_tokens + EXPECTED_RESPONSE)
            offsets.append(offset_of[_RESPONSE])
        row_price = self._row_price
        token_price = self._page_price / self._page_tokens
        # A snapshot serves who comes back to it or to a ghost behind it.
        rate, best, best_density = 0.0, 0, -1.0
        for number in reversed(range(len(positions))):
            rate += self._tables.fresh_index(offsets[number])
            gain = positions[number] - reused
            density = rate * gain / (row_price + token_price * gain)
            if density > best_density:
                best, best_density = number, density
        bundle.deepest = reused
        bundle.places_response = best == len(kinds)
        worth = {best}
        if free_rows > 0:
            telling = [number_of(kind) for kind in kinds.values()]
            worth.update(np.argsort(telling, kind="stable")[:free_rows].tolist())
        return [
            Wish(position, kind, number in worth)
            for number, (position, kind) in enumerate(kinds.items())
        ]

    def _offsets_of(self, class_base: int) -> list[int]:
        """Returns where the index of each kind begins, of new snapshots."""
        offsets = self._offsets.get(class_base)
        if offsets is None:
            classes = range(class_base, NUM_CLASSES, KIND_STEP)
            offsets = [self._tables.offset(class_id) for class_id in classes]
            self._offsets[class_base] = offsets
        return offsets

    def _candidates(
        self, bundle: Bundle, reused: int, free_rows: int
    ) -> tuple[dict[int, str], Snapshot | None]:
        """Returns the kinds by position, and the credited ghost if it is one."""
        matched, credited, again = bundle.matched, bundle.credited, None
        if self._records.knows(credited):
            if free_rows <= 0 and matched - credited.position <= NEAR_TOKENS:
                matched = 0
            if credited.row == NO_ROW and credited.position > reused:
                often = self._uses[self._record(credited)] >= OFTEN
                again = credited if often or credited.kind == BRANCH else None
        kinds = candidates(
            bundle.prompt_tokens, reused, matched, self._page_tokens, self._kinds
        )
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
        bundle.classes = [class_id + change for class_id in bundle.classes]
        self._recount(bundle, bundle.last)
        return free_rows > 0 or bundle.places_response

    def added(self, bundle: Bundle, snapshot: Snapshot) -> None:
        """Begins to keep the record of a snapshot."""
        kind = number_of(snapshot.kind)
        class_id = bundle.class_base + kind * KIND_STEP
        offset = self._offsets_of(bundle.class_base)[kind]
        if bundle.superseded and kind != _BRANCH:
            class_id += SUPERSEDED_STEP
            offset = self._tables.offset(class_id)
        record = self._records.new(snapshot, offset, bundle.last)
        if record == len(self._bundles):
            self._bundles.append(bundle)
            self._uses.append(0)
        else:
            self._bundles[record] = bundle
            self._uses[record] = 0
        snapshot.record = record
        if bundle.offsets:
            bundle.offsets.append(offset)
            self._tables.enter([offset], bundle.last)
        bundle.records.append(record)
        bundle.classes.append(class_id)
        if snapshot.row != NO_ROW:
            self._settle(bundle, record, snapshot.position)
        elif not bundle.queued:
            self._look_later(bundle)
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
        path = bundle.records
        if bundle.passed or bundle.credited is not None:
            passed = [*bundle.passed, bundle.credited]
            bundle.passed, bundle.credited = [], None
            known = (self._record(each) for each in passed if records.knows(each))
            path = list(dict.fromkeys([*path, *known]))
        server, ghosts = NOBODY, list[int]()
        for record in sorted(path, key=records.position):
            if not records.is_resident(record):
                ghosts.append(record)
                continue
            if server != NOBODY and ghosts:
                records.serve(server, ghosts, tables.index, tables.requests)
            server, ghosts = record, []
        if server != NOBODY and ghosts:
            records.serve(server, ghosts, tables.index, tables.requests)

    def revived(self, bundle: Bundle, snapshot: Snapshot) -> None:
        """Notes that a ghost is resident again."""
        bundle.passed.append(snapshot)
        self._settle(bundle, self._record(snapshot), snapshot.position)

    def used(self, bundle: Bundle, snapshot: Snapshot) -> None:
        """Notes where a request begins; the credit was given at its arrival."""
        bundle.passed.append(snapshot)

    # ---- ghosts ----

    def evicted(self, snapshot: Snapshot, shallower: Snapshot | None) -> None:
        """Hands a ghost, and the ghosts that it served, on to the next resident."""
        record = self._record(snapshot)
        records, tables = self._records, self._tables
        ghosts = records.unsettle(record)
        if shallower is not None:
            server = self._record(shallower)
            records.serve(server, [record, *ghosts], tables.index, tables.requests)
            records.unmeasured.append(server)
        bundle = self._bundle(record)
        if not bundle.queued:
            self._look_later(bundle)

    def _look_later(self, bundle: Bundle) -> None:
        """Has a bundle looked at when its ghosts will be old enough to be forgotten."""
        bundle.queued = True
        due = max(bundle.last + GHOST_REQUESTS, self._looked_at + 1)
        self._due.setdefault(due, []).append(bundle)

    def expired(self) -> Iterable[Snapshot]:
        """Forgets the ghosts of bundles that were not used for long."""
        forgotten: list[Snapshot] = []
        while self._looked_at < self._tables.requests:
            self._looked_at += 1
            for bundle in self._due.pop(self._looked_at, ()):
                if bundle.last + GHOST_REQUESTS > self._looked_at:
                    self._look_later(bundle)
                else:
                    bundle.queued = False
                    forgotten += self._forget_ghosts(bundle)
        return forgotten

    def _forget_ghosts(self, bundle: Bundle) -> list[Snapshot]:
        records = self._records
        if bundle.offsets:
            self._tables.leave(bundle.offsets, bundle.last)
            bundle.offsets = []
        members = list(zip(bundle.records, bundle.classes, strict=True))
        bundle.records, bundle.classes = [], []
        forgotten = []
        for record, class_id in members:
            if records.is_resident(record):
                bundle.records.append(record)
                bundle.classes.append(class_id)
            else:
                self._bundles[record] = None
                forgotten.append(records.forget(record))
        if bundle.records:
            self._recount(bundle, bundle.last)
        return forgotten

    # ---- what goes first ----

    def victim(self, geometry: Geometry, needs_pages: bool) -> Snapshot | None:
        """Returns the least dense resident of a sample."""
        self._move_prices(-1 if needs_pages else 1)
        records = self._records
        records.measure_again(geometry)
        count = records.num_residents
        everyone = sample = records.residents[:count]
        for _ in range(SAMPLINGS):
            if count > SAMPLES:
                sample = everyone[self._sample(count)]
            victim = self._least(sample, geometry, needs_pages)
            if victim is not None or count <= SAMPLES:
                break
        if victim is None and needs_pages:
            victim = self._least(sample, geometry, needs_pages=False)
        return victim or self._least(everyone, geometry, needs_pages=False)

    def _least(
        self, sample: Ints, geometry: Geometry, needs_pages: bool
    ) -> Snapshot | None:
        """Returns the least dense of a sample, as the tree says at this moment.

        What residents save and free is remembered from when the tree was last asked.
        It is asked again for the one that would go, until it says the same of the next.
        """
        records, tables = self._records, self._tables
        row_price, page_price = self._row_price, self._page_price
        pages = records.pages[sample]
        rates = records.rates(sample, tables.index, tables.requests)
        density = rates * records.gain[sample] / (row_price + page_price * pages)
        if needs_pages:
            density[pages <= 0] = math.inf
        asked: list[int] = []
        while len(density):
            number = int(density.argmin())
            least, record = density[number], int(sample[number])
            if least == math.inf:
                break
            snapshot = records.snapshot(record)
            if snapshot.holds:
                density[sample == record] = math.inf
                continue
            if record in asked:
                return snapshot
            asked.append(record)
            gain, freed = records.measure(record, geometry)
            fresh = rates[number] * gain / (row_price + page_price * freed)
            if needs_pages and not freed:
                fresh = math.inf
            if fresh <= least:
                return snapshot
            density[sample == record] = fresh
        return None

    def _sample(self, count: int) -> Ints:
        """Returns numbers below `count` at random."""
        if self._drawn == len(self._draws):
            self._draws, self._drawn = self._random.random(DRAWS), 0
        draws = self._draws[self._drawn : self._drawn + SAMPLES]
        self._drawn += SAMPLES
        return (draws * count).astype(np.int64)

    def _move_prices(self, sign: int) -> None:
        """Makes rows dearer and pages cheaper (1), or the other way round (-1)."""
        self._moves += 1
        step = max(PRICE_STEP, FIRST_MOVES / self._moves)
        self._lean = min(max(self._lean + sign * step, -PRICE_LIMIT), PRICE_LIMIT)
        lean = math.exp(self._lean)
        self._row_price, self._page_price = (
            self._row_bytes * lean,
            self._page_bytes / lean,
        )

    def _bundle(self, record: int) -> Bundle:
        bundle = self._bundles[record]
        assert bundle is not None
        return bundle

    def _record(self, snapshot: Snapshot) -> int:
        record: int | None = snapshot.record
        assert record is not None
        return record
