"""What travels: events of pages and of snapshots, and batches of them.

The whole pages are told in the words of vLLM's KV events, whose names the fields have
on the wire, so that routers which read those find prefixes here too. Begun pages and
snapshots have types of their own, which such routers leave out.

On the wire a batch is the MessagePack array `[timestamp, events, rank]`, and an event a
map with its `type`. The sequence number travels beside it, as in vLLM.
"""

from typing import Annotated, Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

DEVICE = "GPU"
"""The tier of an accelerator's memory, in the word that routers know."""

FULL, WINDOW = "full_attention", "sliding_window"


class Tokens:
    """Tokens of an event: a list of integers on the wire, and one buffer until then.

    Attributes:
        data: The tokens, as the bytes of int32.
    """

    __slots__ = ("data",)

    def __init__(self, data: bytes) -> None:
        self.data = data

    @classmethod
    def of(cls, tokens: npt.ArrayLike) -> Self:
        """Returns tokens from any array of integers."""
        return cls(np.asarray(tokens, np.int32).tobytes())

    def tolist(self) -> list[int]:
        """Returns them as Python integers."""
        tokens: list[int] = np.frombuffer(self.data, np.int32).tolist()
        return tokens

    def __eq__(self, other: object) -> bool:
        """Whether both are the same tokens."""
        return isinstance(other, Tokens) and self.data == other.data

    def __hash__(self) -> int:
        """As they are compared."""
        return hash(self.data)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.data) // 4

    def __repr__(self) -> str:
        """The tokens."""
        return f"Tokens.of({self.tolist()})"


class Group(msgspec.Struct, frozen=True):
    """An attention group: which of its pages a prefix needs.

    Attributes:
        kind: `FULL` or `WINDOW`.
        window: Tokens that a query sees, itself included, if it is a window.
        sink_tokens: First tokens that are always seen.
    """

    kind: str
    window: int | None = None
    sink_tokens: int = 0


class CacheShape(msgspec.Struct, frozen=True):
    """What one must know of a cache to say what can be restored.

    Attributes:
        tokens_per_page: Tokens of one page.
        groups: The attention groups.
        has_snapshots: Whether a prefix can be restored only where a snapshot is.
        copies: Whether a prefix may end inside a page, which is copied then.
    """

    tokens_per_page: int
    groups: tuple[Group, ...]
    has_snapshots: bool
    copies: bool


class AllCleared(msgspec.Struct, frozen=True, tag="AllBlocksCleared"):
    """Nothing that was told before holds; what does is told anew after this.

    Attributes:
        shape: The cache that is told of from now on.
    """

    shape: CacheShape


class PagesStored(msgspec.Struct, frozen=True, kw_only=True, tag="BlockStored"):
    """Whole pages of one attention group became resident, one after the other.

    Attributes:
        hashes: Their chained hashes.
        parent: The hash of the page before the first; `None` at the beginning.
        tokens: Their tokens.
        tokens_per_page: Tokens of one page.
        tier: Where they are.
        group: The attention group.
        kind: Its kind, `FULL` or `WINDOW`.
        window: Its window, if it is one.
        position: Tokens before the first page.
        scope: Their scope.
        lora_id: Always `None`: an adapter is part of the scope.
        lora_name: Always `None` too.
    """

    hashes: list[int] = msgspec.field(name="block_hashes")
    parent: int | None = msgspec.field(name="parent_block_hash")
    tokens: Tokens = msgspec.field(name="token_ids")
    tokens_per_page: int = msgspec.field(name="block_size")
    lora_id: int | None = None
    tier: str = msgspec.field(name="medium", default=DEVICE)
    lora_name: str | None = None
    group: int = msgspec.field(name="group_idx")
    kind: str = msgspec.field(name="kv_cache_spec_kind")
    window: int | None = msgspec.field(
        name="kv_cache_spec_sliding_window", default=None
    )
    position: int
    scope: Any


