"""Old, new and nested spellings of the same config say the same layout."""

import json
import pathlib
from typing import Any

import pytest

from jaxcache.layouts import ModelLayout
from tests.layouts.configs import config_of, keys_and_values, shapes


def kinds(config: dict[str, Any]) -> str:
    """One letter a layer: (a)ttention, (r)ecurrent, (b)oth, - for nothing."""
    model = ModelLayout.from_hf_config(config)
    layers = shapes(model)
    letters = []
    for layer in range(max(layers) + 1):
        roles = layers.get(layer, {})
        attention = "key" in roles or "latent" in roles
        recurrent = "ssm" in roles or "conv" in roles
        letters.append(
            {(1, 1): "b", (1, 0): "a", (0, 1): "r"}.get((attention, recurrent), "-")
        )
    return "".join(letters)


@pytest.mark.parametrize(
    ("architecture", "changes", "want"),
    [
        ("bamba", {"attn_layer_indices": [0, 2], "num_hidden_layers": 4}, "arar"),
        ("bamba", {"attn_layer_indices": [], "num_hidden_layers": 4}, "rrrr"),
        (
            "granitemoehybrid",
            {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
            "ra",
        ),
        (
            "granitemoehybrid",
            {"layer_types": ["linear_attention", "full_attention", "mamba"]}
            | {"num_hidden_layers": 3},
            "rar",
        ),
        ("granitemoehybrid", {"layer_types": None, "num_hidden_layers": 3}, "rrr"),
        ("jamba", {"attn_layer_period": 3, "attn_layer_offset": 0}, "arr" * 10 + "ar"),
        ("jamba", {"num_hidden_layers": 3}, "rrr"),
        (
            "kimi_linear",
            {"layer_types": ["kda_attention", "full_attention"]}
            | {"num_hidden_layers": 2},
            "ra",
        ),
        (
            "lfm2",
            {"layer_types": None, "full_attn_idxs": [1], "num_hidden_layers": 3},
            "rar",
        ),
        ("lfm2", {"layer_types": ["conv", "conv"], "num_hidden_layers": 2}, "rr"),
        ("nemotron_h", {"layers_block_type": ["mamba", "attention", "mlp"]}, "ra"),
        ("nemotron_h", {"layers_block_type": ["mlp", "full_attention"]}, "-a"),
        (
            "qwen3_next",
            {"layer_types": ["linear_attention"], "num_hidden_layers": 1},
            "r",
        ),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "M-M*-EM"},
            "r-ra--r",
        ),
        (
            "nemotron_h",
            {"layers_block_type": None, "layer_types": ["mlp", "mamba"]},
            "-r",
        ),
        (
            "qwen3_next",
            {"layer_types": None, "full_attention_interval": 4},
            "rrra" * 12,
        ),
        (
            "qwen3_next",
            {"layer_types": ["full_attention"], "num_hidden_layers": 1},
            "a",
        ),
        (
            "zamba2",
            {"layers_block_type": ["mamba", "hybrid"], "num_hidden_layers": 2},
            "rb",
        ),
        ("zamba2", {"layers_block_type": ["mamba"], "num_hidden_layers": 1}, "r"),
    ],
)
def test_layer_types_in_every_spelling(
    architecture: str, changes: dict[str, Any], want: str
) -> None:
    assert kinds(config_of(architecture) | changes) == want


def test_the_nested_fields_of_the_first_kimi_linear_release() -> None:
    config = config_of("kimi_linear")
    for field in ("layer_types", "linear_num_heads", "linear_head_dim"):
        del config[field]
    config["num_hidden_layers"] = 4
    config["linear_attn_config"] = {
        "full_attn_layers": [4],  # counted from 1
        "kda_layers": [1, 2, 3],
        "num_heads": 16,
        "head_dim": 64,
        "short_conv_kernel_size": 5,
    }
    layers = shapes(ModelLayout.from_hf_config(config))
    assert kinds(config) == "rrra"
    assert layers[0]["conv_q"] == (16, (64, 4), "bfloat16")
    assert layers[0]["ssm"] == (16, (64, 64), "float32")


