"""A checkpoint's tokenizer is used if it has one; otherwise bytes, if they fit."""

import pathlib
import sys

import pytest
import tokenizers

from jaxcache.demo.conversations import BadInput, Conversation
from jaxcache.demo.dialogues import to_dialogue, total_tokens
from jaxcache.demo.tokens import ByteTokens, checkpoint_tokens


@pytest.fixture
def checkpoint(tmp_path: pathlib.Path) -> pathlib.Path:
    """A folder whose tokenizer knows a handful of words."""
    words = {"[UNK]": 0, "User": 1, ":": 2, "hello": 3, "Assistant": 4}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_file_is_used(checkpoint: pathlib.Path) -> None:
    tokens = checkpoint_tokens(checkpoint, vocab_size=5)
    assert tokens.encode("User: hello you") == [1, 2, 3, 0]


def test_a_tokenizer_larger_than_the_model_is_refused(checkpoint: pathlib.Path) -> None:
    with pytest.raises(BadInput, match=r"has 5 tokens, the model 4"):
        checkpoint_tokens(checkpoint, vocab_size=4)


def test_a_broken_tokenizer_file_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadInput, match=r"cannot read .*tokenizer\.json"):
        checkpoint_tokens(tmp_path, vocab_size=4)


def test_a_missing_package_is_named_with_its_remedy(
    checkpoint: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(BadInput, match=r"install `jaxcache\[tokenizers\]`"):
        checkpoint_tokens(checkpoint, vocab_size=5)


def test_bytes_stand_in_for_a_missing_tokenizer_only_if_they_fit(
    tmp_path: pathlib.Path,
) -> None:
    assert checkpoint_tokens(tmp_path, 256).encode("é!") == [0xC3, 0xA9, 0x21]
    with pytest.raises(BadInput, match="a vocabulary of 255; bytes as tokens need"):
        checkpoint_tokens(tmp_path, 255)


def test_a_dialogue_says_who_speaks_and_keeps_turns_apart() -> None:
    talk = Conversation("a", ("one", "two"), system="Be brief.")
    dialogue = to_dialogue(talk, ByteTokens())
    texts = [bytes(piece.tolist()).decode() for piece in dialogue.pieces]
    assert texts == [
        "Be brief.\n\nUser: one\nAssistant: ",
        "\nUser: two\nAssistant: ",
    ]
    assert total_tokens(dialogue, 5) == sum(map(len, texts)) + 10
    assert dialogue.request_id(1) == "a, turn 2"
