"""A field of a config that makes no sense is refused by name, before it is used."""

import json
import pathlib
import shutil
from typing import Any

import pytest

from jaxcache.models import load_model, random_model, read_config
from jaxcache.models.checkpoint import read_json
from jaxcache.models.settings import ConfigError
from tests.models.golden import FOLDER, NAMES

SENSELESS: list[tuple[str, str, Any, str]] = [
    ("bamba", "rope_parameters", 5, "rope_parameters of a bamba must be an object"),
    ("bamba", "rope_parameters", {"rope_type": "default"}, "lacks rope_theta"),
    ("bamba", "rope_parameters", {"rope_theta": "x"}, "rope_theta .* be a number"),
    ("bamba", "rope_parameters", {"rope_theta": -1}, "rope_theta .* be from 1 to"),
    (
        "bamba",
        "num_hidden_layers",
        "x",
        "num_hidden_layers .* integer >= 1, got 'x'",
    ),
    ("bamba", "num_hidden_layers", -3, "num_hidden_layers .* from 1 to 10000, got -3"),
    ("bamba", "num_hidden_layers", 10**12, "num_hidden_layers .* from 1 to 10000"),
    ("bamba", "num_hidden_layers", True, "num_hidden_layers .* an integer >= 1"),
    ("bamba", "num_attention_heads", 0, "num_attention_heads .* from 1 to"),
    ("bamba", "mamba_n_heads", [1], "mamba_n_heads .* an integer >= 1"),
    ("bamba", "mamba_d_head", "wide", "mamba_d_head .* an integer >= 1, got 'wide'"),
    ("bamba", "hidden_size", 1.5, "hidden_size .* an integer >= 1, got 1.5"),
    ("bamba", "hidden_size", 2**40, "hidden_size .* from 1 to 2147483647"),
    ("bamba", "attn_layer_indices", 5, "attn_layer_indices .* a list of integers"),
    ("bamba", "time_step_limit", 3, "time_step_limit .* a list of two numbers"),
    ("bamba", "time_step_limit", [2, 1], "time_step_limit .* the smaller first"),
    ("bamba", "rms_norm_eps", "x", "rms_norm_eps .* a number, got 'x'"),
    ("bamba", "rms_norm_eps", float("nan"), "rms_norm_eps .* from 0 to inf, got nan"),
    ("bamba", "rms_norm_eps", 10**400, "rms_norm_eps .* from 0 to inf"),
    ("bamba", "mamba_conv_bias", "yes", "mamba_conv_bias .* true or false"),
    ("bamba", "tie_word_embeddings", 2, "tie_word_embeddings .* true or false"),
    ("bamba", "hidden_act", ["silu"], "hidden_act .* 'silu', got"),
    ("nemotron_h", "layers_block_type", 5, "layers_block_type .* a list of texts"),
    ("nemotron_h", "layers_block_type", [[1]], "layers_block_type .* a list of texts"),
    ("nemotron_h", "time_step_limit", [0, None], "time_step_limit .* a number"),
    ("nemotron_h", "n_groups", {}, "n_groups .* an integer >= 1"),
    ("qwen3_next", "layer_types", "x", "layer_types .* a list of texts"),
    ("qwen3_next", "mlp_only_layers", 5, "mlp_only_layers .* a list of integers"),
    ("qwen3_next", "decoder_sparse_step", 0, "decoder_sparse_step .* from 1 to"),
    ("qwen3_next", "partial_rotary_factor", 7, "partial_rotary_factor .* 0 to 1"),
]


def parametrize(cases: list[tuple[str, str, Any, str]]) -> pytest.MarkDecorator:
    ids = [f"{name}-{field}-{str(value)[:12]}" for name, field, value, _ in cases]
    return pytest.mark.parametrize(
        ("name", "field", "value", "message"), cases, ids=ids
    )


@parametrize(SENSELESS)
def test_a_senseless_field_is_refused_by_name(
    name: str, field: str, value: Any, message: str
) -> None:
    config = {**read_config(FOLDER / name), field: value}
    if field == "partial_rotary_factor":
        config["rope_parameters"] = None
    with pytest.raises(ConfigError, match=message):
        random_model(config)


def test_an_old_pattern_must_be_a_text() -> None:
    config = dict(read_config(FOLDER / "nemotron_h"))
    config |= {"layers_block_type": None, "hybrid_override_pattern": 5}
    with pytest.raises(ConfigError, match=r"hybrid_override_pattern .* a text, got 5"):
        random_model(config)


def test_whole_floats_are_integers() -> None:
    config = read_config(FOLDER / "bamba")
    config = {**config, "hidden_size": float(config["hidden_size"])}
    assert random_model(config).vocab_size == 256


@pytest.mark.parametrize("name", NAMES)
def test_no_field_of_another_type_ends_in_an_error_of_another_kind(name: str) -> None:
    """Whatever stands in a field that is read: it works, or its error says so."""
    config = read_config(FOLDER / name)
    for field in config:
        for value in (5, "x", [[1]], {"a": None}, -1, 0, True):
            try:
                random_model({**config, field: value})
            except ValueError:
                continue


def test_an_error_of_a_checkpoint_names_file_and_field(tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(FOLDER / "bamba", folder)
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    for change, message in (
        ({"rope_parameters": 5}, "rope_parameters of a bamba must be an object"),
        ({"model_type": []}, "model_type must be one of"),
    ):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=message) as refusal:
            load_model(folder)
        assert str(path) in str(refusal.value)


def test_an_infinity_that_is_none_is_no_json(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"time_step_limit": {"__float__": [1]}}')
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        read_json(path)