def test_the_newer_field_names_of_kimi_linear() -> None:
    config = config_of("kimi_linear")
    config["linear_num_key_heads"] = config.pop("linear_num_heads")
    config["linear_key_head_dim"] = config.pop("linear_head_dim")
    assert ModelLayout.from_hf_config(config) == ModelLayout.from_hf_config(
        config_of("kimi_linear")
    )


def test_the_older_field_names_of_nemotron_h() -> None:
    # A head size that is not hidden_size over heads, so that only the field gives it.
    newer = config_of("nemotron_h") | {"head_dim": 96, "n_groups": 4, "conv_kernel": 5}
    older = dict(newer)
    for new, old in {
        "n_groups": "mamba_n_groups",
        "conv_kernel": "mamba_d_conv",
        "head_dim": "attention_head_dim",
    }.items():
        older[old] = older.pop(new)
    assert ModelLayout.from_hf_config(older) == ModelLayout.from_hf_config(newer)
    layers = shapes(ModelLayout.from_hf_config(older))
    assert layers[0]["conv_b"] == (4, (128, 4), "bfloat16")
    assert layers[2] == keys_and_values(8, 96)


@pytest.mark.parametrize("architecture", ["bamba", "falcon_h1", "granitemoehybrid"])
@pytest.mark.parametrize("value", ["auto", None])
def test_the_head_size_of_mamba_may_be_left_to_follow(
    architecture: str, value: str | None
) -> None:
    config = config_of(architecture) | {"mamba_d_head": value}
    assert ModelLayout.from_hf_config(config) == ModelLayout.from_hf_config(
        config_of(architecture)
    )


def test_falcon_h1_without_its_own_width_uses_the_expansion() -> None:
    config = config_of("falcon_h1") | {"mamba_d_ssm": None, "mamba_d_head": 64}
    layers = shapes(ModelLayout.from_hf_config(config))
    assert layers[0]["ssm"] == (128, (64, 256), "float32")


def test_the_attention_head_size_of_zamba2_follows_from_twice_the_width() -> None:
    config = config_of("zamba2")
    del config["attention_head_dim"]
    assert ModelLayout.from_hf_config(config) == ModelLayout.from_hf_config(
        config_of("zamba2")
    )


@pytest.mark.parametrize(
    "architecture", ["bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2"]
)
def test_a_head_size_in_the_config_wins(architecture: str) -> None:
    config = config_of(architecture) | {"head_dim": 96}
    if architecture == "bamba":
        config["attn_layer_indices"] = [4]
    if architecture == "granitemoehybrid":
        config["layer_types"] = ["mamba"] * 4 + ["attention"] * 28
    heads = 32 if architecture == "granitemoehybrid" else 8
    layers = shapes(ModelLayout.from_hf_config(config))
    assert layers[4]["key"] == layers[4]["value"] == (heads, (16, 96), "bfloat16")


@pytest.mark.parametrize(
    "architecture", ["falcon_h1", "jamba", "nemotron_h", "qwen3_next", "zamba2"]
)
def test_key_value_heads_that_are_null_are_the_query_heads(architecture: str) -> None:
    config = config_of(architecture) | {"num_key_value_heads": None}
    layers = shapes(ModelLayout.from_hf_config(config))
    keys = [roles["key"] for roles in layers.values() if "key" in roles]
    assert {units for units, _, _ in keys} == {config["num_attention_heads"]}


def test_values_that_say_nothing_about_the_cache_do_no_harm(
    tmp_path: pathlib.Path,
) -> None:
    config = config_of("bamba")
    plain = ModelLayout.from_hf_config(config)
    config["time_step_limit"] = [0.0, {"__float__": "Infinity"}]
    config["rope_parameters"] = None
    config["quantization_config"] = {"anything": [float("nan"), float("inf")]}
    assert ModelLayout.from_hf_config(config) == plain
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert "Infinity" in path.read_text()
    assert ModelLayout.from_hf_config(path) == plain
    assert ModelLayout.from_hf_config(tmp_path) == plain


def test_integers_that_were_written_as_floats_are_integers() -> None:
    config = config_of("zamba2") | {"mamba_expand": 2.0}
    assert ModelLayout.from_hf_config(config) == ModelLayout.from_hf_config(
        config_of("zamba2")
    )
