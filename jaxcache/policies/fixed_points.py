"""Points by rule: every so many tokens, from the start, from the end of a prompt.

For those who know their prompts better than a policy could learn: system prompts of a
known length, templates with a fixed end. Rules are added up with `|`:

    periodic(4096) | from_start(128, 999) | from_end(0, 22) | branch() | response()

    prompt of L tokens     periodic(I)    I, 2I, ...  up to L
                           from_start(a)  a           if a <= L
                           from_end(e)    L - e       if L - e > 0

They depend on nothing but the prompt and what the tree knows, so that every rank takes
the same ones.
"""

import dataclasses
from collections.abc import Sequence

from jaxcache.layouts.arguments import integer
from jaxcache.policies.policy import BRANCH
from jaxcache.policies.snapshots import Point

PERIODIC = "periodic"
FROM_START = "from_start"
FROM_END = "from_end"


@dataclasses.dataclass(frozen=True)
class FixedPoints:
    """Points by rule; made by `periodic` and its like, added up with `|`.

    Attributes:
        intervals: Every multiple of each of them is a point.
        starts: Tokens from the start of the prompt.
        ends: Tokens from its end.
        branch: Whether the place where a prompt leaves the tree is a point.
        response: Whether the state of a finished request is kept.
    """

    intervals: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    branch: bool = False
    response: bool = False

    def __or__(self, other: "FixedPoints") -> "FixedPoints":
        """Returns the points of both."""
        if not isinstance(other, FixedPoints):
            return NotImplemented
        return FixedPoints(
            tuple(sorted({*self.intervals, *other.intervals})),
            tuple(sorted({*self.starts, *other.starts})),
            tuple(sorted({*self.ends, *other.ends})),
            self.branch or other.branch,
            self.response or other.response,
        )

    def points(
        self, prompt_tokens: int, reused: int, matched: int, tokens_per_page: int
    ) -> Sequence[Point]:
        """Returns the points in a prompt."""
        points = [
            Point(position, PERIODIC)
            for interval in self.intervals
            for position in range(interval, prompt_tokens + 1, interval)
        ]
        points += [Point(at, FROM_START) for at in self.starts if at <= prompt_tokens]
        points += [
            Point(prompt_tokens - end, FROM_END)
            for end in self.ends
            if end < prompt_tokens
        ]
        if self.branch and matched > reused:
            points.append(Point(matched // tokens_per_page * tokens_per_page, BRANCH))
        return points

    def never_hits(self, max_tokens: int) -> str | None:
        """Says why no request of at most `max_tokens` could ever reuse anything.

        Returns:
            What would have to change; `None` if something could be reused.
        """
        if self.branch or self.response:
            return None
        # A prompt that is served again reuses all but its last token at most.
        nearest = [*self.intervals, *self.starts]
        if any(position < max_tokens for position in nearest) or any(
            end < max_tokens for end in self.ends
        ):
            return None
        if not nearest and not self.ends:
            return "it has no points at all; add periodic(...), branch() or response()"
        return (
            f"its first point is at {min([*nearest, *self.ends])}; the largest that "
            f"could be reused with max_tokens = {max_tokens} is {max_tokens - 1}"
        )


def periodic(interval: int) -> FixedPoints:
    """Every multiple of `interval` tokens, up to the length of the prompt."""
    return FixedPoints(intervals=(integer("interval", interval, 1),))


def from_start(*offsets: int) -> FixedPoints:
    """So many tokens from the start of the prompt, where it is long enough."""
    return FixedPoints(
        starts=tuple(sorted({integer("offsets", o, 1) for o in offsets}))
    )


def from_end(*offsets: int) -> FixedPoints:
    """So many tokens before the end of the prompt; 0 is its end."""
    return FixedPoints(ends=tuple(sorted({integer("offsets", o, 0) for o in offsets})))


def branch() -> FixedPoints:
    """Where a prompt leaves what the tree knows, rounded down to a page."""
    return FixedPoints(branch=True)


def response() -> FixedPoints:
    """The state of a finished request, after all that it generated but the last."""
    return FixedPoints(response=True)
