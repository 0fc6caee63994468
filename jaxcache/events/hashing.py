"""Chained hashes: the names of pages and positions, the same in every process.

    root(scope) -> page 0 -> page 1 -> page 2 ...        each: hash(parent, token bytes)
                                    -> begun page        the same, of fewer tokens

So a hash names a scope and every token before its end. It is the first 64 bits of
BLAKE2b: an integer as routers expect, from the standard library, and like Python's
`hash` only in size, as that one differs between processes. A faster hash without a
cryptographic core would let a client craft prompts that steer a router; by chance two
of 2**28 pages share a name once in about 500 runs. Either way a router guesses wrong,
and no more: the manager compares token ids, never hashes.
"""

import hashlib
import struct
from typing import Any

import msgspec

DIGEST_BYTES = 8

# Copied for each page: that takes a quarter less time than making one.
_EMPTY = hashlib.blake2b(digest_size=DIGEST_BYTES)
_PERSON = b"jaxcache"
_encode = msgspec.msgpack.Encoder(order="sorted").encode


def plain_scope(scope: object) -> Any:
    """Returns a scope as it travels: itself if MessagePack has it, else its `repr`.

    Only scopes of plain values (`None`, numbers, strings, bytes, tuples of them) are
    sure to be the same in another process.
    """
    try:
        _encode(scope)
    except (TypeError, OverflowError):
        return repr(scope)
    return scope


def root_digest(scope: object) -> bytes:
    """Returns what the hash of the first page of a scope is chained to."""
    data = _encode(plain_scope(scope))
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES, person=_PERSON).digest()


def chained(parent: bytes, data: bytes) -> bytes:
    """Returns the digest of tokens, as the bytes of int32, after those of `parent`."""
    block = _EMPTY.copy()
    block.update(parent + data)
    return block.digest()


def chain(parent: bytes, data: bytes, page_bytes: int) -> list[bytes]:
    """Returns the digest of each whole page of `data`, the first one after `parent`."""
    digests = []
    for at in range(0, len(data) - page_bytes + 1, page_bytes):
        block = _EMPTY.copy()
        block.update(parent + data[at : at + page_bytes])
        parent = block.digest()
        digests.append(parent)
    return digests


def number(digest: bytes) -> int:
    """Returns a digest as the unsigned integer that travels."""
    return int.from_bytes(digest, "big")


def numbers(digests: list[bytes]) -> list[int]:
    """Returns digests as the unsigned integers that travel."""
    return list(struct.unpack(f">{len(digests)}Q", b"".join(digests)))
