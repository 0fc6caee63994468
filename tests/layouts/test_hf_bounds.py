"""Whatever number stands in a config: it ends at once, as a layout or as a refusal."""

import contextlib
import copy
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from jaxcache.layouts import ModelLayout
from jaxcache.layouts.arguments import MAX_SIZE
from jaxcache.layouts.hf_architectures import READERS
from jaxcache.layouts.hf_fields import MAX_LAYERS
from tests.layouts.configs import config_of

# Seconds of its own time that reading a config may take, however busy the machine.
LIMIT_S = 1.0

SENSELESS = [10**30, 2**31, MAX_LAYERS, -1, 0, 1.5, 1e30, "x", True, None, []]
SENSELESS += [float("nan"), float("inf")]

Path = tuple[str, ...]


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def number_fields(config: dict[str, Any], before: Path = ()) -> Iterator[Path]:
    """Every field that holds a number, a list of them, or null; nested ones too."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from number_fields(value, (*before, name))
        elif value is None or isinstance(value, int | float | list):
            yield (*before, name)


def changed(config: dict[str, Any], path: Path, value: object) -> dict[str, Any]:
    config = copy.deepcopy(config)
    inner = config
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return config


@pytest.mark.parametrize("value", SENSELESS, ids=lambda value: f"{value!r:.12}")
@pytest.mark.parametrize("architecture", READERS)
def test_no_number_of_a_config_hangs_or_fails_as_anything_but_a_refusal(
    architecture: str, value: object
) -> None:
    config = config_of(architecture)
    for path in number_fields(config):
        try:
            with time_limit(LIMIT_S):
                ModelLayout.from_hf_config(changed(config, path, value))
        except ValueError:
            continue
        except Exception as error:
            raise AssertionError(f"{path} = {value!r}: {error!r}") from error


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as refused, time_limit(LIMIT_S):  # noqa: PT011
        ModelLayout.from_hf_config(config)
    return str(refused.value)


LAYERED = sorted(set(READERS) - {"nemotron_h"})  # that one lists its layers


@pytest.mark.parametrize("count", [MAX_LAYERS + 1, 10**30])
@pytest.mark.parametrize("architecture", LAYERED)
def test_more_layers_than_any_model_has_are_refused(
    architecture: str, count: int
) -> None:
    assert refusal(config_of(architecture) | {"num_hidden_layers": count}) == (
        f"num_hidden_layers of a {architecture} config must be at most {MAX_LAYERS}, "
        f"got {count}"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"layers_block_type": ["mamba"] * (MAX_LAYERS + 1)},
        {"layers_block_type": None, "hybrid_override_pattern": "M" * (MAX_LAYERS + 1)},
    ],
    ids=["list", "pattern"],
)
def test_a_list_of_more_layers_than_any_model_has_is_refused(
    change: dict[str, Any],
) -> None:
    config = config_of("nemotron_h")
    config.pop("hybrid_override_pattern", None)
    message = refusal(config | change)
    assert f"must have at most {MAX_LAYERS} layers, got {MAX_LAYERS + 1}" in message


@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        ("bamba", "mamba_d_state"),
        ("falcon_h1", "num_key_value_heads"),
        ("granitemoehybrid", "mamba_n_heads"),
        ("jamba", "mamba_d_conv"),
        ("kimi_linear", "kv_lora_rank"),
        ("lfm2", "hidden_size"),
        ("nemotron_h", "mamba_head_dim"),
        ("qwen3_next", "linear_num_key_heads"),
        ("zamba2", "n_mamba_heads"),
    ],
)
def test_a_size_that_no_array_has_is_refused(architecture: str, field: str) -> None:
    assert refusal(config_of(architecture) | {field: MAX_SIZE + 1}) == (
        f"{field} of a {architecture} config must be at most {MAX_SIZE}, "
        f"got {MAX_SIZE + 1}"
    )


def test_a_width_that_no_array_has_is_refused_where_it_is_a_product() -> None:
    config = config_of("jamba") | {"hidden_size": 2**20, "mamba_expand": 2**20}
    assert refusal(config) == (
        f"mamba_expand * hidden_size of a jamba config must be at most {MAX_SIZE}, "
        f"got {2**40}"
    )
