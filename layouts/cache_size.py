"""The cache size: how many slots each group has, and which of them are reserved.

The slots of every pool, and so of pages and rows alike:

    slot   0         1 .. num_sinks        first_slot ..
           null      sinks                 num_pages, or num_rows, slots
           zeros,    written by padding    for real requests:
           never     and dummies, never    exactly what was asked for
           written   read by a live one
"""

import dataclasses
from collections.abc import Sequence

from jaxcache.layouts.arguments import MAX_SIZE, check_kind, integer, integers
from jaxcache.layouts.cache_layout import CacheLayout
from jaxcache.layouts.retention import pages_for

# All zeros and never written: what a fresh request reads.
NULL_SLOT = 0


def check_layout(layout: CacheLayout) -> None:
    """Refuses what is not the layout of a cache, that of a model for example.

    Raises:
        ValueError: saying how to make one.
    """
    hint = "make one of a ModelLayout by CacheLayout(model_layout, tokens_per_page=16)"
    check_kind("layout", layout, CacheLayout, hint)


@dataclasses.dataclass(frozen=True)
class CacheSize:
    """How much a cache holds. `create` also checks it against a layout.

    Attributes:
        num_pages: Pages for real requests, per attention group.
        num_rows: Rows for real requests: live ones and snapshots.
        max_seqs: Most requests that run at once.
        max_tokens: Longest history of a request.
        tokens_per_page: Tokens of one page.
        num_sinks: Slots, and seats, reserved for padding and dummies.
    """

    num_pages: tuple[int, ...]
    num_rows: int
    max_seqs: int
    max_tokens: int
    tokens_per_page: int
    num_sinks: int = 1

    def __post_init__(self) -> None:
        pages = integers("num_pages", self.num_pages, 1, MAX_SIZE)
        object.__setattr__(self, "num_pages", pages)
        for name, minimum in (
            ("num_rows", 0),
            ("max_seqs", 1),
            ("max_tokens", 1),
            ("tokens_per_page", 1),
            ("num_sinks", 1),
        ):
            value = integer(name, getattr(self, name), minimum, MAX_SIZE)
            object.__setattr__(self, name, value)

    @classmethod
    def create(
        cls,
        layout: CacheLayout,
        num_pages: int | Sequence[int],
        num_rows: int,
        *,
        max_seqs: int,
        max_tokens: int,
        num_sinks: int = 1,
    ) -> "CacheSize":
        """Returns a size that the layout can work with.

        Args:
            layout: The layout.
            num_pages: Pages of each attention group, or one number for all of them.
            num_rows: Rows: at least one a running request, the rest for snapshots.
            max_seqs: Most requests that run at once.
            max_tokens: Longest history of a request.
            num_sinks: Slots, and seats, reserved for padding and dummies.

        Raises:
            ValueError: if a request of `max_tokens` could never run, or `max_seqs`
                requests never at once; the message has the smallest value that works.
        """
        check_layout(layout)
        groups = layout.page_groups
        if isinstance(num_pages, Sequence) and not isinstance(num_pages, str):
            pages = integers("num_pages", num_pages, 1, MAX_SIZE)
            if len(pages) != len(groups):
                raise ValueError(
                    f"num_pages must have one number for each of the {len(groups)} "
                    f"attention groups, got {len(pages)}"
                )
        else:
            minimum = 1 if groups else 0
            pages = (integer("num_pages", num_pages, minimum, MAX_SIZE),) * len(groups)
        size = cls(
            num_pages=pages,
            num_rows=num_rows,
            max_seqs=max_seqs,
            max_tokens=max_tokens,
            tokens_per_page=layout.tokens_per_page,
            num_sinks=num_sinks,
        )
        for group, count in zip(groups, pages, strict=True):
            need = group.retention.peak_pages(size.max_tokens, size.tokens_per_page)
            if count < need:
                raise ValueError(
                    f"num_pages of group {group.group_id} must be at least {need}, "
                    f"what one request of max_tokens = {size.max_tokens} holds at "
                    f"{size.tokens_per_page} tokens per page, got {count}"
                )
        if layout.has_recurrent and size.num_rows < size.max_seqs:
            raise ValueError(
                f"num_rows must be at least max_seqs = {size.max_seqs}, one live row a "
                f"request, got {size.num_rows}"
            )
        if not layout.has_recurrent and size.num_rows:
            raise ValueError(
                f"num_rows must be 0, since {layout.model.name} has no recurrent "
                f"layer, got {size.num_rows}"
            )
        return size

    @property
    def sink_slot(self) -> int:
        """First sink: where padding writes."""
        return NULL_SLOT + 1

    @property
    def first_slot(self) -> int:
        """First slot of real requests."""
        return NULL_SLOT + 1 + self.num_sinks

    def page_slots(self, group_id: int) -> int:
        """Returns the length of the slot axis of an attention group's pools."""
        if integer("group_id", group_id, 0) >= len(self.num_pages):
            raise ValueError(
                f"group_id must be below {len(self.num_pages)} attention groups, "
                f"got {group_id}"
            )
        return self.first_slot + self.num_pages[group_id]

    @property
    def row_slots(self) -> int:
        """Length of the slot axis of the recurrent group's pools."""
        return self.first_slot + self.num_rows

    def group_slots(self, group_id: int) -> int:
        """Returns the length of a group's slot axis; the recurrent group is last."""
        if group_id == len(self.num_pages):
            return self.row_slots
        return self.page_slots(group_id)

    @property
    def num_seats(self) -> int:
        """Seats in the page tables and the row index, those of the dummies included."""
        return self.max_seqs + self.num_sinks

    @property
    def padding_seat(self) -> int:
        """Seat of padding entries; it points at the sinks."""
        return self.max_seqs

    @property
    def max_pages(self) -> int:
        """Width of a page table."""
        return pages_for(self.max_tokens, self.tokens_per_page)

    def total_bytes(self, layout: CacheLayout) -> int:
        """Returns the bytes of all pools and tables, over all shards."""
        entries = len(self.num_pages) * self.max_pages + 2
        return sum(self.pool_bytes(layout)) + 4 * self.num_seats * entries

    def pool_bytes(self, layout: CacheLayout) -> tuple[int, ...]:
        """Returns the bytes of each pool, over all shards, reserved slots included."""
        return tuple(
            self.group_slots(pool.group_id) * pool.slot_bytes for pool in layout.pools
        )
