"""What bytes lie where: static, hashable descriptions of cache memory."""

if __name__ != "jaxcache.layouts":
    raise ImportError("import `jaxcache.layouts`; `layouts` is only a folder name")

from jaxcache.layouts.cache_layout import BufferLocation, CacheLayout, LayerGroup
from jaxcache.layouts.cache_size import NULL_SLOT, CacheSize
from jaxcache.layouts.conv_view import ConvSection, ConvView
from jaxcache.layouts.layers import (
    FullAttention,
    GatedDeltaNet,
    KimiDeltaAttention,
    LatentAttention,
    LayerKind,
    Mamba1,
    Mamba2,
    ShortConvolution,
    SlidingWindowAttention,
)
from jaxcache.layouts.model import Layer, ModelLayout
from jaxcache.layouts.placement import Placement, place, units_of_shard
from jaxcache.layouts.pool_spec import Order, PoolSpec
from jaxcache.layouts.retention import Full, Recurrent, Retention, Window, pages_for
from jaxcache.layouts.roles import BufferSpec

__all__ = [
    "NULL_SLOT",
    "BufferLocation",
    "BufferSpec",
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
    "pages_for",
    "place",
    "units_of_shard",
]
