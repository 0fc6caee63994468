"""Statistics: what the manager counted, as values that can be kept and compared.

`Stats` is a snapshot. Its counts only grow, so that the difference of two snapshots is
what happened between them; its gauges say how things stood at the later one.
"""

import collections
import dataclasses
from collections.abc import Mapping

from jaxcache.layouts.arguments import check_kind


@dataclasses.dataclass(frozen=True)
class SlotUse:
    """How the slots of one kind are used.

    Attributes:
        total: Slots for real requests.
        free: Slots that nobody owns.
        evictable: Slots of the tree that nobody holds.
        peak: The most that were ever owned at once.
    """

    total: int = 0
    free: int = 0
    evictable: int = 0
    peak: int = 0

    @property
    def used(self) -> int:
        """Slots that somebody owns, the tree included."""
        return self.total - self.free


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stats:
    """Everything counted since the manager was made, or between two moments.

    Attributes:
        requests: Requests whose first step was completed.
        lookups: Those of them that wanted to reuse.
        hits: Lookups that reused something.
        aligned_hits: Hits that ended with a page.
        partial_hits: Hits that ended inside a page.
        repeats_missed: Prompts that had been served before and reused nothing.
        prompt_tokens: Tokens of their prompts.
        reused_tokens: Those of them that were reused.
        matched_tokens: Those of them that the tree knew.
        computed_tokens: Tokens that completed steps computed, generated ones included.
        plans: Plans made.
        completed: Plans completed.
        abandoned: Plans abandoned.
        refused: Plans refused for lack of room.
        finished: Requests finished.
        cancelled: Requests cancelled.
        restarted: Requests started again, since an abandoned step changed their row.
        snapshots_handed_over: Snapshots that are a row which the request had written.
        snapshots_emitted: Snapshots that a kernel wrote as it passed their position.
        snapshots_evicted: Snapshots that gave up their row.
        columns_evicted: Columns of pages that the tree gave up.
        columns_adopted: Columns given back because the tree had the same tokens.
        pages_copied: Pages copied because a prefix ended inside one.
        bytes_copied_for_pages: Bytes of those.
        bytes_uploaded: Bytes of step inputs.
        plan_ns: Nanoseconds spent planning.
        complete_ns: Nanoseconds spent completing.
        snapshots: Snapshots published, by kind.
        snapshots_skipped: Snapshots that were wanted and not taken, by reason.
        pages: A gauge: use of the pages of each attention group.
        rows: A gauge: use of the rows.
        running: A gauge: requests with a seat.
        waiting: A gauge: requests without one.
    """

    requests: int = 0
    lookups: int = 0
    hits: int = 0
    aligned_hits: int = 0
    partial_hits: int = 0
    repeats_missed: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    matched_tokens: int = 0
    computed_tokens: int = 0
    plans: int = 0
    completed: int = 0
    abandoned: int = 0
    refused: int = 0
    finished: int = 0
    cancelled: int = 0
    restarted: int = 0
    snapshots_handed_over: int = 0
    snapshots_emitted: int = 0
    snapshots_evicted: int = 0
    columns_evicted: int = 0
    columns_adopted: int = 0
    pages_copied: int = 0
    bytes_copied_for_pages: int = 0
    bytes_uploaded: int = 0
    plan_ns: int = 0
    complete_ns: int = 0
    snapshots: Mapping[str, int] = dataclasses.field(default_factory=dict)
    snapshots_skipped: Mapping[str, int] = dataclasses.field(default_factory=dict)
    pages: tuple[SlotUse, ...] = ()
    rows: SlotUse = SlotUse()
    running: int = 0
    waiting: int = 0

    @property
    def reuse_ratio(self) -> float:
        """Reused tokens by prompt tokens; 0 before the first request."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def host_us_per_step(self) -> float:
        """Microseconds of planning and completing a step; 0 before the first."""
        spent = (self.plan_ns + self.complete_ns) / 1000
        return spent / self.plans if self.plans else 0.0

    def delta(self, since: "Stats") -> "Stats":
        """Returns what was counted since an earlier snapshot, and the gauges of now.

        Raises:
            ValueError: if `since` is no such snapshot.
        """
        check_kind("since", since, Stats)
        return dataclasses.replace(
            self,
            **{name: getattr(self, name) - getattr(since, name) for name in COUNTS},
            snapshots=_difference(self.snapshots, since.snapshots),
            snapshots_skipped=_difference(
                self.snapshots_skipped, since.snapshots_skipped
            ),
        )


COUNTS = tuple(f.name for f in dataclasses.fields(Stats) if f.type is int)[:-2]


def _difference(now: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    changes = {key: count - before.get(key, 0) for key, count in now.items()}
    return {key: count for key, count in changes.items() if count}


class Tally:
    """The running counts behind `Stats`.

    Attributes:
        counts: By the names in `Stats`.
        snapshots: Snapshots published, by kind.
        skipped: Snapshots not taken, by reason.
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys(COUNTS, 0)
        self.snapshots: collections.Counter[str] = collections.Counter()
        self.skipped: collections.Counter[str] = collections.Counter()

    def restore(self, stats: Stats) -> None:
        """Goes on counting from an earlier snapshot.

        Raises:
            ValueError: if it is none.
        """
        check_kind("stats", stats, Stats)
        self.counts = {name: getattr(stats, name) for name in COUNTS}
        self.snapshots = collections.Counter(stats.snapshots)
        self.skipped = collections.Counter(stats.snapshots_skipped)

    def snapshot(
        self, pages: tuple[SlotUse, ...], rows: SlotUse, running: int, waiting: int
    ) -> Stats:
        """Returns the counts, with the gauges given."""
        return Stats(
            **self.counts,
            snapshots=dict(self.snapshots),
            snapshots_skipped=dict(self.skipped),
            pages=pages,
            rows=rows,
            running=running,
            waiting=waiting,
        )
