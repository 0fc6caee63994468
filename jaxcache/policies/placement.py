"""Which positions of a request get a snapshot: whom a manager asks.

    policy               inside the prompt                     the end of the request
    auto(...)            what the eviction policy suggests,    what it says
                         of the kinds that are allowed
    rules, or your own   their points, all with a row          a row, if `response`

The eviction policy is told how every request ended, so that it can learn, whoever
decides.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from jaxcache.policies.policy import Arrival, Policy, Wish
from jaxcache.policies.snapshots import Auto, SnapshotPolicy, wishes_of


class Placement(Protocol):
    """Where the snapshots of requests go.

    Attributes:
        takes_responses: Whether the state at the end of a request is ever kept.
    """

    takes_responses: bool

    def wishes(self, bundle: Any, now: Arrival, free_rows: int) -> Sequence[Wish]:
        """Returns where in a prompt snapshots are wanted, as `Policy.wishes` does."""
        ...

    def wants_response(
        self, bundle: Any, position: int, response_tokens: int, free_rows: int
    ) -> bool:
        """Returns whether the state at the end of a request is worth its row."""
        ...


class Suggested:
    """Follows the eviction policy, which was told what it may suggest."""

    def __init__(self, policy: Auto, eviction: Policy[Any]) -> None:
        self.takes_responses = policy.response
        self.wishes = eviction.wishes
        self.wants_response = eviction.wants_response


class Ruled:
    """Follows a snapshot policy with points of its own."""

    def __init__(
        self, policy: SnapshotPolicy, eviction: Policy[Any], tokens_per_page: int
    ) -> None:
        self.takes_responses = policy.response
        self._policy, self._eviction = policy, eviction
        self._page = tokens_per_page

    def wishes(self, bundle: Any, now: Arrival, free_rows: int) -> Sequence[Wish]:
        """Returns the points of the policy, each worth a row.

        Raises:
            ValueError: if the policy gives anything else than points.
        """
        length, reused, matched, _ = now
        return wishes_of(self._policy, length, reused, matched, self._page)

    def wants_response(
        self, bundle: Any, position: int, response_tokens: int, free_rows: int
    ) -> bool:
        """Returns true: the policy has decided already."""
        self._eviction.wants_response(bundle, position, response_tokens, free_rows)
        return True


def suggestible(policy: SnapshotPolicy) -> tuple[str, ...]:
    """Returns the kinds of snapshots that the eviction policy may suggest."""
    return policy.kinds if isinstance(policy, Auto) else ()


def place_by(
    policy: SnapshotPolicy, eviction: Policy[Any], tokens_per_page: int
) -> Placement:
    """Returns where snapshots go, by a snapshot policy and an eviction policy."""
    if isinstance(policy, Auto):
        return Suggested(policy, eviction)
    return Ruled(policy, eviction, tokens_per_page)
