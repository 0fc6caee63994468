"""Which configs there is a model for; every other is refused by the field's name."""

from typing import Any

import pytest

from jaxcache.layouts import CacheLayout
from jaxcache.layouts.roles import KEY, SSM
from jaxcache.models import ARCHITECTURES, TINY_CONFIG, random_model, read_config
from tests.models.golden import FOLDER, NAMES


def config(name: str, **changes: Any) -> dict[str, Any]:
    return {**read_config(FOLDER / name), **changes}


@pytest.mark.parametrize("name", NAMES)
def test_there_is_a_model_for_each_golden_config(name: str) -> None:
    assert name in ARCHITECTURES
    model = random_model(config(name))
    layout = CacheLayout(model.layout)
    assert layout.has_recurrent
    assert layout.num_page_groups == 1
    assert model.vocab_size == 256


@pytest.mark.parametrize("name", ["jamba", None, 3])
def test_an_unknown_architecture_is_refused_with_the_known_ones(name: object) -> None:
    message = f"model_type must be one of bamba, nemotron_h, qwen3_next, got {name!r}"
    with pytest.raises(ValueError, match=message):
        random_model({**TINY_CONFIG, "model_type": name})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bamba", {"hidden_act": "gelu"}, "hidden_act of a bamba must be 'silu'"),
        (
            "bamba",
            {"mamba_proj_bias": True},
            "mamba_proj_bias of a bamba must be False",
        ),
        ("bamba", {"mlp_bias": True}, "mlp_bias of a bamba must be False, got True"),
        ("bamba", {"hidden_size": None}, "config of a bamba lacks hidden_size"),
        (
            "bamba",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope_type of a bamba must be 'default', got 'yarn'",
        ),
        (
            "nemotron_h",
            {"mlp_hidden_act": "silu"},
            "mlp_hidden_act of a nemotron_h must be 'relu2'",
        ),
        (
            "nemotron_h",
            {"sliding_window": 64},
            "sliding_window of a nemotron_h must be None, got 64",
        ),
        ("nemotron_h", {"use_bias": True}, "use_bias of a nemotron_h must be False"),
        (
            "nemotron_h",
            {"layers_block_type": ["linear_attention", "moe"]},
            "layers_block_type of a nemotron_h must hold .* got 'moe' for layer 1",
        ),
        ("qwen3_next", {"attention_bias": True}, "attention_bias of a qwen3_next must"),
        (
            "qwen3_next",
            {"mlp_only_layers": [0, 1, 3]},
            "mlp_only_layers .* layer 2 has num_experts=4, and a sparse mixture of",
        ),
        (
            "qwen3_next",
            {"layer_types": ["linear_attention", "sliding_attention"]},
            "got 'sliding_attention' for layer 1",
        ),
    ],
)
def test_what_is_not_built_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        random_model(config(name, **changes))


def test_no_experts_at_all_is_dense() -> None:
    assert random_model(config("qwen3_next", num_experts=0, mlp_only_layers=[]))


def test_older_spellings_are_the_same_layers() -> None:
    changes = {"layers_block_type": None, "hybrid_override_pattern": "M*-MM*"}
    old, new = random_model(config("nemotron_h", **changes)), config("nemotron_h")
    assert old.layout == random_model(new).layout
    rotary = {"rope_parameters": None, "rope_theta": 5e5, "partial_rotary_factor": 0.25}
    attention: Any = random_model(config("bamba", **rotary)).layers[2].mixer
    assert (attention.shape.rotary.theta, attention.shape.rotary.dim) == (5e5, 4)


def test_a_tied_head_is_the_embedding() -> None:
    model = random_model({**TINY_CONFIG, "tie_word_embeddings": True})
    assert model.head is None
    assert model.logits(model.embedding[...][:2]).shape == (2, 256)


def test_the_layout_names_the_layers_by_the_models_own_ids() -> None:
    layout = CacheLayout(random_model(TINY_CONFIG).layout)
    assert layout.model.layer_ids == (0, 2, 3, 5)
    assert layout.units(2, KEY) == 2
    assert layout.units(0, SSM) == 8
