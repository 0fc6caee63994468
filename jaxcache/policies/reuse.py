"""How likely a snapshot is to be used again, by what happened to its like.

Snapshots are told apart by a *class*: why it was taken, how often it was used, whether
a conversation went on past it, how deep in a conversation it is, how much of its prompt
was new, how long the response was. Time is the number of requests. For each class and
age the tables count the requests that such snapshots lived through (*exposure*) and
those that came back to them (*hits*). Their ratio is the *hazard*. Ghosts count too, so
that a class is known without a row being spent on it.

A class with little evidence borrows from the coarser one, down this list:

    kind  ->  + hits, superseded  ->  + chain  ->  + new tokens  ->  + response

The hazard at the present age is a poor guide: a user reads before he writes, so a fresh
snapshot looks idle just before it is wanted. The *index* (Gittins) asks for the best
rate of hits that waiting can give from here on:

    index(age) = max over T of  P(a hit within T) / E[time until the hit or T]
"""

import numpy as np
import numpy.typing as npt

from jaxcache.policies.policy import GUESSES, KINDS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

# A class is one number: its fields in mixed radix, the finest last.
NUM_HITS, NUM_CHAINS, NUM_NEWS, NUM_RESPONSES = 5, 4, 4, 5
NEW_STEP = NUM_RESPONSES
CHAIN_STEP = NEW_STEP * NUM_NEWS
SUPERSEDED_STEP = CHAIN_STEP * NUM_CHAINS
HITS_STEP = SUPERSEDED_STEP * 2
KIND_STEP = HITS_STEP * NUM_HITS
NUM_CLASSES = KIND_STEP * len(KINDS)
MAX_HITS = NUM_HITS - 1
UNKNOWN_RESPONSE = NUM_RESPONSES - 1
NEW_BORDERS = (256, 1024, 4096)
RESPONSE_BORDERS = (100, 300, 700)

# How many classes fold into one of the next coarser level, from the finest on.
FOLDS = (NUM_RESPONSES, NUM_NEWS, NUM_CHAINS, 2 * NUM_HITS)

# The first age of each bucket; they grow by the square root of two.
_UP_TO_362 = (1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362)
AGES = (*_UP_TO_362, 512, 724, 1024, 1448, 2048, 2896, 4096, 5793, 8192)
NUM_AGES = len(AGES)
OLDEST = AGES[-1]
AGE_WIDTHS = np.diff(AGES, append=2 * OLDEST)[:, None]

# Everything that was last used in the same 32 requests is one cohort.
SWEEP = 32
NUM_COHORTS = OLDEST // SWEEP + 1
# A cohort younger than this many sweeps spreads over several ages.
YOUNG = 6

# What counts of the past after a sweep.
KEPT = 0.9975
# Before anything is known: how likely the next request is to come back to a new
# snapshot (of kinds that somebody is known to come back to, and of guesses), with what
# power of its age that falls, down to what, and how many hits of evidence it weighs.
PRIOR_KNOWN, PRIOR_GUESS = 0.4, 0.02
PRIOR_POWER = 1.5
PRIOR_FLOOR = 2e-5
PRIOR_WEIGHT = 0.05
# The most requests between two computations of the index.
REFRESH = 256
# Where a chance of being left alone is none, exp(-this), and no time passes.
CERTAIN, TINY = 20.0, 1e-300

# Room for so many classes at first; more than any offset.
FIRST_ROOM = 256
COHORT_STEP = 1 << 20


def _bucket_of_ages() -> npt.NDArray[np.int64]:
    buckets = np.searchsorted(AGES, np.arange(OLDEST + 1), side="right") - 1
    return np.maximum(buckets, 0)


AGE_BUCKET = _bucket_of_ages()


_BUCKETS: list[int] = AGE_BUCKET.tolist()


def bucket_of(age: int) -> int:
    """Returns the bucket of an age in requests."""
    return _BUCKETS[age if age < OLDEST else OLDEST]


def class_of(chain: int, new_tokens: int) -> int:
    """Returns the class of new snapshots, but for their kind and the response."""
    new = sum(new_tokens >= border for border in NEW_BORDERS)
    return min(chain, NUM_CHAINS - 1) * CHAIN_STEP + new * NEW_STEP + UNKNOWN_RESPONSE


def response_of(tokens: int) -> int:
    """Returns the field of a response's length."""
    return sum(tokens >= border for border in RESPONSE_BORDERS)


def hazards(
    hits: Floats, exposure: Floats, prior: float | Floats, weight: float
) -> Floats:
    """Returns hits a request, drawn towards a prior by `weight` hits of evidence."""
    hazard: Floats = (hits + weight) / (exposure + weight / prior)
    return hazard


def _priors() -> Floats:
    """Returns the hazards of each kind before anything is known, `f64[kinds, ages]`."""
    young = [PRIOR_GUESS if kind in GUESSES else PRIOR_KNOWN for kind in KINDS]
    falling = np.array(young)[:, None] / np.array(AGES) ** PRIOR_POWER
    return np.maximum(falling, PRIOR_FLOOR)


