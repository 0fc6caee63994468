"""A mirror: what a manager could restore, known from its events alone.

It knows pages by their chained hashes and the tokens in them, and snapshots by the last
whole page before them. A prefix of n tokens can be restored where all of this holds, as
in the manager's own lookup:

* with recurrent layers, a snapshot is at exactly n;
* every attention group has its whole pages before n, but for those that have left its
  window for good;
* if n lies inside a page, begun pages can be copied, and a page is there in every group
  that begins with the tokens up to n.

One thing it cannot know: a lookup asks at most 32 nodes for a begun page, so where a
page was continued in more ways than that the manager may find a little less.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxcache.events.hashing import DIGEST_BYTES, chain, chained, number, root_digest
from jaxcache.events.records import (
    WINDOW,
    AllCleared,
    Batch,
    BegunStored,
    CacheShape,
    Event,
    PagesRemoved,
    PagesStored,
    SnapshotRemoved,
    SnapshotStored,
)
from jaxcache.layouts import Full, Retention, Window


class SequenceGap(ValueError):
    """A batch does not follow the one before it.

    Attributes:
        expected: The sequence number that should have come; `None` if only a batch that
            tells everything could have.
        got: The one that came.
    """

    def __init__(self, expected: int | None, got: int) -> None:
        if expected is None:
            what = "the first batch must begin with AllCleared"
        elif got > expected:
            what = f"batches {expected} to {got - 1} are missing"
        else:
            what = f"batch {expected} was to come: it is repeated, or of another life"
        super().__init__(
            f"batch {got} cannot be applied, {what}; have them replayed, or the stream "
            f"restated"
        )
        self.expected = expected
        self.got = got


class _Page:
    """A page that some group has in some tier.

    Attributes:
        parent: Hash of the page before it, or of the root.
        tokens: Its tokens, as the bytes of int32.
        places: Who has it where: group and tier.
    """

    __slots__ = ("parent", "places", "tokens")

    def __init__(self, parent: int, tokens: bytes) -> None:
        self.parent = parent
        self.tokens = tokens
        self.places: set[tuple[int, str]] = set()

    @property
    def groups(self) -> set[int]:
        """Groups that have it in any tier."""
        return {group for group, _ in self.places}


# A snapshot below its last whole page: its position and hash.
_Key = tuple[int, int]


class Mirror:
    """What one manager could restore.

    Not for use from several threads at once.
    """

    def __init__(self) -> None:
        """Makes a mirror that waits for a batch which tells everything."""
        self._expected: int | None = None
        self._geometry: CacheShape | None = None
        self._retentions: list[Retention] = []
        self._forget_all()

    @property
    def shape(self) -> CacheShape:
        """The shape of the cache.

        Raises:
            ValueError: if no batch has come yet.
        """
        if self._geometry is None:
            raise ValueError("no batch has come yet: the mirror knows no cache")
        return self._geometry

    @property
    def expected(self) -> int | None:
        """The sequence number that should come next; `None` before the first."""
        return self._expected

    @property
    def num_pages(self) -> int:
        """How many pages are somewhere, begun ones included; one for all groups."""
        return len(self._pages)

    @property
    def num_snapshots(self) -> int:
        """How many snapshots are somewhere."""
        return sum(len(below) for below in self._snapshots.values())

    # -- following ---------------------------------------------------------------------

    def apply(self, batch: Batch) -> None:
        """Applies the next batch.

        A batch that begins with `AllCleared` may have any sequence number.

        Raises:
            SequenceGap: if batches before it are missing. Nothing has changed.
        """
        is_anew = bool(batch.events) and isinstance(batch.events[0], AllCleared)
        if not is_anew and batch.sequence != self._expected:
            raise SequenceGap(self._expected, batch.sequence)
        for event in batch.events:
            self._apply(event)
        self._expected = batch.sequence + 1

    def _apply(self, event: Event) -> None:
        match event:
            case PagesStored():
                self._pages_stored(event)
            case PagesRemoved():
                for name in event.hashes:
                    self._page_removed(name, (event.group, event.tier))
            case BegunStored():
                parent = self._parent(event.parent, event.scope)
                place = event.group, event.tier
                self._page_stored(event.hash, parent, event.tokens.data, place)
            case SnapshotStored():
                parent = self._parent(event.parent, event.scope)
                below = self._snapshots.setdefault(parent, {})
                below.setdefault((event.position, event.hash), set()).add(event.tier)
            case SnapshotRemoved():
                self._snapshot_removed(event)
            case AllCleared():
                self._forget_all()
                self._geometry = event.shape
                self._retentions = [
                    Window(group.window or 1, group.sink_tokens)
                    if group.kind == WINDOW
                    else Full()
                    for group in event.shape.groups
                ]

    def _forget_all(self) -> None:
        self._pages: dict[int, _Page] = {}
        self._below: dict[int, dict[int, _Page]] = {}
        self._snapshots: dict[int, dict[_Key, set[str]]] = {}

    def _parent(self, parent: int | None, scope: Any) -> int:
        return number(root_digest(scope)) if parent is None else parent

    def _pages_stored(self, event: PagesStored) -> None:
        parent = self._parent(event.parent, event.scope)
        width = 4 * event.tokens_per_page
        for index, name in enumerate(event.hashes):
            data = event.tokens.data[index * width : (index + 1) * width]
            self._page_stored(name, parent, data, (event.group, event.tier))
            parent = name

    def _page_stored(
        self, name: int, parent: int, tokens: bytes, place: tuple[int, str]
    ) -> None:
        page = self._pages.get(name)
        if page is None:
            page = self._pages[name] = _Page(parent, tokens)
            self._below.setdefault(parent, {})[name] = page
        page.places.add(place)

    def _page_removed(self, name: int, place: tuple[int, str]) -> None:
        page = self._pages.get(name)
        if page is None:
            return
        page.places.discard(place)
        if not page.places:
            del self._pages[name]
            below = self._below[page.parent]
            del below[name]
            if not below:
                del self._below[page.parent]

    def _snapshot_removed(self, event: SnapshotRemoved) -> None:
        parent = self._parent(event.parent, event.scope)
        key = event.position, event.hash
        below = self._snapshots.get(parent, {})
        if key in below:
            below[key].discard(event.tier)
            if not below[key]:
                del below[key]
            if not below:
                del self._snapshots[parent]

    # -- asking ------------------------------------------------------------------------

    def restorable(self, prompt: npt.ArrayLike, scope: object = None) -> int:
        """Returns how many tokens of a prompt need not be computed.

        That is what `CacheManager.add` would say: the last token is always computed.

        Args:
            prompt: `i32[tokens]`.
            scope: Its scope.

        Raises:
            ValueError: if no batch has come yet.
        """
        page = self.shape.tokens_per_page
        data = np.asarray(prompt, np.int32).tobytes()
        limit = max(0, len(data) // 4 - 1)
        path = _Path(data[: 4 * limit], page, scope)
        candidates = (
            self._with_snapshots(path)
            if self.shape.has_snapshots
            else self._with_pages(path)
        )
        return next((n for n in candidates if self._has_whole(path, n)), 0)

    def _with_snapshots(self, path: "_Path") -> Iterator[int]:
        """Yields where snapshots are, the longest first; a begun page is there too."""
        for pages in range(len(path.names) - 1, -1, -1):
            below = self._snapshots.get(path.names[pages], {})
            for position, name in sorted(below, reverse=True):
                begun = path.begun(pages, position)
                if begun is None or path.name(pages, begun) != name:
                    continue
                if not begun or self._longest_begun(path, pages, begun) == len(begun):
                    yield position

    def _with_pages(self, path: "_Path") -> Iterator[int]:
        """Yields where pages end, and where the last one is left, longest first."""
        page = path.tokens_per_page
        for pages in range(len(path.names) - 1, -1, -1):
            position = pages * page
            # A page that goes on as the prompt does is used as a whole, or not at all.
            is_last = pages + 1 == len(path.names)
            if is_last or path.names[pages + 1] not in self._pages:
                rest = path.data[4 * position : 4 * (position + page)]
                if begun := self._longest_begun(path, pages, rest):
                    yield position + begun // 4
            if position:
                yield position

    def _longest_begun(self, path: "_Path", pages: int, tokens: bytes) -> int:
        """Returns with how many bytes of `tokens` a page begins that can be copied."""
        if not self._retentions:
            return len(tokens)
        if not self.shape.copies:
            return 0
        count = len(self._retentions)
        longest = 0
        for page in self._below.get(path.names[pages], {}).values():
            agreeing = _agreeing(page.tokens, tokens)
            if agreeing > longest and len(page.groups) == count:
                longest = agreeing
        return longest

    def _has_whole(self, path: "_Path", position: int) -> bool:
        """Whether every group has the whole pages that it sees from a position on."""
        page = path.tokens_per_page
        whole = position // page
        if not path.missing:
            path.missing = self._missing(path)
        for retention, missing in zip(self._retentions, path.missing, strict=True):
            stale = retention.stale_pages(position, page)
            start, stop = min(stale.start, whole), min(stale.stop, whole)
            if missing[whole] - (missing[stop] - missing[start]):
                return False
        return True

    def _missing(self, path: "_Path") -> list[list[int]]:
        """Returns for each group how many of the first pages it lacks, by their number.

        A lookup may ask for many positions, so that is counted once for all of them.
        """
        held = [self._pages.get(name) for name in path.names[1:]]
        groups = [set() if page is None else page.groups for page in held]
        return [
            [0, *itertools.accumulate(group not in each for each in groups)]
            for group in range(len(self._retentions))
        ]


class _Path:
    """A prompt, the names of its whole pages, and who has them.

    Attributes:
        data: The tokens that may be reused, as the bytes of int32.
        tokens_per_page: Tokens of one page.
        names: Hash of the root, then of each whole page.
        missing: For each group how many of the first pages it lacks, once counted.
    """

    def __init__(self, data: bytes, tokens_per_page: int, scope: object) -> None:
        self.data = data
        self.tokens_per_page = tokens_per_page
        self.missing: list[list[int]] = []
        root = root_digest(scope)
        self.names = [
            number(digest) for digest in (root, *chain(root, data, 4 * tokens_per_page))
        ]

    def begun(self, pages: int, position: int) -> bytes | None:
        """Returns the tokens from the beginning of a page to a position."""
        if 4 * position > len(self.data):
            return None
        return self.data[4 * pages * self.tokens_per_page : 4 * position]

    def name(self, pages: int, begun: bytes) -> int:
        """Returns the hash of so many whole pages and the tokens after them."""
        if not begun:
            return self.names[pages]
        parent = self.names[pages].to_bytes(DIGEST_BYTES, "big")
        return number(chained(parent, begun))


def _agreeing(ours: bytes, theirs: bytes) -> int:
    """Returns how many bytes agree, in whole tokens."""
    if ours.startswith(theirs):
        return len(theirs)
    count = min(len(ours), len(theirs)) // 4
    for index in range(count):
        if ours[4 * index : 4 * index + 4] != theirs[4 * index : 4 * index + 4]:
            return 4 * index
    return 4 * count
