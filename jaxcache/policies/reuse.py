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

from jaxcache.policies.policy import KINDS

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
RESPONSE_BORDERS = (40, 200, 500)

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
# Before anything is known: hits a request, and how many hits of evidence that weighs.
PRIOR_HAZARD = 2e-5
PRIOR_WEIGHT = 0.05
# The most requests between two computations of the index.
REFRESH = 128
# Where a chance of being left alone is none, exp(-this), and no time passes.
CERTAIN, TINY = 20.0, 1e-300

# Room for classes at first, and more than there can ever be.
FIRST_PLACES, KEY_STEP = 256, 1 << 16


def _bucket_of_ages() -> npt.NDArray[np.int64]:
    buckets = np.searchsorted(AGES, np.arange(OLDEST + 1), side="right") - 1
    return np.maximum(buckets, 0)


AGE_BUCKET = _bucket_of_ages()


def bucket_of(age: int) -> int:
    """Returns the bucket of an age in requests."""
    return int(AGE_BUCKET[age if age < OLDEST else OLDEST])


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
    older as one row of numbers. Only classes that were met have a place in the tables.

    Attributes:
        requests: How many there were.
        index: `f64[places * ages]`; place 0 is nobody's, and zero at every age.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.index: Floats = np.zeros(FIRST_PLACES * NUM_AGES)
        self._places: dict[int, int] = {}
        self._classes: list[int] = [-1]
        # A count of today weighs more than one of the past: `_weight` grows.
        self._weight = 1.0
        self._hits = np.zeros((FIRST_PLACES, NUM_AGES))
        self._exposure = np.zeros((FIRST_PLACES, NUM_AGES))
        # How many snapshots there are: of each cohort (the last row: of all older
        # ones), and of each age but the young.
        self._cohorts = np.zeros((NUM_COHORTS + 1, FIRST_PLACES), np.int32)
        self._aging = np.zeros((FIRST_PLACES, NUM_AGES))
        # What happened since the last sweep. A key is a place, and above it a cohort
        # or an age; `_lived` has the requests beside the key.
        self._entered: list[int] = []
        self._left: list[int] = []
        self._came: list[int] = []
        self._lived: list[tuple[int, int]] = []
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

    def place(self, class_id: int) -> int:
        """Returns the place of a class in the tables."""
        place = self._places.get(class_id)
        return self._new_place(class_id) if place is None else place

    def class_at(self, place: int) -> int:
        """Returns the class of a place."""
        return self._classes[place]

    def fresh_index(self, class_id: int) -> float:
        """Returns the index of a class at its youngest age."""
        place = self.place(class_id)
        return float(self.index[place * NUM_AGES])

    def _new_place(self, class_id: int) -> int:
        place = self._places[class_id] = len(self._classes)
        self._classes.append(class_id)
        if place == len(self._hits):
            self.index = np.concatenate([self.index, np.zeros_like(self.index)])
            for name in ("_hits", "_exposure", "_aging"):
                table = getattr(self, name)
                setattr(self, name, np.concatenate([table, np.zeros_like(table)]))
            self._cohorts = np.tile(self._cohorts, 2)
            self._cohorts[:, place:] = 0
        hazard = np.full(NUM_AGES, PRIOR_HAZARD)
        for fold, (classes, hazards_there) in zip(FOLDS, self._coarser, strict=False):
            class_id //= fold
            at = int(np.searchsorted(classes, class_id))
            if at < len(classes) and classes[at] == class_id:
                hazard = hazards_there[at]
                break
        self.index[place * NUM_AGES :][:NUM_AGES] = gittins(hazard[:, None])[:, 0]
        return place

    def tick(self) -> None:
        """Counts a request."""
        self.requests += 1
        if self.requests % SWEEP == 0:
            self._sweep(self.requests // SWEEP - 1)

    def enter(self, places: list[int], last: int) -> None:
        """Begins to count snapshots that were last used at request `last`."""
        base = last // SWEEP * KEY_STEP
        self._entered += [base + place for place in places]

    def leave(self, places: list[int], last: int) -> None:
        """Ends to count them: they were used, changed or forgotten."""
        base = last // SWEEP * KEY_STEP
        self._left += [base + place for place in places]
        # What they lived through since the last sweep, age by age.
        age = self.requests - last
        before = max(self.requests // SWEEP * SWEEP - last, 0)
        while before < age:
            bucket = bucket_of(before + 1)
            until = min(age, AGES[bucket + 1] - 1 if bucket + 1 < NUM_AGES else age)
            base = bucket * KEY_STEP
            self._lived += [(base + place, until - before) for place in places]
            before = until

    def hit(self, place: int, last: int) -> None:
        """Counts a request that came back to a snapshot."""
        self._came.append(bucket_of(self.requests - last) * KEY_STEP + place)

    def _sweep(self, now: int) -> None:
        """Lets everything live through the 32 requests of sweep `now`."""
        count, cohorts, weight = len(self._classes), self._cohorts, self._weight
        self._count_events(now)
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
        spread = self._spread[: len(young)] * weight
        exposure += cohorts[young, :count].T @ spread
        # The next cohort takes the place of the oldest.
        place = (now + 1) % NUM_COHORTS
        cohorts[NUM_COHORTS] += cohorts[place]
        cohorts[place] = 0
        self._weight /= KEPT
        if self._weight > 1e6:
            self._hits /= self._weight
            self._exposure /= self._weight
            self._weight = 1.0
        if self.requests >= self._refresh_at:
            self._refresh()

    def _count_events(self, now: int) -> None:
        ages, places = np.divmod(np.array(self._came, int), KEY_STEP)
        np.add.at(self._hits, (places, ages), self._weight)
        lived = np.array(self._lived, int).reshape(-1, 2)
        ages, places = np.divmod(lived[:, 0], KEY_STEP)
        np.add.at(self._exposure, (places, ages), lived[:, 1] * self._weight)
        for keys, change in ((self._entered, 1), (self._left, -1)):
            begun, places = np.divmod(np.array(keys, int), KEY_STEP)
            since = now - begun
            rows = np.where(since < NUM_COHORTS, begun % NUM_COHORTS, NUM_COHORTS)
            np.add.at(self._cohorts, (rows, places), change)
            old = since > YOUNG  # in the bucket that the last sweep put their cohort in
            ages = AGE_BUCKET[np.minimum((since[old] - 1) * SWEEP, OLDEST)]
            np.add.at(self._aging, (places[old], ages), change)
        self._came, self._lived, self._entered, self._left = [], [], [], []

    def _refresh(self) -> None:
        """Computes the index of every class that was met, from coarse to fine."""
        pause = min(max(self.requests // 8, SWEEP), REFRESH)
        self._refresh_at = self.requests + pause
        if len(self._classes) == 1:
            return
        classes = np.array(self._classes)
        order = np.argsort(classes)[1:]
        ids = classes[order]
        levels = [(ids, self._hits[order], self._exposure[order])]
        parents = []
        for fold in FOLDS:
            ids, hits, exposure = levels[-1]
            ids, starts, parent = np.unique(
                ids // fold, return_index=True, return_inverse=True
            )
            parents.append(parent)
            hits = np.add.reduceat(hits, starts)
            levels.append((ids, hits, np.add.reduceat(exposure, starts)))
        prior, weight = np.full((1, NUM_AGES), PRIOR_HAZARD), PRIOR_WEIGHT
        self._coarser = []
        for ids, hits, exposure in reversed(levels):
            hazard = hazards(
                hits / self._weight, exposure / self._weight, prior, weight
            )
            if len(self._coarser) < len(FOLDS):
                self._coarser.insert(0, (ids, hazard))
                prior, weight = hazard[parents[-len(self._coarser)]], 1.0
        # Of all responses, as long as it is not known.
        unknown = ids % NUM_RESPONSES == UNKNOWN_RESPONSE
        hazard[unknown] = prior[unknown]
        index = gittins(np.ascontiguousarray(hazard.T)).T
        self.index.reshape(-1, NUM_AGES)[order] = index
