"""Where the demo's conversations come from: documentation, a JSON Lines file, texts.

Every source gives the same thing, conversations whose turns are known beforehand; the
answers between the turns are the model's own.
"""

import dataclasses
import importlib
import inspect
import json
import pathlib
from collections.abc import Iterable, Sequence

#: Modules whose documentation is long enough to talk about on every Python version.
MODULES = ("argparse", "csv", "heapq", "json")
#: Conversations that share one document and then ask different questions.
SIBLINGS = 3
#: Questions of one conversation about a document.
TURNS = 3
#: Characters of a document that open a conversation.
EXCERPT_CHARACTERS = 900
#: Characters of one question's quotation.
QUOTE_CHARACTERS = 200

SYSTEM = (
    "You are a patient teacher. The user shows you a document and asks about its "
    "parts. Answer from the document alone, in plain words, and say so when it does "
    "not hold the answer."
)


class BadInput(ValueError):
    """Something the user gave cannot be used; the message says what and why."""


@dataclasses.dataclass(frozen=True)
class Conversation:
    """The user's side of one conversation.

    Attributes:
        name: Unique among the conversations of a run.
        turns: What the user says, in order; at least one.
        system: What stands before the first turn; may be empty.
    """

    name: str
    turns: tuple[str, ...]
    system: str = ""


def from_documentation(modules: Sequence[str] = MODULES) -> list[Conversation]:
    """Builds conversations from the standard library's own documentation.

    The choice depends on nothing but the Python version: the same modules, and their
    documented functions in the order of the alphabet.

    Raises:
        BadInput: if this Python carries no documentation (it runs under `-OO`).
    """
    conversations: list[Conversation] = []
    for name in modules:
        module = importlib.import_module(name)
        text = inspect.getdoc(module)
        questions = [
            f"What does {name}.{member} do? The documentation says: {summary}"
            for member, summary in _summaries(module)
        ]
        if text is None or not questions:
            raise BadInput(
                f"module {name} has no documentation here (python -OO strips it); "
                "give --text or --conversations"
            )
        conversations += _siblings(name, text, questions)
    return conversations


def from_texts(paths: Iterable[pathlib.Path]) -> list[Conversation]:
    """Builds conversations about text files; the questions quote their paragraphs.

    Raises:
        BadInput: if a file cannot be read, is not UTF-8 or holds no text.
    """
    conversations: list[Conversation] = []
    seen: set[pathlib.Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise BadInput(f"{path} is given twice")
        seen.add(path.resolve())
        text = _read(path).strip()
        if not text:
            raise BadInput(f"{path} holds no text")
        paragraphs = [part.strip() for part in text.split("\n\n") if part.strip()]
        wanted = SIBLINGS * TURNS
        chosen = paragraphs[:: max(1, len(paragraphs) // wanted)][:wanted]
        questions = [
            f"Explain this part: {_cut(part, QUOTE_CHARACTERS)}" for part in chosen
        ]
        conversations += _siblings(str(path), text, questions)
    return conversations


def from_jsonl(path: pathlib.Path) -> list[Conversation]:
    """Reads conversations from a JSON Lines file.

    Each line is an object with `turns`, a list of what the user says, and may have
    `system`, the text before it. Other keys are ignored; empty lines are skipped.

    Raises:
        BadInput: if the file cannot be read, or naming the first line that is not such
            an object.
    """
    conversations = []
    for number, line in enumerate(_read(path).split("\n"), start=1):
        if line.strip():
            conversations.append(_parse(line, number, f"{path}, line {number}"))
    if not conversations:
        raise BadInput(f"{path} holds no conversations")
    return conversations


def _parse(line: str, number: int, where: str) -> Conversation:
    """One conversation from one line; `where` begins every complaint."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{where}: not JSON ({error})") from error
    if not isinstance(entry, dict):
        raise BadInput(f"{where}: must be an object, got {type(entry).__name__}")
    if "turns" not in entry:
        raise BadInput(f"{where}: has no key `turns`")
    turns = entry["turns"]
    if not isinstance(turns, list) or not turns:
        raise BadInput(f"{where}: `turns` must be a list with at least one text")
    for position, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn:
            raise BadInput(
                f"{where}: turn {position + 1} must be a non-empty text, got {turn!r}"
            )
        _refuse_surrogates(f"{where}: turn {position + 1}", turn)
    system = entry.get("system", "")
    if not isinstance(system, str):
        raise BadInput(f"{where}: `system` must be a text, got {system!r}")
    _refuse_surrogates(f"{where}: `system`", system)
    return Conversation(name=f"line {number}", turns=tuple(turns), system=system)


def _refuse_surrogates(what: str, text: str) -> None:
    """Refuses half of a character, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(
            f"{what} must be Unicode text, got the lone surrogate "
            f"{text[error.start]!a} at character {error.start + 1}"
        ) from error


def _siblings(name: str, text: str, questions: list[str]) -> list[Conversation]:
    """Conversations that open with the same document and ask different questions.

    system | document | question 1 | answer | question 2 | ...
                      ^ the siblings of a document part here
             ^ the documents part here
    """
    opening = _cut(text, EXCERPT_CHARACTERS)
    siblings = []
    for index in range(min(SIBLINGS, len(questions))):
        first, *others = questions[index::SIBLINGS][:TURNS]
        turns = (f"Here is a document.\n\n{opening}\n\n{first}", *others)
        siblings.append(Conversation(f"{name}-{index + 1}", turns, SYSTEM))
    return siblings


def _summaries(module: object) -> list[tuple[str, str]]:
    """Name and first paragraph of each documented public callable, by name."""
    found = []
    for member in sorted(getattr(module, "__all__", [])):
        value = getattr(module, member)
        text = inspect.getdoc(value) if callable(value) else None
        if text:
            found.append((member, _cut(text.split("\n\n")[0], QUOTE_CHARACTERS)))
    return found


def _cut(text: str, limit: int) -> str:
    """The first words of a text, at most `limit` characters of it."""
    if len(text) <= limit:
        return text
    head, space, _ = text[: limit + 1].rpartition(" ")
    return head if space else text[:limit]


def _read(path: pathlib.Path) -> str:
    """The text of a file, or a complaint that names it."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text: {error}") from error
