"""What bytes lie where: static, hashable descriptions of cache memory."""

if __name__ != "jaxcache.layouts":
    raise ImportError("import `jaxcache.layouts`; `layouts` is only a folder name")

from jaxcache.layouts.attention_layers import (
    FullAttention,
    LatentAttention,
    SlidingWindowAttention,
)
from jaxcache.layouts.cache_layout import CacheLayout
from jaxcache.layouts.cache_size import NULL_SLOT, CacheSize
from jaxcache.layouts.conv_view import ConvSection, ConvView
from jaxcache.layouts.layer_groups import BufferLocation, LayerGroup
from jaxcache.layouts.layer_kind import LayerKind
from jaxcache.layouts.model import Layer, ModelLayout
from jaxcache.layouts.placement import (
    Placement,
    cache_units,
    place,
    units_of_shard,
)
from jaxcache.layouts.pool_spec import BufferStrides, Order, PoolSpec
from jaxcache.layouts.recurrent_layers import (
    GatedDeltaNet,
    KimiDeltaAttention,
    Mamba1,
    Mamba2,
    ShortConvolution,
)
from jaxcache.layouts.retention import Full, Recurrent, Retention, Window, pages_for
from jaxcache.layouts.roles import DTYPES, BufferSpec, numpy_dtype

__all__ = [
    "DTYPES",
    "NULL_SLOT",
    "BufferLocation",
    "BufferSpec",
    "BufferStrides",
    "CacheLayout",
    "CacheSize",
    "ConvSection",
    "ConvView",
    "Full",
    "FullAttention",
    "GatedDeltaNet",
    "KimiDeltaAttention",
    "LatentAttention",
    "Layer",
    "LayerGroup",
    "LayerKind",
    "Mamba1",
    "Mamba2",
    "ModelLayout",
    "Order",
    "Placement",
    "PoolSpec",
    "Recurrent",
    "Retention",
    "ShortConvolution",
    "SlidingWindowAttention",
    "Window",
    "cache_units",
    "numpy_dtype",
    "pages_for",
    "place",
    "units_of_shard",
]
