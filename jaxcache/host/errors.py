"""Errors that a caller of the manager may want to catch."""

from collections.abc import Hashable


class Refused(RuntimeError):
    """A plan found no room; nothing was changed, and the same plan may fit later.

    Attributes:
        request_id: The request for which there was no room.
        needed: How many slots or seats the plan needs.
        available: How many there are, free ones and those that eviction could free.
    """

    def __init__(
        self, what: str, request_id: Hashable, needed: int, available: int
    ) -> None:
        super().__init__(
            f"the plan needs {needed} {what} and {available} are free or evictable; "
            f"request {request_id!r} is the first that has none"
        )
        self.request_id = request_id
        self.needed = needed
        self.available = available


class OutOfPages(Refused):
    """An attention group has too few pages.

    Attributes:
        group_id: The group.
    """

    def __init__(
        self, request_id: Hashable, needed: int, available: int, group_id: int
    ) -> None:
        what = f"pages of group {group_id}"
        super().__init__(what, request_id, needed, available)
        self.group_id = group_id


class OutOfRows(Refused):
    """There are too few rows for the recurrent state."""

    def __init__(self, request_id: Hashable, needed: int, available: int) -> None:
        super().__init__("rows", request_id, needed, available)


class OutOfSeats(Refused):
    """More requests would run at once than `max_seqs`."""

    def __init__(self, request_id: Hashable, needed: int, available: int) -> None:
        super().__init__("seats", request_id, needed, available)


class UnknownRequest(ValueError):
    """No request has this id (any more); the message says what became of it."""


class StalePlan(ValueError):
    """A plan cannot be completed or abandoned (any more), or not yet."""
