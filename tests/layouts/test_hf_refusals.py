"""Configs that cannot be read: each error names the field and the architecture."""

import json
import pathlib
import re
from typing import Any

import pytest

from jaxcache.layouts import ModelLayout

DATA = pathlib.Path(__file__).parents[1] / "data" / "hf_configs"
MAMBA = ["hidden_size", "mamba_expand", "mamba_n_heads", "mamba_d_state"]
MAMBA += ["mamba_d_conv", "mamba_n_groups"]
ATTENTION = ["num_attention_heads", "num_key_value_heads"]

# The fields that each architecture cannot do without; all of them positive integers.
INTEGERS = {
    "bamba": ["num_hidden_layers", *MAMBA, *ATTENTION],
    "falcon_h1": ["num_hidden_layers", "mamba_d_ssm", *MAMBA[2:], *ATTENTION],
    "granitemoehybrid": ["num_hidden_layers", *MAMBA, *ATTENTION],
    "jamba": [
        "num_hidden_layers",
        "attn_layer_period",
        "hidden_size",
        "mamba_expand",
        "mamba_d_state",
        "mamba_d_conv",
        *ATTENTION,
    ],
    "kimi_linear": [
        "num_hidden_layers",
        "linear_num_heads",
        "linear_head_dim",
        "linear_conv_kernel_dim",
        "kv_lora_rank",
    ],
    "lfm2": ["num_hidden_layers", "hidden_size", "conv_L_cache", *ATTENTION],
    "nemotron_h": [
        "mamba_num_heads",
        "mamba_head_dim",
        "n_groups",
        "ssm_state_size",
        "conv_kernel",
        "head_dim",
        *ATTENTION,
    ],
    "qwen3_next": [
        "num_hidden_layers",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "head_dim",
        *ATTENTION,
    ],
    "zamba2": [
        "num_hidden_layers",
        "hidden_size",
        "mamba_expand",
        "n_mamba_heads",
        "mamba_ngroups",
        "mamba_d_state",
        "mamba_d_conv",
        "attention_head_dim",
        *ATTENTION,
    ],
}
LAYER_TYPES = {
    "granitemoehybrid": "layer_types",
    "kimi_linear": "layer_types",
    "lfm2": "layer_types",
    "nemotron_h": "layers_block_type",
    "qwen3_next": "layer_types",
    "zamba2": "layers_block_type",
}
KERNELS = {"mamba_d_conv", "linear_conv_kernel_dim", "conv_L_cache", "conv_kernel"}


def config_of(architecture: str) -> dict[str, Any]:
    """The config, with layers of each sort where the file has one sort only."""
    config: dict[str, Any] = json.loads((DATA / f"{architecture}.json").read_text())
    if architecture == "bamba":
        config["attn_layer_indices"] = [1]
    if architecture == "granitemoehybrid":
        config["layer_types"] = ["mamba", "attention"] * 16
    if architecture == "lfm2":
        config["layer_types"] = ["conv", "full_attention"] * 16
        del config["full_attn_idxs"]
    return config


def refusal(config: Any) -> str:
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        ModelLayout.from_hf_config(config)
    return str(refused.value)


@pytest.mark.parametrize("architecture", INTEGERS)
def test_the_configs_used_here_are_good(architecture: str) -> None:
    assert ModelLayout.from_hf_config(config_of(architecture)).layers


REQUIRED = [
    *((name, field) for name, fields in INTEGERS.items() for field in fields),
    *LAYER_TYPES.items(),
    ("bamba", "attn_layer_indices"),
    ("jamba", "attn_layer_offset"),
    ("kimi_linear", "qk_rope_head_dim"),
]


@pytest.mark.parametrize(("architecture", "field"), REQUIRED)
def test_a_missing_field_is_refused(architecture: str, field: str) -> None:
    config = config_of(architecture)
    del config[field]
    if field == "attention_head_dim":  # may follow from the width
        del config["hidden_size"]
        field = "hidden_size"
    assert refusal(config) == f"{field} is missing from the {architecture} config"


@pytest.mark.parametrize("value", [0, -4, 2.5, "8", [8], True, float("inf")])
@pytest.mark.parametrize(
    ("architecture", "field"),
    [(name, field) for name, fields in INTEGERS.items() for field in fields],
)
def test_a_field_that_is_no_positive_integer_is_refused(
    architecture: str, field: str, value: Any
) -> None:
    least = 2 if field in KERNELS else 1
    assert refusal(config_of(architecture) | {field: value}) == (
        f"{field} of a {architecture} config must be an integer >= {least}, "
        f"got {value!r}"
    )


# Null means something in these: as many as query heads; what follows from the width.
NULLABLE = {"num_key_value_heads", "mamba_d_ssm", "attention_head_dim"}


@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        (name, field)
        for name, fields in INTEGERS.items()
        for field in fields
        if field not in NULLABLE
    ],
)
def test_a_null_field_is_refused(architecture: str, field: str) -> None:
    least = 2 if field in KERNELS else 1
    assert refusal(config_of(architecture) | {field: None}) == (
        f"{field} of a {architecture} config must be an integer >= {least}, got None"
    )


