"""Retention: which pages of a history a layer group still needs.

For a window of W tokens behind s sink pages, at a history of h tokens and B tokens per
page (the next token, at position h, sees positions h-W+1 .. h):

      0          s*B              h+1-W        h
      |  sinks   |  stale pages   |  needed    |  next tokens
      |  kept    |  whole pages   |  W-1 past  |
"""

import dataclasses

from jaxcache.layouts.arguments import MAX_SIZE, integer


def pages_for(num_tokens: int, tokens_per_page: int) -> int:
    """Returns how many pages hold `num_tokens` tokens that start at a page."""
    return -(-num_tokens // tokens_per_page)


@dataclasses.dataclass(frozen=True)
class Full:
    """Every past token is needed."""

    @property
    def is_recurrent(self) -> bool:
        """False: the group is made of pages."""
        return False

    def stale_pages(self, history: int, tokens_per_page: int) -> range:
        """Returns an empty range: nothing goes stale."""
        _check(history, tokens_per_page)
        return range(0)

    def peak_pages(
        self, max_tokens: int, tokens_per_page: int, step_tokens: int = 1
    ) -> int:
        """Returns the most pages that a request of `max_tokens` tokens holds."""
        del step_tokens
        _check(max_tokens, tokens_per_page)
        return pages_for(max_tokens, tokens_per_page)


@dataclasses.dataclass(frozen=True)
class Window:
    """The last `window` tokens are needed, the current one included, and the sinks.

    Attributes:
        window: Tokens a query sees, itself included.
        sink_tokens: First tokens of the sequence that are always seen.
    """

    window: int
    sink_tokens: int = 0

    def __post_init__(self) -> None:
        window = integer("window", self.window, 1, MAX_SIZE)
        sinks = integer("sink_tokens", self.sink_tokens, 0, MAX_SIZE)
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "sink_tokens", sinks)

    @property
    def is_recurrent(self) -> bool:
        """False: the group is made of pages."""
        return False

    def sink_pages(self, tokens_per_page: int) -> int:
        """Returns how many first pages are kept for the sink tokens."""
        return pages_for(self.sink_tokens, tokens_per_page)

    def stale_pages(self, history: int, tokens_per_page: int) -> range:
        """Returns the page indices that no token from position `history` on will see.

        Args:
            history: Tokens in the cache.
            tokens_per_page: Tokens of one page.
        """
        _check(history, tokens_per_page)
        start = min(
            pages_for(history, tokens_per_page), self.sink_pages(tokens_per_page)
        )
        stop = max(start, (history + 1 - self.window) // tokens_per_page)
        return range(start, stop)

    def peak_pages(
        self, max_tokens: int, tokens_per_page: int, step_tokens: int = 1
    ) -> int:
        """Returns the most pages that a request of `max_tokens` tokens holds at once.

        With one token a step this is `sinks + ceil((window - 1) / B) + 1`, also where
        the window is no longer than a page; a step of more tokens adds theirs.

        Args:
            max_tokens: Longest history of a request.
            tokens_per_page: Tokens of one page, B.
            step_tokens: Most tokens that one step adds to a request.
        """
        _check(max_tokens, tokens_per_page)
        step_tokens = integer("step_tokens", step_tokens, 1)
        past_and_new = pages_for(self.window + step_tokens - 2, tokens_per_page) + 1
        return min(
            pages_for(max_tokens, tokens_per_page),
            self.sink_pages(tokens_per_page) + past_and_new,
        )


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """One state of fixed size stands for all past tokens; there are no pages."""

    @property
    def is_recurrent(self) -> bool:
        """True: the group is made of rows."""
        return True

    def stale_pages(self, history: int, tokens_per_page: int) -> range:
        """Returns an empty range: there are no pages."""
        _check(history, tokens_per_page)
        return range(0)

    def peak_pages(
        self, max_tokens: int, tokens_per_page: int, step_tokens: int = 1
    ) -> int:
        """Returns 0: there are no pages."""
        del step_tokens
        _check(max_tokens, tokens_per_page)
        return 0


Retention = Full | Window | Recurrent


def _check(num_tokens: int, tokens_per_page: int) -> None:
    integer("number of tokens", num_tokens, 0)
    integer("tokens_per_page", tokens_per_page, 1)