PRIORS = _priors()


def gittins(hazard: Floats) -> Floats:
    """Returns the index at the beginning of each bucket of ages.

    With the hazard constant in a bucket, P and E are differences of two running sums,
    so an index is the steepest slope from one point of a curve to any later one.

    Args:
        hazard: `f64[ages, classes]`.
    """
    risk = np.cumsum(hazard * AGE_WIDTHS, axis=0)
    alive = np.ones((NUM_AGES + 1, hazard.shape[1]))
    np.exp(-np.minimum(risk, CERTAIN), out=alive[1:])
    waited = np.zeros_like(alive)
    np.cumsum((alive[:-1] - alive[1:]) / hazard, axis=0, out=waited[1:])
    index = np.empty_like(hazard)
    for age in range(NUM_AGES):
        slopes = alive[age] - alive[age + 1 :]
        slopes /= np.maximum(waited[age + 1 :] - waited[age], TINY)
        slopes.max(axis=0, out=index[age])
    return np.maximum(index, hazard, out=index)


def _spread() -> Floats:
    """Returns what one of a young cohort lives through, `f64[sweeps since, ages]`."""
    spread = np.zeros((YOUNG, NUM_AGES))
    for since in range(YOUNG):
        for offset in range(SWEEP):
            ages = np.arange(SWEEP) + since * SWEEP - offset
            np.add.at(spread[since], AGE_BUCKET[ages[ages > 0]], 1 / SWEEP)
    return spread


