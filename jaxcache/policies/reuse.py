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

# A class is one number: its fields in mixed radix, the finest last.
NUM_HITS, NUM_CHAINS, NUM_NEWS, NUM_RESPONSES = 5, 4, 4, 5
NEW_STEP = NUM_RESPONSES
CHAIN_STEP = NEW_STEP * NUM_NEWS
SUPERSEDED_STEP = CHAIN_STEP * NUM_CHAINS
HITS_STEP = SUPERSEDED_STEP * 2
KIND_STEP = HITS_STEP * NUM_HITS
NUM_CLASSES = KIND_STEP * len(KINDS)
NO_CLASS = NUM_CLASSES
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

    The hazard is constant in a bucket. From the last bucket to the first, P and E of
    every T after it follow from those of the next one.

    Args:
        hazard: `f64[ages, classes]`.
    """
    widths = np.diff(AGES, append=2 * OLDEST)[:, None]
    survival = np.exp(-hazard * widths)
    chance = np.zeros_like(hazard)  # by the bucket that T is the end of
    wait = np.zeros_like(hazard)
    index = np.empty_like(hazard)
    for age in reversed(range(len(hazard))):
        chance[age:] *= survival[age]
        chance[age:] += 1 - survival[age]
        wait[age:] *= survival[age]
        wait[age:] += (1 - survival[age]) / hazard[age]
        (chance[age:] / wait[age:]).max(axis=0, out=index[age])
    return index


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
    older as one row of numbers.

    Attributes:
        requests: How many there were.
        index: `f64[(classes + 1) * ages]`; zero at every age of `NO_CLASS`.
    """

    def __init__(self) -> None:
        self.requests = 0
        self.index: Floats = np.zeros((NUM_CLASSES + 1) * NUM_AGES)
        # A count of today weighs more than one of the past: `_weight` grows.
        self._weight = 1.0
        self._hits = np.zeros((NUM_AGES, NUM_CLASSES))
        self._exposure = np.zeros((NUM_AGES, NUM_CLASSES))
        # How many snapshots there are: of each cohort (the last row: of all older
        # ones), of each age but the young, and in all.
        self._cohorts = np.zeros((NUM_COHORTS + 1, NUM_CLASSES), np.int32)
        self._aging = np.zeros((NUM_AGES, NUM_CLASSES), np.int32)
        self._population = np.zeros(NUM_CLASSES, np.int32)
        # What happened since the last sweep: cohort, change and classes; bucket,
        # requests and classes; places in `_hits`.
        self._moves: list[tuple[int, int, list[int]]] = []
        self._lived: list[tuple[int, int, list[int]]] = []
        self._came: list[int] = []
        self._spread = _spread()
        # After how many sweeps a cohort changes its bucket, and which two these are.
        after = [bucket_of(since * SWEEP) for since in range(NUM_COHORTS)]
        self._borders = [
            (since, after[since - 1], after[since])
            for since in range(YOUNG + 1, NUM_COHORTS)
            if after[since] != after[since - 1]
        ]
        self._refresh_at = 0
        self._refresh()

    def tick(self) -> None:
        """Counts a request."""
        self.requests += 1
        if self.requests % SWEEP == 0:
            self._sweep(self.requests // SWEEP - 1)

    def enter(self, classes: list[int], last: int) -> None:
        """Begins to count snapshots that were last used at request `last`."""
        self._moves.append((last // SWEEP, 1, classes))

    def leave(self, classes: list[int], last: int) -> None:
        """Ends to count them: they were used, changed or forgotten."""
        self._moves.append((last // SWEEP, -1, classes))
        # What they lived through since the last sweep, age by age.
        age = self.requests - last
        before = max(self.requests // SWEEP * SWEEP - last, 0)
        while before < age:
            bucket = bucket_of(before + 1)
            until = min(age, AGES[bucket + 1] - 1 if bucket + 1 < NUM_AGES else age)
            self._lived.append((bucket, until - before, classes))
            before = until

    def hit(self, class_id: int, last: int) -> None:
        """Counts a request that came back to a snapshot."""
        age = bucket_of(self.requests - last)
        self._came.append(age * NUM_CLASSES + class_id)

    def _sweep(self, now: int) -> None:
        """Lets everything live through the 32 requests of sweep `now`."""
        self._apply_moves(now)
        cohorts, weight = self._cohorts, self._weight
        if now >= YOUNG:
            self._aging[bucket_of(YOUNG * SWEEP)] += cohorts[
                (now - YOUNG) % NUM_COHORTS
            ]
        for since, before, after in self._borders:
            if since > now:
                break
            row = cohorts[(now - since) % NUM_COHORTS]
            self._aging[before] -= row
            self._aging[after] += row
        self._exposure += self._aging * (weight * SWEEP)
        for since in range(min(YOUNG, now + 1)):
            row = cohorts[(now - since) % NUM_COHORTS]
            for age in self._spread[since].nonzero()[0].tolist():
                self._exposure[age] += row * (weight * self._spread[since, age])
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

    def _apply_moves(self, now: int) -> None:
        np.add.at(self._hits.reshape(-1), np.array(self._came, int), self._weight)
        for age, lived, classes in self._lived:
            np.add.at(self._exposure[age], classes, lived * self._weight)
        for cohort, change, classes in self._moves:
            since = now - cohort
            place = cohort % NUM_COHORTS if since < NUM_COHORTS else NUM_COHORTS
            np.add.at(self._cohorts[place], classes, change)
            np.add.at(self._population, classes, change)
            if since > YOUNG:  # in the bucket that the last sweep put the cohort in
                age = bucket_of((since - 1) * SWEEP)
                np.add.at(self._aging[age], classes, change)
        self._came, self._lived, self._moves = [], [], []

    def _refresh(self) -> None:
        """Computes the index of every class that is there, from coarse to fine."""
        pause = min(max(self.requests // 8, SWEEP), REFRESH)
        self._refresh_at = self.requests + pause
        hits, exposure = [self._hits / self._weight], [self._exposure / self._weight]
        there = [self._population > 0]
        for fold in FOLDS:
            hits.append(hits[-1].reshape(NUM_AGES, -1, fold).sum(axis=2))
            exposure.append(exposure[-1].reshape(NUM_AGES, -1, fold).sum(axis=2))
            there.append(there[-1].reshape(-1, fold).any(axis=1))
        hazard = hazards(hits[-1], exposure[-1], PRIOR_HAZARD, PRIOR_WEIGHT)
        index = gittins(hazard).T
        for level in reversed(range(len(FOLDS))):
            hazard = np.repeat(hazard, FOLDS[level], axis=1)
            index = np.repeat(index, FOLDS[level], axis=0)
            met = there[level].nonzero()[0]
            if level == 0:  # of all responses, as long as it is not known
                met = met[met % NUM_RESPONSES != UNKNOWN_RESPONSE]
            if len(met):
                hazard[:, met] = hazards(
                    hits[level][:, met], exposure[level][:, met], hazard[:, met], 1.0
                )
                index[met] = gittins(hazard[:, met]).T
        self.index[: NUM_CLASSES * NUM_AGES] = index.reshape(-1)