@pytest.mark.parametrize(
    ("architecture", "field"),
    [
        (name, field)
        for name, fields in INTEGERS.items()
        for field in fields
        if field in KERNELS
    ],
)
def test_a_convolution_of_one_tap_is_refused(architecture: str, field: str) -> None:
    assert refusal(config_of(architecture) | {field: 1}) == (
        f"{field} of a {architecture} config must be an integer >= 2, got 1"
    )


@pytest.mark.parametrize(("architecture", "field"), LAYER_TYPES.items())
@pytest.mark.parametrize("value", ["MMM*", 3, {"0": "conv"}])
def test_layer_types_that_are_no_list_are_refused(
    architecture: str, field: str, value: Any
) -> None:
    assert refusal(config_of(architecture) | {field: value}) == (
        f"{field} of a {architecture} config must be a list of layer types, "
        f"got {value!r}"
    )


KNOWN = {
    "granitemoehybrid": "linear_attention, full_attention",
    "kimi_linear": "linear_attention, full_attention",
    "lfm2": "conv, full_attention",
    "nemotron_h": "linear_attention, full_attention, mlp, moe",
    "qwen3_next": "linear_attention, full_attention",
    "zamba2": "linear_attention, hybrid",
}


@pytest.mark.parametrize(("architecture", "known"), KNOWN.items())
@pytest.mark.parametrize("value", ["sliding_attention", None, 3, {}])
def test_an_unknown_layer_type_is_refused(
    architecture: str, known: str, value: Any
) -> None:
    config = config_of(architecture)
    field = LAYER_TYPES[architecture]
    config[field] = [*config[field][:-1], value]
    assert refusal(config) == (
        f"{field} of a {architecture} config must hold {known}, got {value!r}"
    )