class ReuseTables:
    """Counts exposure and hits of every class and age, and keeps the index.

    Nothing is visited one by one as it ages: a cohort is counted by class, and grows
    older as one row of numbers. Only classes that were met have room in the tables; a
    class is known by its *offset*, where its ages begin in a table taken as one row.

    Attributes:
        requests: How many there were.
        index: `f64[room * NUM_AGES]`; offset 0 is nobody's, and zero at every age.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.index: Floats = np.zeros(FIRST_ROOM * NUM_AGES)
        self._index_view = memoryview(self.index)  # for single numbers
        self._offsets: dict[int, int] = {}
        self._classes: list[int] = [-1]
        # A count of today weighs more than one of the past: `_weight` grows.
        self._weight = 1.0
        self._hits = np.zeros((FIRST_ROOM, NUM_AGES))
        self._exposure = np.zeros((FIRST_ROOM, NUM_AGES))
        # How many snapshots there are: of each cohort (the last row: of all older
        # ones), and of each age but the young.
        self._cohorts = np.zeros((NUM_COHORTS + 1, FIRST_ROOM), np.int32)
        self._aging = np.zeros((FIRST_ROOM, NUM_AGES))
        # What happened since the last sweep: offsets, above them the cohort; offsets
        # of ages, and how many requests were lived there.
        self._entered: list[int] = []
        self._left: list[int] = []
        self._came: list[int] = []
        self._lived: list[int] = []
        self._lived_for: list[int] = []
        self._spread = _spread()
        # After how many sweeps a cohort changes its bucket, and which two these are.
        after = [bucket_of(since * SWEEP) for since in range(NUM_COHORTS)]
        self._borders = [
            (since, after[since - 1], after[since])
            for since in range(YOUNG + 1, NUM_COHORTS)
            if after[since] != after[since - 1]
        ]
        # Of each level but the finest: its classes in order, and their hazards.
        self._coarser: list[tuple[Ints, Floats]] = []
        self._refresh_at = 0

    def offset(self, class_id: int) -> int:
        """Returns where the index of a class begins."""
        return self._offsets.get(class_id) or self._make_room(class_id)

    def fresh_index(self, offset: int) -> float:
        """Returns the index of a class at its youngest age."""
        return self._index_view[offset]

    def _make_room(self, class_id: int) -> int:
        """Gives a new class room, and the index of the finest level that is known."""
        place = len(self._classes)
        self._classes.append(class_id)
        self._offsets[class_id] = place * NUM_AGES
        if place == len(self._hits):
            self.index = np.concatenate([self.index, np.zeros_like(self.index)])
            self._index_view = memoryview(self.index)
            for name in ("_hits", "_exposure", "_aging"):
                table = getattr(self, name)
                setattr(self, name, np.concatenate([table, np.zeros_like(table)]))
            self._cohorts = np.tile(self._cohorts, 2)
            self._cohorts[:, place:] = 0
        hazard = PRIORS[class_id // KIND_STEP]
        coarser = class_id
        for fold, (classes, known) in zip(FOLDS, self._coarser, strict=False):
            coarser //= fold
            at = int(np.searchsorted(classes, coarser))
            if at < len(classes) and classes[at] == coarser:
                hazard = known[at]
                break
        self.index.reshape(-1, NUM_AGES)[place] = gittins(hazard[:, None])[:, 0]
        return place * NUM_AGES

    def tick(self) -> None:
        """Counts a request."""
        self.requests += 1
        if self.requests % SWEEP == 0:
            self._sweep(self.requests // SWEEP - 1)

    def enter(self, offsets: list[int], last: int) -> None:
        """Begins to count snapshots that were last used at request `last`."""
        cohort = last // SWEEP * COHORT_STEP
        self._entered += [cohort + offset for offset in offsets]

    def leave(self, offsets: list[int], last: int) -> None:
        """Ends to count them: they were used, changed or forgotten."""
        cohort = last // SWEEP * COHORT_STEP
        self._left += [cohort + offset for offset in offsets]
        # What they lived through since the last sweep, age by age.
        age = self.requests - last
        before = max(self.requests // SWEEP * SWEEP - last, 0)
        while before < age:
            bucket = bucket_of(before + 1)
            until = min(age, AGES[bucket + 1] - 1 if bucket + 1 < NUM_AGES else age)
            self._lived += [offset + bucket for offset in offsets]
            self._lived_for += [until - before] * len(offsets)
            before = until

    def hit(self, offset: int, last: int) -> None:
        """Counts a request that came back to a snapshot."""
        self._came.append(offset + bucket_of(self.requests - last))

    def _sweep(self, now: int) -> None:
        """Lets everything live through the 32 requests of sweep `now`."""
        self._count_events(now)
        count, cohorts, weight = len(self._classes), self._cohorts, self._weight
        aging, exposure = self._aging[:count], self._exposure[:count]
        if now >= YOUNG:
            row = cohorts[(now - YOUNG) % NUM_COHORTS, :count]
            aging[:, bucket_of(YOUNG * SWEEP)] += row
        for since, before, after in self._borders:
            if since > now:
                break
            row = cohorts[(now - since) % NUM_COHORTS, :count]
            aging[:, before] -= row
            aging[:, after] += row
        exposure += aging * (weight * SWEEP)
        young = [(now - since) % NUM_COHORTS for since in range(min(YOUNG, now + 1))]
        exposure += cohorts[young, :count].T @ (self._spread[: len(young)] * weight)
        # The next cohort takes the place of the oldest.
        place = (now + 1) % NUM_COHORTS
        cohorts[NUM_COHORTS] += cohorts[place]
        cohorts[place] = 0
        self._weight /= KEPT
        if self._weight > 1e6:
            self._hits /= self._weight
            self._exposure /= self._weight
            self._weight = 1.0
        if self.requests >= self._refresh_at and count > 1:
            self._refresh_at = self.requests + min(self.requests // 8, REFRESH)
            self._refresh()

    def _count_events(self, now: int) -> None:
        hits, exposure = self._hits.reshape(-1), self._exposure.reshape(-1)
        aging, cohorts = self._aging.reshape(-1), self._cohorts.reshape(-1)
        np.add.at(hits, np.array(self._came, int), self._weight)
        lived_for = np.array(self._lived_for, float) * self._weight
        np.add.at(exposure, np.array(self._lived, int), lived_for)
        for events, change in ((self._entered, 1), (self._left, -1)):
            begun, offsets = np.divmod(np.array(events, int), COHORT_STEP)
            since = now - begun
            rows = np.where(since < NUM_COHORTS, begun % NUM_COHORTS, NUM_COHORTS)
            places = rows * self._cohorts.shape[1] + offsets // NUM_AGES
            np.add.at(cohorts, places, change)
            old = since > YOUNG  # in the bucket that the last sweep put their cohort in
            ages = AGE_BUCKET.take((since[old] - 1) * SWEEP, mode="clip")
            np.add.at(aging, offsets[old] + ages, change)
        for events in self._entered, self._left, self._came, self._lived:
            events.clear()
        self._lived_for.clear()

    def _refresh(self) -> None:
        """Computes the index of every class that was met, from coarse to fine."""
        order = np.argsort(self._classes)[1:]
        classes = np.array(self._classes)[order]
        hits = self._hits[order] / self._weight
        exposure = self._exposure[order] / self._weight
        levels = [(classes, hits, exposure)]
        parents = []
        for fold in FOLDS:
            classes = classes // fold
            first = np.diff(classes, prepend=-1) > 0
            starts = first.nonzero()[0]
            classes = classes[starts]
            hits = np.add.reduceat(hits, starts)
            exposure = np.add.reduceat(exposure, starts)
            parents.append(first.cumsum() - 1)
            levels.append((classes, hits, exposure))
        self._coarser = []
        kinds, _, _ = levels[-1]
        prior, weight = PRIORS[kinds], PRIOR_WEIGHT
        for level in reversed(range(1, len(levels))):
            classes, hits, exposure = levels[level]
            hazard = hazards(hits, exposure, prior, weight)
            self._coarser.insert(0, (classes, hazard))
            prior, weight = hazard[parents[level - 1]], 1.0
        classes, hits, exposure = levels[0]
        hazard = hazards(hits, exposure, prior, weight)
        # Of all responses, as long as it is not known.
        unknown = classes % NUM_RESPONSES == UNKNOWN_RESPONSE
        hazard[unknown] = prior[unknown]
        index = gittins(np.ascontiguousarray(hazard.T)).T
        self.index.reshape(-1, NUM_AGES)[order] = index
