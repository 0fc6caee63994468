"""Reading a model's settings from its config, and refusing what is not built."""

from typing import Any

import numpy as np

from jaxcache.models.attention_layer import Rotary
from jaxcache.models.checkpoint import Config, Weights

_REQUIRED = object()


def setting(config: Config, field: str, default: Any = _REQUIRED) -> Any:
    """Returns a field of the config; null counts as absent.

    Raises:
        ValueError: naming the field, if it is absent and has no default.
    """
    value = config.get(field)
    if value is not None:
        return value
    if default is _REQUIRED:
        raise ValueError(f"the config of a {config.get('model_type')} lacks {field}")
    return default


def require(config: Config, field: str, *allowed: Any, default: Any) -> None:
    """Refuses a field whose value asks for something the model does not have.

    Args:
        config: The config.
        field: The field.
        *allowed: Values that work.
        default: What an absent field means.

    Raises:
        ValueError: naming the field, what works and what came.
    """
    value = setting(config, field, default)
    if value not in allowed:
        works = " or ".join(repr(value) for value in allowed)
        raise ValueError(
            f"{field} of a {config.get('model_type')} must be {works}, got {value!r}"
        )


def rotary_setting(config: Config, head_dim: int, default_fraction: float) -> Rotary:
    """Returns the rotary embedding that the config asks for.

    Args:
        config: The config, with `rope_parameters` or, as older files have it, with
            `rope_theta`, `rope_scaling` and `partial_rotary_factor` of its own.
        head_dim: Elements of a head.
        default_fraction: Rotated part of a head where the config does not say.

    Raises:
        ValueError: if it asks for scaled positions.
    """
    rope = setting(config, "rope_parameters", None) or {
        **(setting(config, "rope_scaling", None) or {}),
        "rope_theta": setting(config, "rope_theta", 10000.0),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"rope_type of a {config.get('model_type')} must be 'default', got {kind!r}"
        )
    fraction = rope.get(
        "partial_rotary_factor",
        setting(config, "partial_rotary_factor", default_fraction),
    )
    return Rotary(theta=float(rope["rope_theta"]), dim=int(head_dim * fraction))


def read_head(
    config: Config, weights: Weights, vocab: int, dim: int
) -> np.ndarray[Any, Any] | None:
    """Returns the output head, or None where it is the embedding."""
    if setting(config, "tie_word_embeddings", False):
        return None
    return weights.read("lm_head.weight", vocab, dim)
