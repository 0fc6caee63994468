"""Eviction policies that write down what they were asked, and what they answered."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxcache.policies.learned import Learned
from jaxcache.policies.lru import Lru
from jaxcache.policies.policy import Arrival, Wish


class Answer(NamedTuple):
    """Where snapshots in a prompt are wanted.

    Attributes:
        bundle: The policy's notes of the request.
        now: What it was told.
        wishes: What it said.
    """

    bundle: Any
    now: Arrival
    wishes: list[Wish]


class _Recorded:
    """Before a policy: it answers, and its answers are kept.

    Attributes:
        answers: About prompts, oldest first.
        responses: About the ends of requests.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.answers: list[Answer] = []
        self.responses: list[tuple[Any, bool]] = []

    def wishes(self, bundle: Any, now: Arrival, free_rows: int) -> Sequence[Wish]:
        wishes = list(super().wishes(bundle, now, free_rows))  # type: ignore[misc]
        self.answers.append(Answer(bundle, now, wishes))
        return wishes

    def wants_response(
        self, bundle: Any, position: int, response_tokens: int, free_rows: int
    ) -> bool:
        wants: bool = super().wants_response(  # type: ignore[misc]
            bundle, position, response_tokens, free_rows
        )
        self.responses.append((bundle, wants))
        return wants

    def answers_about(self, bundle: Any) -> Iterator[Answer]:
        return (answer for answer in self.answers if answer.bundle is bundle)

    def response_of(self, bundle: Any) -> bool | None:
        """The answer about the end of a request; `None` if it was not asked."""
        return next((wants for b, wants in self.responses if b is bundle), None)


class RecordedLearned(_Recorded, Learned):
    """The default policy."""


class RecordedLru(_Recorded, Lru):
    """The simple policy."""


RECORDED = {"learned": RecordedLearned, "lru": RecordedLru}
Recorded = RecordedLearned | RecordedLru
