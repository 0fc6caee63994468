"""Text to tokens: by a tokenizer's file where there is one, else by bytes."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Protocol

from jaxcache.demo.conversations import BadInput

if TYPE_CHECKING:
    import tokenizers

TOKENIZER_FILE = "tokenizer.json"


class Tokens(Protocol):
    """Turns text into token ids."""

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        ...


@dataclasses.dataclass(frozen=True)
class ByteTokens:
    """Each byte of the UTF-8 text is a token, ids 0 to 255."""

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        return list(text.encode())


@dataclasses.dataclass(frozen=True)
class FileTokens:
    """A tokenizer in the format of `tokenizer.json`."""

    tokenizer: "tokenizers.Tokenizer"

    def encode(self, text: str) -> list[int]:
        """The token ids of a text, without special tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def checkpoint_tokens(checkpoint: pathlib.Path, vocab_size: int) -> Tokens:
    """The tokens a checkpoint was made for, or bytes if it does not say.

    Args:
        checkpoint: Folder with Hugging Face files.
        vocab_size: Number of token ids that the model knows.

    Raises:
        BadInput: if the tokenizer cannot be read, knows more tokens than the model, or
            is missing and bytes do not fit into the vocabulary.
    """
    path = checkpoint / TOKENIZER_FILE
    if not path.exists():
        if vocab_size < 256:
            raise BadInput(
                f"{checkpoint} has no {TOKENIZER_FILE} and a vocabulary of "
                f"{vocab_size}; bytes as tokens need at least 256"
            )
        return ByteTokens()
    try:
        import tokenizers
    except ImportError as error:
        raise BadInput(
            f"{path} needs the package `tokenizers`; install `jaxcache[tokenizers]`"
        ) from error
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare exceptions
        raise BadInput(f"cannot read {path}: {error}") from error
    if tokenizer.get_vocab_size() > vocab_size:
        raise BadInput(
            f"{path} has {tokenizer.get_vocab_size()} tokens, the model {vocab_size}"
        )
    return FileTokens(tokenizer)
