"""A senseless argument of any public entry point is refused at once, by its name."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest

import jaxcache
from jaxcache.engine import Engine, ModelStep, Request, default_buckets
from jaxcache.events.publisher import Publisher
from jaxcache.host.stats import Stats
from jaxcache.layouts import CacheLayout, CacheSize, ModelLayout
from jaxcache.models import TINY_CONFIG, load_model, random_model

MODEL = random_model(TINY_CONFIG)
STEP = ModelStep(MODEL)
LAYOUT = CacheLayout(STEP.layout)
SIZE = CacheSize.create(LAYOUT, 16, 4, max_seqs=2, max_tokens=64)
BUCKETS = default_buckets(2, 64)
NAN = float("nan")

Values = list[Any]

COUNTS: Values = [NAN, 2.5, "4", True, -1, 10**12, [None], object()]
FLAGS: Values = ["no", 1, 0, None, NAN, [], np.int64(1)]
OBJECTS: Values = [3, "x", [], object(), NAN]
NO_NONE: Values = [*OBJECTS, None]
UNHASHABLE: Values = [[], {}, [1], {"a": set()}, np.zeros(1)]


class Entry(NamedTuple):
    """A public entry point, arguments that work, and values that do not."""

    call: Callable[..., Any]
    good: dict[str, Any]
    bad: dict[str, Values]

    def __call__(self, **changes: Any) -> Any:
        return self.call(**{**self.good, **changes})


def manager(**options: Any) -> jaxcache.CacheManager:
    return jaxcache.CacheManager(
        **{"layout": LAYOUT, "size": SIZE, "buckets": BUCKETS, **options}
    )


def engine(**options: Any) -> Engine:
    sizes = {"max_seqs": 2, "max_tokens": 64, "token_budget": 32}
    return Engine(**{"model": STEP, **sizes, **options})


def abandon(ran: Any) -> None:
    host = manager()
    host.add("a", [1, 2])
    host.abandon(host.plan([("a", 2)]), ran=ran)


def init_cache(**arguments: Any) -> None:
    jaxcache.init_cache(**arguments)


SIZES = {"max_seqs": COUNTS, "max_tokens": COUNTS, "num_pages": [*COUNTS, None]}
CACHE = {
    **SIZES,
    "num_rows": [*COUNTS, None],
    "num_sinks": [*COUNTS, 0],
    "layout": [*NO_NONE, STEP.layout],
}
PLACED = {"mesh": OBJECTS, "tensor_axis": [None, 3, [], {}]}
SMALL = {"num_pages": 16, "num_rows": 4, "max_seqs": 2, "max_tokens": 64}

ENTRIES = {
    "Engine": Entry(
        engine,
        {},
        {
            **SIZES,
            "num_pages": COUNTS,
            "num_rows": COUNTS,
            "token_budget": [*COUNTS, 0],
            "tokens_per_page": [*COUNTS, 0],
            "overlap": FLAGS,
            "model": [*NO_NONE, STEP.layout, type(MODEL)],
            "mesh": OBJECTS,
            "buckets": OBJECTS,
        },
    ),
    "Engine.serve": Entry(
        lambda **given: engine().serve(**given),
        {"requests": []},
        {
            "requests": [*NO_NONE[:1], None, ["a"], Request(id="a", prompt=[1])],
            "progress": OBJECTS,
        },
    ),
    "Engine.warm_up": Entry(
        lambda **given: engine().warm_up(**given), {}, {"progress": OBJECTS}
    ),
    "Engine.submit": Entry(
        lambda **given: engine().submit(**given), {}, {"request": NO_NONE}
    ),
    "Engine.cancel": Entry(
        lambda **given: engine().cancel(**given), {}, {"request_id": UNHASHABLE}
    ),
    "ModelStep": Entry(
        ModelStep,
        {"model": MODEL},
        {"model": NO_NONE, "mesh": OBJECTS, "sample": NO_NONE},
    ),
    "default_buckets": Entry(
        default_buckets,
        {"max_seqs": 2, "token_budget": 64},
        {"max_seqs": [*COUNTS, None, 0], "token_budget": [*COUNTS, None, 0]},
    ),
    "Request": Entry(
        Request,
        {"id": "a", "prompt": [1]},
        {
            "id": UNHASHABLE,
            "scope": UNHASHABLE,
            "reuse": FLAGS,
            "max_new_tokens": [NAN, 2.5, "4", True, None, [1]],
            "eos_ids": [None, 5, "ab", [NAN], [True]],
            "points": [None, 5, "ab", [NAN], [True]],
        },
    ),
    "init_cache": Entry(init_cache, {"layout": LAYOUT, **SMALL}, {**CACHE, **PLACED}),
    "abstract_cache": Entry(
        jaxcache.abstract_cache,
        {"layout": LAYOUT, "size": SIZE},
        {"layout": [*NO_NONE, STEP.layout], "size": NO_NONE, **PLACED},
    ),
    "CacheSize.create": Entry(CacheSize.create, {"layout": LAYOUT, **SMALL}, CACHE),
    "CacheLayout": Entry(
        CacheLayout,
        {"model": STEP.layout},
        {
            "model": [*NO_NONE, LAYOUT],
            "tokens_per_page": [*COUNTS, 0, None],
            "num_shards": [*COUNTS, 0, None],
            "order": NO_NONE,
        },
    ),
    "ModelLayout.from_hf_config": Entry(
        ModelLayout.from_hf_config,
        {"config": TINY_CONFIG},
        {"config": [3, None, [], NAN], "dtype": OBJECTS, "state_dtype": OBJECTS},
    ),
    "CacheManager": Entry(
        manager,
        {},
        {
            "layout": [*NO_NONE, STEP.layout],
            "size": NO_NONE,
            "buckets": NO_NONE,
            "policy": OBJECTS,
            "emission": OBJECTS,
            "eviction": OBJECTS,
            "max_turns": [NAN, 2.5, "4", True, None, -1, 0],
        },
    ),
    "CacheManager.add": Entry(
        lambda **given: manager().add(**given),
        {"request_id": "a", "prompt": [1, 2]},
        {
            "request_id": UNHASHABLE,
            "scope": UNHASHABLE,
            "conversation": UNHASHABLE,
            "reuse": FLAGS,
            "prompt": [*NO_NONE, [[1], [2, 3]], [True], [1.5], [-1]],
            "points": [None, 5, "ab", [NAN], [True], [0]],
        },
    ),
    "CacheManager.abandon": Entry(abandon, {"ran": False}, {"ran": FLAGS}),
    "CacheManager.listen": Entry(
        lambda **given: manager().listen(**given),
        {},
        {"rank": [NAN, 2.5, "4", True, None, -1]},
    ),
    "CacheManager.worst_case_pages": Entry(
        lambda **given: manager().worst_case_pages(**given),
        {"num_tokens": 5},
        {"num_tokens": [*COUNTS, None, 0, 65, "x"]},
    ),
    "CacheManager.restore_counts": Entry(
        lambda **given: manager().restore_counts(**given),
        {"stats": Stats()},
        {"stats": [*NO_NONE, {"hits": 3}, Stats]},
    ),
    "CacheManager.seats_of": Entry(
        lambda **given: manager().seats_of(**given),
        {"request_ids": []},
        {"request_ids": [None, 3]},
    ),
    "CacheManager.rows_of": Entry(
        lambda **given: manager().rows_of(**given),
        {"request_ids": []},
        {"request_ids": [None, 3]},
    ),
    "Stats.delta": Entry(
        Stats().delta, {"since": Stats()}, {"since": [*NO_NONE, Stats]}
    ),
    "Buckets": Entry(
        jaxcache.Buckets,
        {"decode": (2,), "prefill_tokens": (64,)},
        {
            "decode": [*NO_NONE, [2], (2.5,), (True,), (NAN,), (10**12,)],
            "prefill_tokens": [*NO_NONE, [2], (2.5,), (True,), (NAN,), (10**12,)],
            "max_prefill_seqs": [*COUNTS, None, 0],
            "max_snapshots": [*COUNTS, None],
            "max_copies": [*COUNTS, None],
        },
    ),
    "Buckets.powers_of_two": Entry(
        jaxcache.Buckets.powers_of_two,
        {"max_decode": 4, "max_prefill_tokens": 64},
        {
            "max_decode": [*COUNTS, None, 0],
            "max_prefill_tokens": [*COUNTS, None, 0],
        },
    ),
    "Packer": Entry(
        jaxcache.Packer,
        {"layout": LAYOUT, "size": SIZE, "buckets": BUCKETS},
        {"layout": [*NO_NONE, STEP.layout], "size": NO_NONE, "buckets": NO_NONE},
    ),
    "Packer.pack": Entry(
        jaxcache.Packer(LAYOUT, SIZE, BUCKETS).pack, {}, {"work": NO_NONE}
    ),
    "jit_step": Entry(
        jaxcache.jit_step,
        {"fn": print},
        {"fn": NO_NONE, "state_argnum": COUNTS[:5], "name": [3, [], NAN]},
    ),
    "jit_mover": Entry(
        jaxcache.jit_mover, {"fn": print}, {"fn": NO_NONE, "name": [3, [], NAN]}
    ),
    "Publisher": Entry(
        lambda **given: Publisher("inproc://never bound", **given),
        {},
        {
            "topic": [None, 3, b"x"],
            "kept_batches": [*COUNTS[:5], None],
            "max_queued": [*COUNTS[:5], None, 0],
            "only_pages": FLAGS,
        },
    ),
    "load_model": Entry(load_model, {}, {"folder": [*NO_NONE[:1], None, [], NAN]}),
    "random_model": Entry(
        random_model,
        {"config": TINY_CONFIG},
        {
            "config": NO_NONE,
            "seed": ["x", None, NAN, -1, 2.5, []],
            "mesh": OBJECTS,
            "chunk_size": [NAN, 2.5, "4", True, None, 0, -1],
        },
    ),
}
CASES = [(name, argument) for name, entry in ENTRIES.items() for argument in entry.bad]

# Where the message says another word than the argument, since it stands inside it.
WORDS = {("Engine.serve", "requests"): "requests?"}


@pytest.mark.parametrize("name", [n for n, entry in ENTRIES.items() if entry.good])
def test_the_arguments_used_here_are_good(name: str) -> None:
    ENTRIES[name]()


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_a_senseless_argument_is_refused_at_once_by_its_name(
    name: str, argument: str
) -> None:
    entry = ENTRIES[name]
    word = WORDS.get((name, argument), argument)
    for value in entry.bad[argument]:
        with pytest.raises(ValueError) as refused:  # noqa: PT011
            entry(**{argument: value})
        assert re.search(rf"\b{word}\b", str(refused.value)), f"{value!r}: {refused}"


@pytest.mark.parametrize("request_id", UNHASHABLE, ids=repr)
def test_what_cannot_be_an_id_is_refused_where_it_is_looked_up(request_id: Any) -> None:
    with pytest.raises(ValueError, match="request_id must be hashable"):
        assert request_id in manager()
    with pytest.raises(ValueError, match="request_id must be hashable"):
        engine().cancel(request_id)


# Pages of 64 MiB, so that no machine has an address for all of them.
PAGE = 1 << 17


def test_a_cache_without_memory_for_it_says_how_much_it_asked_for() -> None:
    layout = CacheLayout(STEP.layout, PAGE)
    size = CacheSize.create(layout, 2**31 - 1, 4, max_seqs=2, max_tokens=64)
    with pytest.raises(ValueError, match=r"num_pages = \[2147483647\]") as refused:
        jaxcache.init_cache(layout, 2**31 - 1, 4, max_seqs=2, max_tokens=64)
    assert f"ask for {size.total_bytes(layout):,} bytes" in str(refused.value)
    assert "lower one of them" in str(refused.value)


def test_an_engine_without_memory_for_it_says_what_to_lower() -> None:
    with pytest.raises(ValueError, match=r"num_pages = \[2147483647\] .* lower one"):
        engine(tokens_per_page=PAGE, num_pages=2**31 - 1)


def test_a_cache_that_follows_from_too_many_requests_names_them() -> None:
    with pytest.raises(ValueError, match="max_seqs = 2147483647 and max_tokens = 64"):
        engine(tokens_per_page=PAGE, max_seqs=2**31 - 1)
