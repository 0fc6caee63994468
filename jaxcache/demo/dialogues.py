"""Holding conversations with an engine: each prompt contains the answers before it."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxcache.demo.conversations import Conversation
from jaxcache.demo.tokens import Tokens
from jaxcache.engine import Engine, Request, Result


@dataclasses.dataclass(frozen=True, eq=False)
class Dialogue:
    """A conversation in tokens.

        piece 0           answer   piece 1      answer
        system, user, ... | .....  user, ...  | .....
        prompt of turn 0  |                   |
        prompt of turn 1 ..................... |

    Attributes:
        name: Name of the conversation.
        pieces: `i32[tokens]` for each turn: what is added to the prompt and the answer
            of the turn before.
    """

    name: str
    pieces: tuple[np.ndarray, ...]

    def request_id(self, turn: int) -> str:
        """The id of the request for one turn, counted from 0."""
        return f"{self.name}, turn {turn + 1}"


def to_dialogue(conversation: Conversation, tokens: Tokens) -> Dialogue:
    """Writes a conversation as tokens, with plain marks for who speaks."""
    texts = [f"User: {turn}\nAssistant: " for turn in conversation.turns]
    if conversation.system:
        texts[0] = f"{conversation.system}\n\n{texts[0]}"
    texts[1:] = [f"\n{text}" for text in texts[1:]]
    pieces = (np.asarray(tokens.encode(text), np.int32) for text in texts)
    return Dialogue(conversation.name, tuple(pieces))


def total_tokens(dialogue: Dialogue, max_new_tokens: int) -> int:
    """The most tokens of a dialogue, all answers included."""
    pieces = sum(len(piece) for piece in dialogue.pieces)
    return pieces + max_new_tokens * len(dialogue.pieces)


def hold_dialogues(
    engine: Engine,
    dialogues: Sequence[Dialogue],
    *,
    max_new_tokens: int,
    eos_ids: frozenset[int] = frozenset(),
    reuse: bool = True,
    on_finish: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Holds all dialogues at once; each turn is asked when the one before is answered.

    Args:
        engine: An engine that serves nothing else meanwhile.
        dialogues: What to say; the names are unique.
        max_new_tokens: The most tokens of an answer.
        eos_ids: Tokens that end an answer.
        reuse: Whether prompts may use what earlier prompts left.
        on_finish: Called with each result.

    Returns:
        The results by dialogue, then by turn.
    """
    turn_of: dict[str, tuple[Dialogue, int, np.ndarray]] = {}
    results: dict[str, Result] = {}

    def ask(dialogue: Dialogue, turn: int, before: np.ndarray) -> None:
        prompt = np.concatenate([before, dialogue.pieces[turn]])
        request_id = dialogue.request_id(turn)
        turn_of[request_id] = (dialogue, turn, prompt)
        engine.submit(
            Request(
                id=request_id,
                prompt=prompt,
                max_new_tokens=max_new_tokens,
                eos_ids=eos_ids,
                reuse=reuse,
            )
        )

    for dialogue in dialogues:
        ask(dialogue, 0, np.empty(0, np.int32))
    while len(engine):
        for result in engine.step().finished:
            request_id = str(result.id)
            results[request_id] = result
            dialogue, turn, prompt = turn_of[request_id]
            if turn + 1 < len(dialogue.pieces):
                answer = np.asarray(result.tokens, np.int32)
                ask(dialogue, turn + 1, np.concatenate([prompt, answer]))
            if on_finish is not None:
                on_finish(result)
    return [
        results[dialogue.request_id(turn)]
        for dialogue in dialogues
        for turn in range(len(dialogue.pieces))
    ]