@pytest.mark.parametrize(
    ("architecture", "field"),
    [item for item in LAYER_TYPES.items() if item[0] != "nemotron_h"],
)
def test_layer_types_of_another_number_of_layers_are_refused(
    architecture: str, field: str
) -> None:
    config = config_of(architecture)
    num_layers = config["num_hidden_layers"]
    config[field] = config[field][:-1]
    assert refusal(config) == (
        f"{field} of a {architecture} config must have num_hidden_layers = "
        f"{num_layers} entries, got {num_layers - 1}"
    )


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        (
            "bamba",
            {"attn_layer_indices": [32]},
            "attn_layer_indices of a bamba config must hold layer indices below 32, "
            "got [32]",
        ),
        (
            "bamba",
            {"attn_layer_indices": [-1]},
            "attn_layer_indices of a bamba config must be an integer >= 0, got -1",
        ),
        (
            "bamba",
            {"attn_layer_indices": 4},
            "attn_layer_indices of a bamba config must be a list of layer indices, "
            "got 4",
        ),
        (
            "bamba",
            {"mamba_n_heads": 100},
            "mamba_n_heads of a bamba config must divide the inner channels = 8192, "
            "got 100",
        ),
        (
            "bamba",
            {"mamba_d_head": 32},
            "mamba_d_head of a bamba config must be 8192 inner channels over 128 heads "
            "= 64, got 32",
        ),
        (
            "bamba",
            {"mamba_n_groups": 3},
            "mamba_n_groups of a bamba config must divide the number of Mamba heads = "
            "128, got 3",
        ),
        (
            "bamba",
            {"num_key_value_heads": 5},
            "num_key_value_heads of a bamba config must divide num_attention_heads = "
            "32, got 5",
        ),
        (
            "bamba",
            {"num_attention_heads": 24},
            "num_attention_heads of a bamba config must divide hidden_size = 4096, "
            "got 24",
        ),
        (
            "falcon_h1",
            {"mamba_d_ssm": 1000},
            "mamba_n_heads of a falcon_h1 config must divide the inner channels = "
            "1000, got 128",
        ),
        (
            "jamba",
            {"attn_layer_offset": 8},
            "attn_layer_offset of a jamba config must be below attn_layer_period = 8, "
            "got 8",
        ),
        (
            "jamba",
            {"attn_layer_offset": -1},
            "attn_layer_offset of a jamba config must be an integer >= 0, got -1",
        ),
        (
            "jamba",
            {"head_dim": "big"},
            "head_dim of a jamba config must be an integer >= 1, got 'big'",
        ),
        (
            "kimi_linear",
            {"qk_rope_head_dim": -1},
            "qk_rope_head_dim of a kimi_linear config must be an integer >= 0, got -1",
        ),
        (
            "kimi_linear",
            {"linear_attn_config": 3},
            "linear_attn_config of a kimi_linear config must be an object, got 3",
        ),
        (
            "kimi_linear",
            {
                "num_hidden_layers": 2,
                "layer_types": None,
                "linear_attn_config": {"full_attn_layers": [0], "kda_layers": [2]},
            },
            "full_attn_layers and kda_layers of a kimi_linear config must name each "
            "layer from 1 to 2 once, got {'full_attn_layers': [0], 'kda_layers': [2]}",
        ),
        (
            "kimi_linear",
            {
                "num_hidden_layers": 2,
                "layer_types": None,
                "linear_attn_config": {"full_attn_layers": [1, 2]},
            },
            "kda_layers of a kimi_linear config must be a list of layer indices, "
            "got None",
        ),
        (
            "lfm2",
            {"layer_types": None, "full_attn_idxs": [40]},
            "full_attn_idxs of a lfm2 config must hold layer indices below 32, got "
            "[40]",
        ),
        (
            "lfm2",
            {"layer_types": None},
            "layer_types of a lfm2 config must be a list of layer types, got None",
        ),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "M*X"},
            "hybrid_override_pattern of a nemotron_h config must be a string of M E * "
            "-, got 'M*X'",
        ),
        (
            "nemotron_h",
            {"layers_block_type": ["mlp", "moe"]},
            "layers_block_type of a nemotron_h config must have a layer that keeps "
            "something, got ['mlp', 'moe']",
        ),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": ""},
            "layers_block_type of a nemotron_h config must have a layer that keeps "
            "something, got []",
        ),
        (
            "qwen3_next",
            {"linear_num_key_heads": 5},
            "linear_num_key_heads of a qwen3_next config must divide "
            "linear_num_value_heads = 32, got 5",
        ),
        (
            "qwen3_next",
            {"layer_types": None, "full_attention_interval": 0},
            "full_attention_interval of a qwen3_next config must be an integer >= 1, "
            "got 0",
        ),
        (
            "zamba2",
            {"mamba_headdim": 64},
            "mamba_headdim of a zamba2 config must be 5120 inner channels over 8 heads "
            "= 640, got 64",
        ),
        (
            "zamba2",
            {"attention_head_dim": None, "num_attention_heads": 48},
            "num_attention_heads of a zamba2 config must divide 2 * hidden_size = "
            "5120, got 48",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    config = config_of(architecture) | changes
    if "num_attention_heads" in changes:
        config["num_key_value_heads"] = 8
    assert refusal(config) == message


@pytest.mark.parametrize("field", ["dtype", "mamba_ssm_cache_dtype"])
@pytest.mark.parametrize("value", ["auto", "float64", 16])
def test_an_unknown_dtype_in_the_config_is_refused(field: str, value: Any) -> None:
    message = refusal(config_of("nemotron_h") | {field: value})
    assert message.startswith(
        f"{field} of a nemotron_h config must be one of bfloat16, "
    )
    assert message.endswith(f", got {value!r}")


@pytest.mark.parametrize("argument", ["dtype", "state_dtype"])
def test_an_unknown_dtype_of_the_caller_is_refused(argument: str) -> None:
    message = rf"^{argument} must be one of bfloat16, .*, got 'bf16'$"
    with pytest.raises(ValueError, match=message):
        ModelLayout.from_hf_config(config_of("bamba"), **{argument: "bf16"})


@pytest.mark.parametrize("value", ["llama", "Bamba", None, ["bamba"]])
def test_an_unknown_architecture_is_refused_with_those_there_are(value: Any) -> None:
    assert refusal({"model_type": value}) == (
        "model_type must be one of bamba, falcon_h1, granitemoehybrid, jamba, "
        f"kimi_linear, lfm2, nemotron_h, qwen3_next, zamba2, got {value!r}; for "
        "another architecture declare the layers by hand, for example "
        "ModelLayout('mine', (Layer(0, FullAttention(kv_heads=8, head_dim=128)), "
        "Layer(1, Mamba2(num_heads=64, head_dim=64, num_groups=8, state_dim=128, "
        "conv_kernel=4))))"
    )


def test_the_way_out_of_an_unknown_architecture_works() -> None:
    example = re.search(r"for example (.*)$", refusal({}))
    assert example is not None
    names: dict[str, Any] = {}
    exec("from jaxcache.layouts import *", names)
    model = eval(example[1], names)
    assert isinstance(model, ModelLayout)
    assert model.layer_ids == (0, 1)


@pytest.mark.parametrize("config", [None, 3, ["bamba"], b"config.json"])
def test_something_that_is_no_config_is_refused(config: Any) -> None:
    assert refusal(config) == (
        f"config must be a mapping or a path, got {type(config).__name__}"
    )


@pytest.mark.parametrize("text", ["", "{", "nonsense", "\x00"])
def test_a_file_that_is_no_json_is_refused(tmp_path: pathlib.Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert refusal(path).startswith(f"config must be a JSON file, but {path}: ")


def test_a_file_that_is_no_text_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"\xff\xfe\x80")
    assert refusal(path).startswith(f"config must be a JSON file, but {path}: ")


def test_a_file_that_holds_no_object_is_refused(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.json").write_text("[1, 2]")
    assert refusal(tmp_path) == (
        f"config must be a JSON object, but {tmp_path / 'config.json'} holds a list"
    )


def test_a_file_that_is_not_there_is_not_found(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        ModelLayout.from_hf_config(tmp_path)
