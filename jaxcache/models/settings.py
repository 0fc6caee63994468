"""Reading a model's settings from its config, and refusing what is not built.

Each getter says which field is wrong, what it must be and what came, so that a config
that somebody wrote by hand never fails further on.
"""

import math
import sys
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from jaxcache.layouts import ModelLayout
from jaxcache.layouts.arguments import MAX_SIZE
from jaxcache.models.attention_layer import Rotary
from jaxcache.models.checkpoint import Config, Weights

_REQUIRED: Any = object()


class ConfigError(ValueError):
    """A field of a config is missing, wrong, or asks for what is not built."""


def setting(config: Config, field: str, default: Any = _REQUIRED) -> Any:
    """Returns a field of the config; null counts as absent.

    Raises:
        ConfigError: naming the field, if it is absent and has no default.
    """
    value = config.get(field)
    if value is not None:
        return value
    if default is _REQUIRED:
        raise ConfigError(f"the config of a {config.get('model_type')} lacks {field}")
    return default


def integer(
    config: Config,
    field: str,
    default: int = _REQUIRED,
    *,
    minimum: int = 1,
    maximum: int = MAX_SIZE,
) -> int:
    """Returns a field that must be an integer from `minimum` to `maximum`.

    A float that is whole counts, as some files have it.

    Raises:
        ConfigError: naming the field, if it is something else.
    """
    value = setting(config, field, default)
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(number, bool) or not isinstance(number, int):
        raise _wrong(config, field, f"an integer >= {minimum}", value)
    if not minimum <= number <= maximum:
        raise _wrong(config, field, f"from {minimum} to {maximum}", value)
    return number


def number(
    config: Config,
    field: str,
    default: float = _REQUIRED,
    *,
    minimum: float = 0.0,
    maximum: float = math.inf,
) -> float:
    """Returns a field that must be a number from `minimum` to `maximum`.

    Raises:
        ConfigError: naming the field, if it is something else.
    """
    value = setting(config, field, default)
    return _number(config, field, value, minimum, maximum)


def flag(config: Config, field: str, default: bool) -> bool:
    """Returns a field that must be true or false.

    Raises:
        ConfigError: naming the field, if it is something else.
    """
    value = setting(config, field, default)
    if not isinstance(value, bool):
        raise _wrong(config, field, "true or false", value)
    return value


def integers(config: Config, field: str, default: Sequence[int]) -> tuple[int, ...]:
    """Returns a field that must be a list of integers from 0 to `MAX_SIZE`.

    Raises:
        ConfigError: naming the field, if it is something else.
    """
    values = setting(config, field, default)
    good = isinstance(values, list | tuple) and all(
        isinstance(value, int)
        and not isinstance(value, bool)
        and 0 <= value <= MAX_SIZE
        for value in values
    )
    if not good:
        raise _wrong(config, field, "a list of integers >= 0", values)
    return tuple(values)


def texts(
    config: Config, field: str, default: Sequence[str] | None = _REQUIRED
) -> list[str] | None:
    """Returns a field that must be a list of texts, or its default.

    Raises:
        ConfigError: naming the field, if it is something else.
    """
    values = setting(config, field, default)
    if values is None:
        return None
    if not isinstance(values, list | tuple) or not all(
        isinstance(value, str) for value in values
    ):
        raise _wrong(config, field, "a list of texts", values)
    return list(values)


def limits(config: Config, field: str) -> tuple[float, float]:
    """Returns a field that must be two numbers, the smaller first; absent: no limits.

    Raises:
        ConfigError: naming the field, if it is something else.
    """
    values = setting(config, field, (0.0, math.inf))
    if not isinstance(values, list | tuple) or len(values) != 2:
        raise _wrong(config, field, "a list of two numbers", values)
    least, most = (_number(config, field, value, 0.0, math.inf) for value in values)
    if least > most:
        raise _wrong(config, field, "two numbers, the smaller first", values)
    return least, most


def require(config: Config, field: str, *allowed: Any, default: Any) -> None:
    """Refuses a field whose value asks for something the model does not have.

    Args:
        config: The config.
        field: The field.
        *allowed: Values that work.
        default: What an absent field means.

    Raises:
        ConfigError: naming the field, what works and what came.
    """
    value = setting(config, field, default)
    if value not in allowed:
        works = " or ".join(repr(value) for value in allowed)
        raise _wrong(config, field, works, value)


def rotary_setting(config: Config, head_dim: int, default_fraction: float) -> Rotary:
    """Returns the rotary embedding that the config asks for.

    Args:
        config: The config, with `rope_parameters` or, as older files have it, with
            `rope_theta`, `rope_scaling` and `partial_rotary_factor` of its own.
        head_dim: Elements of a head.
        default_fraction: Rotated part of a head where the config does not say.

    Raises:
        ConfigError: if it asks for scaled positions, or a value makes no sense.
    """
    rope = _mapping(config, "rope_parameters") or {
        **_mapping(config, "rope_scaling"),
        "rope_theta": setting(config, "rope_theta", 10000.0),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise _wrong(config, "rope_type", "'default'", kind)
    # What the mapping says goes before what the config says.
    fields = {"model_type": config.get("model_type"), **rope}
    name = "partial_rotary_factor"
    if fields.get(name) is None:
        fields[name] = setting(config, name, default_fraction)
    fraction = number(fields, name, maximum=1.0)
    theta = number(fields, "rope_theta", minimum=1.0, maximum=1e30)
    return Rotary(theta=theta, dim=int(head_dim * fraction))


def read_layout(config: Config) -> ModelLayout:
    """Returns what the model keeps of a sequence.

    Raises:
        ConfigError: naming the field that does not fit.
    """
    try:
        return ModelLayout.from_hf_config(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def read_head(
    config: Config, weights: Weights, vocab: int, dim: int
) -> np.ndarray[Any, Any] | None:
    """Returns the output head, or None where it is the embedding."""
    if flag(config, "tie_word_embeddings", False):
        return None
    return weights.read("lm_head.weight", vocab, dim)


def _number(
    config: Config, field: str, value: object, minimum: float, maximum: float
) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(config, field, "a number", value)
    # Not a number is in no range, and an integer may be larger than any float.
    if not minimum <= value <= maximum or _is_beyond_floats(value):
        raise _wrong(config, field, f"from {minimum:g} to {maximum:g}", value)
    return float(value)


def _is_beyond_floats(value: float) -> bool:
    return isinstance(value, int) and value > sys.float_info.max


def _mapping(config: Config, field: str) -> dict[str, Any]:
    value = setting(config, field, {})
    if not isinstance(value, dict):
        raise _wrong(config, field, "an object", value)
    return cast(dict[str, Any], value)


def _wrong(config: Config, field: str, need: str, value: object) -> ConfigError:
    return ConfigError(
        f"{field} of a {config.get('model_type')} must be {need}, got {value!r}"
    )
