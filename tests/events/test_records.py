"""Records travel unchanged, in the words that routers of vLLM and Dynamo read."""

from typing import Any

import msgspec
import numpy as np
import pytest

from jaxcache.events.hashing import (
    chain,
    chained,
    number,
    numbers,
    plain_scope,
    root_digest,
)
from jaxcache.events.records import (
    AllCleared,
    Batch,
    BegunStored,
    CacheShape,
    Event,
    Group,
    PagesRemoved,
    PagesStored,
    SnapshotRemoved,
    SnapshotStored,
    Tokens,
    decode_batch,
    encode_batch,
)
from tests.host.caches import make_manager
from tests.host.driver import Driver

LARGE = (1 << 64) - 1
SHAPE = CacheShape(
    16, (Group("full_attention"), Group("sliding_window", 24, 4)), True, False
)
EVERY_EVENT: list[Event] = [
    AllCleared(SHAPE),
    PagesStored(
        hashes=[1, LARGE],
        parent=7,
        tokens=Tokens.of([5] * 32),
        tokens_per_page=16,
        group=1,
        kind="sliding_window",
        window=24,
        position=16,
        scope="adapter",
    ),
    BegunStored(
        hash=LARGE,
        parent=None,
        tokens=Tokens.of([1, 2]),
        group=0,
        kind="full_attention",
        position=0,
        scope=None,
    ),
    PagesRemoved(hashes=[LARGE], group=0, tier="CPU"),
    SnapshotStored(hash=3, parent=None, position=5, reason="response", scope=3),
    SnapshotRemoved(hash=3, parent=None, position=5, scope=3),
]


def batch_of(events: list[Event], sequence: int = 9) -> Batch:
    return Batch(sequence=sequence, timestamp=1.5, rank=2, events=events)


def test_every_event_comes_back_as_it_was() -> None:
    batch = batch_of(EVERY_EVENT)
    assert decode_batch(9, encode_batch(batch)) == batch
    # One of each kind, so that none is forgotten here.
    assert {type(event) for event in EVERY_EVENT} == set(Event.__args__)


BEGUN = {**msgspec.to_builtins(EVERY_EVENT[4]), "type": "BegunPageStored", "group": 0}


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "truncated"),
        (b"\x00", "Expected `array`"),
        (msgspec.msgpack.encode([1.0, [{"type": "Odd"}]]), "Invalid value 'Odd'"),
        *[
            (
                msgspec.msgpack.encode(
                    [1.0, [{**BEGUN, "kind": "full_attention", "tokens": tokens}]]
                ),
                why,
            )
            for tokens, why in [
                (3, "Expected `array`"),
                ([1 << 31], "<= 2147483647"),
                ([-1], ">= 0"),
                ([1.5], "Expected `int`"),
            ]
        ],
    ],
)
def test_what_is_no_batch_is_refused_by_its_number(payload: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=f"payload of batch 4 is no batch: .*{why}"):
        decode_batch(4, payload)


class BlockStored(msgspec.Struct, tag=True):
    """The fields that a reader of vLLM's events asks for."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    group_idx: int | None
    kv_cache_spec_kind: str | None
    kv_cache_spec_sliding_window: int | None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[int]
    medium: str | None
    group_idx: int | None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


def test_a_router_that_knows_pages_only_reads_them() -> None:
    payload = encode_batch(batch_of(EVERY_EVENT), only_pages=True)
    # A strict reader refuses more elements than it knows: three, and no sequence.
    assert len(msgspec.msgpack.decode(payload)) == 3
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 2)
    cleared, stored, removed = batch.events
    assert isinstance(cleared, AllBlocksCleared)
    assert stored == BlockStored(
        block_hashes=[1, LARGE],
        parent_block_hash=7,
        token_ids=[5] * 32,
        block_size=16,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=24,
    )
    assert removed == BlockRemoved([LARGE], "CPU", 0)
    with pytest.raises(msgspec.ValidationError, match="BegunPageStored"):
        msgspec.msgpack.decode(encode_batch(batch_of(EVERY_EVENT)), type=KVEventBatch)


def test_pages_of_a_prompt_are_chained_from_its_beginning() -> None:
    driver = Driver(make_manager("hybrid"))
    stream = driver.manager.listen()
    prompt = np.arange(40, dtype=np.int32)
    driver.serve("a", prompt.tolist())
    batch = stream.take()
    assert batch is not None
    stored = [event for event in batch.events if isinstance(event, PagesStored)]
    parent = None
    names: list[int] = []
    tokens: list[int] = []
    for event in stored:
        assert (event.parent, event.position) == (parent, len(tokens))
        names += event.hashes
        tokens += event.tokens.tolist()
        parent = names[-1]
    assert tokens == prompt[:32].tolist()
    wanted = chain(root_digest(None), prompt.tobytes(), 64)
    assert names == numbers(wanted)
    # The snapshot at the end lies in the third page, 8 tokens after the second.
    at_end = chained(wanted[-1], prompt[32:].tobytes())
    snapshots = [event for event in batch.events if isinstance(event, SnapshotStored)]
    last = max(snapshots, key=lambda event: event.position)
    assert (last.position, last.hash) == (40, number(at_end))
    assert last.parent == names[-1]


def test_a_hash_names_scope_and_every_token_before() -> None:
    data = np.arange(32, dtype=np.int32)
    other = data.copy()
    other[0] += 1

    def last(scope: object, tokens: Any) -> bytes:
        return chain(root_digest(scope), tokens.tobytes(), 64)[-1]

    assert last("a", data) == last("a", data)
    assert len({last("a", data), last("b", data), last("a", other)}) == 3
    # As many bytes, cut otherwise.
    assert len(chain(root_digest("a"), data.tobytes(), 32)) == 4
    assert chain(root_digest("a"), data[:15].tobytes(), 64) == []


def test_hashes_are_the_same_in_every_process_and_release() -> None:
    """Whoever changes how they are made breaks every router that makes them too."""
    names = numbers(chain(root_digest(("a", 1)), bytes(range(64)), 32))
    assert names == [8199614454416751212, 29097385994691924]


def test_a_scope_that_cannot_travel_is_told_by_its_name() -> None:
    class Odd:
        def __repr__(self) -> str:
            return "odd"

    assert plain_scope(Odd()) == "odd"
    assert plain_scope(("a", 1)) == ("a", 1)
    # A tuple comes back as a list, and means the same.
    assert root_digest(["a", 1]) == root_digest(("a", 1))
