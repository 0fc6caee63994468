"""The configs of real models, and the shapes of a layout, for tests."""

import json
import pathlib
from typing import Any

from jaxcache.layouts import ModelLayout

DATA = pathlib.Path(__file__).parents[1] / "data"
Shapes = dict[str, tuple[int, tuple[int, ...], str]]


def config_of(architecture: str) -> dict[str, Any]:
    text = (DATA / "hf_configs" / f"{architecture}.json").read_text()
    config: dict[str, Any] = json.loads(text)
    return config


def shapes(model: ModelLayout) -> dict[int, Shapes]:
    """The buffers of each layer: role to (units, shape of a unit, dtype)."""
    layers: dict[int, Shapes] = {}
    for layer in model.layers:
        roles = layers.setdefault(layer.layer_id, {})
        for spec in layer.kind.buffers(16):
            roles[spec.role] = (spec.units, spec.unit_shape, spec.dtype)
    return layers


def keys_and_values(heads: int, head_dim: int, dtype: str = "bfloat16") -> Shapes:
    """Keys and values of 16 tokens."""
    shape = (heads, (16, head_dim), dtype)
    return {"key": shape, "value": shape}
