"""Cache sizes: reserved slots, capacity as asked for, and what can never work."""

import re
from typing import Any

import numpy as np
import pytest

from jaxcache.layouts import (
    NULL_SLOT,
    CacheLayout,
    CacheSize,
    FullAttention,
    Layer,
    Mamba2,
    ModelLayout,
    SlidingWindowAttention,
)

MAMBA = Mamba2(8, 16, 2, 32, 4)
MODEL = ModelLayout(
    "mixed",
    (
        Layer(0, MAMBA),
        Layer(1, FullAttention(2, 16)),
        Layer(2, SlidingWindowAttention(2, 16, window=64, sink_tokens=4)),
    ),
)
LAYOUT = CacheLayout(MODEL)
PAGES_ONLY = CacheLayout(ModelLayout("dense", (Layer(1, FullAttention(2, 16)),)))
ROWS_ONLY = CacheLayout(ModelLayout("rows", (Layer(1, MAMBA),)))


def test_capacity_is_what_was_asked_for() -> None:
    size = CacheSize.create(LAYOUT, (100, 40), 12, max_seqs=8, max_tokens=1000)
    assert size.num_pages == (100, 40)
    assert size.num_rows == 12
    assert size.tokens_per_page == 16
    # One null slot and one sink besides.
    assert (size.page_slots(0), size.page_slots(1), size.row_slots) == (102, 42, 14)
    assert [size.group_slots(g) for g in range(3)] == [102, 42, 14]
    assert (NULL_SLOT, size.sink_slot, size.first_slot) == (0, 1, 2)
    assert size.page_slots(0) - size.first_slot == 100
    assert size.row_slots - size.first_slot == 12


def test_seats_are_requests_and_then_dummies() -> None:
    size = CacheSize.create(LAYOUT, 100, 12, max_seqs=8, max_tokens=1000, num_sinks=3)
    assert size.num_seats == 11
    assert size.padding_seat == 8
    assert size.first_slot == 4
    assert (size.page_slots(0), size.row_slots) == (104, 16)
    # 1000 tokens in pages of 16.
    assert size.max_pages == 63


def test_one_number_of_pages_holds_for_every_group() -> None:
    size = CacheSize.create(LAYOUT, 70, 8, max_seqs=8, max_tokens=1000)
    assert size.num_pages == (70, 70)


def test_numpy_integers_are_integers() -> None:
    size = CacheSize.create(
        LAYOUT,
        [np.int64(70), np.int64(80)],  # type: ignore[list-item]
        np.int64(8),  # type: ignore[arg-type]
        max_seqs=8,
        max_tokens=1000,
    )
    assert size == CacheSize((70, 80), 8, 8, 1000, 16)
    assert hash(size) == hash(CacheSize((70, 80), 8, 8, 1000, 16))
    assert type(size.num_rows) is int


def test_bytes_of_the_pools() -> None:
    size = CacheSize.create(LAYOUT, (100, 40), 12, max_seqs=8, max_tokens=1000)
    # A page has a key and a value of 2 heads x 16 x 16 in bfloat16: 2048 bytes. A row
    # has 8 x 16 x 3 and twice 2 x 32 x 3 in bfloat16, and 8 x 16 x 32 in float32.
    assert [pool.name for pool in LAYOUT.pools] == [
        "attention0.key+value",
        "attention1.key+value",
        "recurrent.conv_x",
        "recurrent.conv_b+conv_c",
        "recurrent.ssm",
    ]
    assert size.pool_bytes(LAYOUT) == (
        102 * 2048,
        42 * 2048,
        14 * 768,
        14 * 768,
        14 * 16384,
    )
    for pool, size_bytes in zip(LAYOUT.pools, size.pool_bytes(LAYOUT), strict=True):
        shape = pool.shape(size.group_slots(pool.group_id))
        assert np.zeros(shape, pool.numpy_dtype).nbytes == size_bytes


def test_a_model_without_rows_takes_none() -> None:
    size = CacheSize.create(PAGES_ONLY, 64, 0, max_seqs=8, max_tokens=1000)
    assert size.num_rows == 0


@pytest.mark.parametrize("num_pages", [0, 64, ()])
def test_a_model_without_attention_has_no_page_groups(num_pages: Any) -> None:
    size = CacheSize.create(ROWS_ONLY, num_pages, 8, max_seqs=8, max_tokens=1000)
    assert size.num_pages == ()
    assert size.group_slots(0) == size.row_slots == 10


def test_a_window_needs_pages_for_its_peak_only() -> None:
    # A sink page, ceil(63 / 16) pages behind the current one, and that one.
    size = CacheSize.create(LAYOUT, (63, 6), 8, max_seqs=8, max_tokens=1000)
    assert size.num_pages == (63, 6)


GOOD: dict[str, Any] = {
    "layout": LAYOUT,
    "num_pages": (100, 40),
    "num_rows": 8,
    "max_seqs": 8,
    "max_tokens": 1000,
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_pages": (62, 40)},
            "num_pages of group 0 must be at least 63, what one request of max_tokens "
            "= 1000 holds at 16 tokens per page, got 62",
        ),
        (
            {"num_pages": (100, 5)},
            "num_pages of group 1 must be at least 6, what one request of max_tokens "
            "= 1000 holds at 16 tokens per page, got 5",
        ),
        (
            {"num_pages": (100,)},
            "num_pages must have one number for each of the 2 attention groups, got 1",
        ),
        ({"num_pages": (100, 0)}, "num_pages[1] must be an integer >= 1, got 0"),
        ({"num_pages": 0}, "num_pages must be an integer >= 1, got 0"),
        ({"num_pages": "100"}, "num_pages must be an integer >= 1, got '100'"),
        (
            {"num_rows": 7},
            "num_rows must be at least max_seqs = 8, one live row a request, got 7",
        ),
        (
            {"layout": PAGES_ONLY, "num_pages": 100},
            "num_rows must be 0, since dense has no recurrent layer, got 8",
        ),
        ({"num_rows": -1}, "num_rows must be an integer >= 0, got -1"),
        ({"max_seqs": 0}, "max_seqs must be an integer >= 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, got 0"),
        ({"max_tokens": 1e3}, "max_tokens must be an integer >= 1, got 1000.0"),
        ({"num_sinks": 0}, "num_sinks must be an integer >= 1, got 0"),
        *(
            (
                {field: 1 << 31},
                f"{field} must be at most 2147483647, got 2147483648",
            )
            for field in ("num_pages", "num_rows", "max_seqs", "max_tokens")
        ),
        ({"num_sinks": True}, "num_sinks must be an integer >= 1, got True"),
    ],
)
def test_a_size_that_can_never_work_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        CacheSize.create(**{**GOOD, **changes})


def test_the_smallest_size_named_in_a_refusal_works() -> None:
    CacheSize.create(LAYOUT, (63, 6), 8, max_seqs=8, max_tokens=1000)


def test_a_group_that_does_not_exist_is_refused() -> None:
    size = CacheSize.create(**GOOD)
    message = r"^group_id must be below 2 attention groups, got 3$"
    with pytest.raises(ValueError, match=message):
        size.group_slots(3)
    with pytest.raises(ValueError, match=r"below 2 attention groups, got 2$"):
        size.page_slots(2)


def test_pages_without_tokens_are_refused() -> None:
    message = r"^tokens_per_page must be an integer >= 1, got 0$"
    with pytest.raises(ValueError, match=message):
        CacheSize((100,), 8, 8, 1000, 0)
