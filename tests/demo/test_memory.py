"""A cache that does not fit is refused before it is allocated."""

import re

import jax
import pytest

from jaxcache.demo.conversations import BadInput
from jaxcache.demo.memory import available_bytes, check_memory
from jaxcache.device.state import init_cache
from jaxcache.layouts import CacheLayout, CacheSize
from jaxcache.models import TINY_CONFIG, random_model

LAYOUT = CacheLayout(random_model(TINY_CONFIG).layout, 16)
SIZE = CacheSize.create(LAYOUT, 64, 8, max_seqs=2, max_tokens=256)


def test_the_bytes_wanted_are_those_of_the_cache() -> None:
    state = init_cache(LAYOUT, 64, 8, max_seqs=2, max_tokens=256)
    assert SIZE.total_bytes(LAYOUT) == sum(x.nbytes for x in jax.tree.leaves(state))


def test_a_cache_that_does_not_fit_is_refused_with_its_bytes() -> None:
    wanted = SIZE.total_bytes(LAYOUT)
    check_memory(LAYOUT, SIZE, available=wanted)
    message = (
        f"the cache would take {wanted:,} bytes for 64 pages and 8 rows, and "
        f"{wanted - 1:,} are free; give smaller --pages, --rows or --max-seqs"
    )
    with pytest.raises(BadInput, match=re.escape(message)):
        check_memory(LAYOUT, SIZE, available=wanted - 1)


def test_the_machine_says_what_is_free() -> None:
    free = available_bytes(None)
    assert free is not None
    assert free > 1 << 20