class BegunStored(msgspec.Struct, frozen=True, kw_only=True, tag="BegunPageStored"):
    """A page of one group became resident of which only the beginning is used.

    Attributes:
        hash: The chained hash of the tokens in it.
        parent: The hash of the page before it; `None` at the beginning.
        tokens: Its tokens, fewer than a page has.
        tier: Where it is.
        group: The attention group.
        kind: Its kind, `FULL` or `WINDOW`.
        position: Tokens before the page.
        scope: Its scope.
    """

    hash: int
    parent: int | None
    tokens: Tokens
    tier: str = DEVICE
    group: int
    kind: str
    position: int
    scope: Any


class PagesRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="BlockRemoved"):
    """Pages of one group, whole or begun, are in a tier no longer.

    Attributes:
        hashes: Their hashes.
        tier: Where they were.
        group: The attention group.
    """

    hashes: list[int] = msgspec.field(name="block_hashes")
    tier: str = msgspec.field(name="medium", default=DEVICE)
    group: int = msgspec.field(name="group_idx")


class SnapshotStored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The recurrent state after exactly so many tokens became resident.

    Attributes:
        hash: The hash of all tokens before its position: that of the page which ends
            there, or of the tokens after the last whole page.
        parent: The hash of the last whole page; `None` inside the first page.
        position: Tokens that it has absorbed.
        tier: Where it is.
        reason: Why it was taken.
        scope: Its scope.
    """

    hash: int
    parent: int | None
    position: int
    tier: str = DEVICE
    reason: str
    scope: Any


class SnapshotRemoved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A recurrent state is in a tier no longer.

    Attributes:
        hash: The hash of all tokens before its position.
        parent: The hash of the last whole page; `None` inside the first page.
        position: Tokens that it had absorbed.
        tier: Where it was.
        scope: Its scope.
    """

    hash: int
    parent: int | None
    position: int
    tier: str = DEVICE
    scope: Any


PageEvent = PagesStored | PagesRemoved | AllCleared
Event = PageEvent | BegunStored | SnapshotStored | SnapshotRemoved


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Events in their order.

    Attributes:
        sequence: Number of the batch; each one's is one more than the last one's.
        timestamp: Seconds since the epoch.
        rank: Which of several data-parallel caches it is of.
        events: The events.
    """

    sequence: int
    timestamp: float
    rank: int
    events: list[Event]


_TokenIds = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]]


class _Wire(msgspec.Struct, array_like=True):
    timestamp: float
    events: list[Event]
    rank: int | None = None


def _to_wire(value: Any) -> Any:
    if isinstance(value, Tokens):
        return value.tolist()
    raise TypeError(f"a batch must not hold {value!r}")


def _from_wire(kind: type, value: Any) -> Any:
    assert kind is Tokens
    return Tokens.of(msgspec.convert(value, _TokenIds))


_encoder = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_decoder = msgspec.msgpack.Decoder(_Wire, dec_hook=_from_wire)


def encode_batch(batch: Batch, *, only_pages: bool = False) -> bytes:
    """Returns a batch as it travels, without its sequence number.

    Args:
        batch: The batch.
        only_pages: Whether to leave out what vLLM's KV events have no words for, for
            readers that refuse what they do not know.
    """
    events = batch.events
    if only_pages:
        events = [event for event in events if isinstance(event, PageEvent)]
    return _encoder.encode(_Wire(batch.timestamp, events, batch.rank))


def decode_batch(sequence: int, payload: bytes) -> Batch:
    """Returns the batch of a sequence number from what travelled.

    Raises:
        ValueError: if the payload is not one.
    """
    try:
        wire = _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise ValueError(f"payload of batch {sequence} is no batch: {error}") from error
    return Batch(
        sequence=sequence,
        timestamp=wire.timestamp,
        rank=wire.rank or 0,
        events=wire.events,
    )
