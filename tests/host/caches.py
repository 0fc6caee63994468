"""Small caches of every kind of model, and managers for them."""

from collections.abc import Sequence
from typing import Any

from jaxcache.host.manager import CacheManager
from jaxcache.inputs.buckets import Buckets
from jaxcache.layouts import (
    CacheLayout,
    CacheSize,
    FullAttention,
    GatedDeltaNet,
    Layer,
    ModelLayout,
    SlidingWindowAttention,
)
from jaxcache.policies.lru import Lru

_FULL = FullAttention(kv_heads=1, head_dim=2)
_WINDOW = SlidingWindowAttention(kv_heads=1, head_dim=2, window=24)
_RECURRENT = GatedDeltaNet(
    num_key_heads=1,
    num_value_heads=1,
    key_head_dim=2,
    value_head_dim=2,
    conv_kernel=2,
)

KINDS = {
    "hybrid": (_FULL, _RECURRENT),
    "two groups": (_FULL, _WINDOW, _RECURRENT),
    "attention": (_FULL,),
    "recurrent": (_RECURRENT,),
}


def make_layout(kind: str = "hybrid", tokens_per_page: int = 16) -> CacheLayout:
    layers = tuple(Layer(index, layer) for index, layer in enumerate(KINDS[kind]))
    return CacheLayout(ModelLayout(kind, layers), tokens_per_page)


def make_buckets(**limits: Any) -> Buckets:
    wide = {"max_prefill_seqs": 64, "max_snapshots": 192, "max_copies": 128}
    return Buckets((64,), (8192,), **{**wide, **limits})


def make_manager(
    kind: str = "hybrid",
    *,
    tokens_per_page: int = 16,
    num_pages: int | Sequence[int] = 2000,
    num_rows: int = 200,
    max_seqs: int = 32,
    max_tokens: int = 4096,
    buckets: Buckets | None = None,
    **options: Any,
) -> CacheManager:
    layout = make_layout(kind, tokens_per_page)
    size = CacheSize.create(
        layout,
        num_pages if layout.num_page_groups else 0,
        num_rows if layout.has_recurrent else 0,
        max_seqs=max_seqs,
        max_tokens=max_tokens,
    )
    return CacheManager(layout, size, buckets or make_buckets(), **options)


def make_lru_manager(kind: str = "hybrid", **options: Any) -> CacheManager:
    """A manager whose points are few: branch, last page boundary, response."""
    return make_manager(kind, eviction=Lru, **options)
