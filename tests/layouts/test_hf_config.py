"""Real hybrid models, every shape worked out by hand from their configs.

The numbers in the comments are fields of the files in `tests/data/hf_configs`.
"""

import pytest

from jaxcache.layouts import CacheLayout, ModelLayout
from tests.layouts.configs import DATA, Shapes, config_of, keys_and_values, shapes


def test_bamba() -> None:
    # attn_layer_indices is null: the config class reads that as no attention at all.
    # mamba_expand 2 x hidden_size 4096 = 8192 channels over mamba_n_heads 128 = 64.
    # mamba_n_groups 1, mamba_d_state 256, mamba_d_conv 4: three past inputs.
    mamba: Shapes = {
        "conv_x": (128, (64, 3), "bfloat16"),
        "conv_b": (1, (256, 3), "bfloat16"),
        "conv_c": (1, (256, 3), "bfloat16"),
        "ssm": (128, (64, 256), "float32"),
    }
    model = ModelLayout.from_hf_config(DATA / "hf_configs" / "bamba.json")
    assert model.name == "bamba"
    assert shapes(model) == {layer: mamba for layer in range(32)}
    layout = CacheLayout(model)
    assert layout.num_page_groups == 0
    # 32 layers of 8192 x 3 x 2 + 2 x 256 x 3 x 2 + 8192 x 256 x 4 bytes.
    assert layout.bytes_per_row == 32 * (49152 + 3072 + 8388608) == 270106624


def test_falcon_h1() -> None:
    # Each of 32 layers has attention and Mamba-2 side by side. hidden_size 4096 over
    # num_attention_heads 32 = 128, num_key_value_heads 8. mamba_d_ssm 1024, not
    # mamba_expand x hidden_size, over mamba_n_heads 128 = 8.
    both: Shapes = keys_and_values(8, 128) | {
        "conv_x": (128, (8, 3), "bfloat16"),
        "conv_b": (1, (256, 3), "bfloat16"),
        "conv_c": (1, (256, 3), "bfloat16"),
        "ssm": (128, (8, 256), "float32"),
    }
    model = ModelLayout.from_hf_config(DATA / "hf_configs" / "falcon_h1.json")
    assert shapes(model) == {layer: both for layer in range(32)}
    layout = CacheLayout(model)
    assert [len(group.layer_ids) for group in layout.groups] == [32, 32]
    assert layout.bytes_per_token == 32 * 2 * 8 * 128 * 2 == 131072
    assert layout.bytes_per_row == 32 * (6144 + 3072 + 1048576) == 33849344


def test_granitemoehybrid() -> None:
    # All 32 layer_types are linear_attention. 2 x 4096 = 8192 over mamba_n_heads 128.
    mamba: Shapes = {
        "conv_x": (128, (64, 3), "bfloat16"),
        "conv_b": (1, (256, 3), "bfloat16"),
        "conv_c": (1, (256, 3), "bfloat16"),
        "ssm": (128, (64, 256), "float32"),
    }
    model = ModelLayout.from_hf_config(DATA / "hf_configs" / "granitemoehybrid.json")
    assert shapes(model) == {layer: mamba for layer in range(32)}


def test_jamba() -> None:
    # Attention in every attn_layer_period 8th layer from attn_layer_offset 4. Mamba-1
    # has a state for each of 2 x 4096 = 8192 channels: 256 units of 32.
    mamba: Shapes = {
        "conv_x": (256, (32, 3), "bfloat16"),
        "ssm": (256, (32, 16), "float32"),
    }
    model = ModelLayout.from_hf_config(DATA / "hf_configs" / "jamba.json")
    assert shapes(model) == {
        layer: keys_and_values(8, 128) if layer in (4, 12, 20, 28) else mamba
        for layer in range(32)
    }
    layout = CacheLayout(model)
    assert layout.bytes_per_token == 4 * 2 * 8 * 128 * 2 == 16384
    assert layout.bytes_per_row == 28 * (8192 * 3 * 2 + 8192 * 16 * 4) == 16056320


def test_kimi_linear() -> None:
    # linear_num_heads 32 x linear_head_dim 128, linear_conv_kernel_dim 4. Latent
    # attention: kv_lora_rank 512 + qk_rope_head_dim 64 = 576 numbers a token.
    delta: Shapes = {
        "conv_q": (32, (128, 3), "bfloat16"),
        "conv_k": (32, (128, 3), "bfloat16"),
        "conv_v": (32, (128, 3), "bfloat16"),
        "ssm": (32, (128, 128), "float32"),
    }
    latent: Shapes = {"latent": (1, (16, 576), "bfloat16")}
    model = ModelLayout.from_hf_config(DATA / "hf_configs" / "kimi_linear.json")
    assert shapes(model) == {
        layer: latent if layer in (4, 8, 12, 16, 20, 24) else delta
        for layer in range(27)
    }
    layout = CacheLayout(model)
    assert layout.bytes_per_token == 6 * 576 * 2 == 6912
    assert layout.bytes_per_row == 21 * (3 * 24576 + 2097152) == 45588480
    # On eight shards the latent is replicated on all of them, the heads are split.
    split = CacheLayout(model, num_shards=8)
    assert split.placement(4, "latent", 5).num_replicas == 8
    assert split.placement(0, "ssm", 5).num_replicas == 1


def test_lfm2() -> None:
    # All 32 layer_types are full_attention; hidden_size 2560 over 32 heads = 80.
    model = ModelLayout.from_hf_config(DATA / "hf_configs" / "lfm2.json")
    assert shapes(model) == {layer: keys_and_values(8, 80) for layer in range(32)}
    assert not CacheLayout(model).has_recurrent


def test_lfm2_with_convolutions() -> None:
    # conv_L_cache 3: two past inputs of each of 2560 channels, 80 units of 32.
    config = config_of("lfm2")
    config["layer_types"] = ["conv", "full_attention"] * 16
    assert shapes(ModelLayout.from_hf_config(config)) == {
        layer: keys_and_values(8, 80)
        if layer % 2
        else {"conv": (80, (32, 2), "bfloat16")}
        for layer in range(32)
    }


def test_nemotron_h() -> None:
    # layers_block_type: linear_attention, moe, full_attention, mlp. mamba_num_heads 128
    # x mamba_head_dim 64, n_groups 8, ssm_state_size 128, conv_kernel 4; head_dim 128.
    model = ModelLayout.from_hf_config(DATA / "hf_configs" / "nemotron_h.json")
    assert shapes(model) == {
        0: {
            "conv_x": (128, (64, 3), "bfloat16"),
            "conv_b": (8, (128, 3), "bfloat16"),
            "conv_c": (8, (128, 3), "bfloat16"),
            "ssm": (128, (64, 128), "float32"),
        },
        2: keys_and_values(8, 128),
    }


def test_qwen3_next() -> None:
    # Full attention in every fourth of 48 layers: 2 KV heads of head_dim 256. Linear:
    # 16 key heads of 128, 32 value heads of 128, kernel 4.
    delta: Shapes = {
        "conv_q": (16, (128, 3), "bfloat16"),
        "conv_k": (16, (128, 3), "bfloat16"),
        "conv_v": (32, (128, 3), "bfloat16"),
        "ssm": (32, (128, 128), "float32"),
    }
    model = ModelLayout.from_hf_config(DATA / "hf_configs" / "qwen3_next.json")
    assert shapes(model) == {
        layer: keys_and_values(2, 256) if layer % 4 == 3 else delta
        for layer in range(48)
    }
    layout = CacheLayout(model)
    assert layout.bytes_per_token == 12 * 2 * 2 * 256 * 2 == 24576
    assert layout.bytes_per_row == 36 * (2 * 12288 + 24576 + 2097152) == 77266944


def test_zamba2() -> None:
    # mamba_expand 2 x hidden_size 2560 = 5120 over n_mamba_heads 8 = 640; mamba_ngroups
    # 1, mamba_d_state 64. Hybrid layers run the shared attention as well, each with
    # keys and values of its own: 32 heads of attention_head_dim 160.
    mamba: Shapes = {
        "conv_x": (8, (640, 3), "bfloat16"),
        "conv_b": (1, (64, 3), "bfloat16"),
        "conv_c": (1, (64, 3), "bfloat16"),
        "ssm": (8, (640, 64), "float32"),
    }
    hybrid = (6, 12, 18, 24, 30, 36, 42, 47, 51)
    model = ModelLayout.from_hf_config(DATA / "hf_configs" / "zamba2.json")
    assert shapes(model) == {
        layer: keys_and_values(32, 160) | mamba if layer in hybrid else mamba
        for layer in range(54)
    }
    layout = CacheLayout(model)
    assert layout.groups[0].layer_ids == hybrid
    assert layout.groups[1].layer_ids == tuple(range(54))


TINY_MAMBA: Shapes = {
    "conv_x": (8, (16, 3), "float32"),
    "conv_b": (2, (16, 3), "float32"),
    "conv_c": (2, (16, 3), "float32"),
    "ssm": (8, (16, 16), "float32"),
}
TINY_ATTENTION = keys_and_values(2, 16, "float32")


def test_tiny_bamba() -> None:
    # The folder of a checkpoint will do. dtype is float32; attn_layer_indices [1, 3].
    model = ModelLayout.from_hf_config(str(DATA / "hf_golden" / "bamba"))
    assert shapes(model) == {
        0: TINY_MAMBA,
        1: TINY_ATTENTION,
        2: TINY_MAMBA,
        3: TINY_ATTENTION,
    }


def test_tiny_nemotron_h() -> None:
    model = ModelLayout.from_hf_config(DATA / "hf_golden" / "nemotron_h")
    assert shapes(model) == {
        0: TINY_MAMBA,
        1: TINY_ATTENTION,
        3: TINY_MAMBA,
        4: TINY_MAMBA,
        5: TINY_ATTENTION,
    }


def test_tiny_qwen3_next() -> None:
    delta: Shapes = {
        "conv_q": (2, (16, 3), "float32"),
        "conv_k": (2, (16, 3), "float32"),
        "conv_v": (4, (16, 3), "float32"),
        "ssm": (4, (16, 16), "float32"),
    }
    model = ModelLayout.from_hf_config(DATA / "hf_golden" / "qwen3_next")
    assert shapes(model) == {0: delta, 1: delta, 2: delta, 3: TINY_ATTENTION}


def dtypes(model: ModelLayout) -> dict[str, str]:
    return {
        role: dtype
        for layer in shapes(model).values()
        for role, (_, _, dtype) in layer.items()
    }


def test_the_dtype_of_the_config_holds_for_all_but_the_state() -> None:
    for spelling in ("dtype", "torch_dtype"):
        for value in ("float16", "torch.float16"):
            config = config_of("falcon_h1")
            del config["dtype"]
            config[spelling] = value
            assert dtypes(ModelLayout.from_hf_config(config)) == {
                "key": "float16",
                "value": "float16",
                "conv_x": "float16",
                "conv_b": "float16",
                "conv_c": "float16",
                "ssm": "float32",
            }


def test_a_dtype_that_is_missing_is_bfloat16() -> None:
    config = config_of("falcon_h1")
    del config["dtype"]
    assert dtypes(ModelLayout.from_hf_config(config))["key"] == "bfloat16"


@pytest.mark.parametrize("field", ["mamba_ssm_cache_dtype", "mamba_ssm_dtype"])
def test_the_config_may_have_a_dtype_for_the_state(field: str) -> None:
    config = config_of("nemotron_h")
    del config["mamba_ssm_cache_dtype"]
    config[field] = "bfloat16"
    assert dtypes(ModelLayout.from_hf_config(config))["ssm"] == "bfloat16"


def test_dtypes_given_by_the_caller_win() -> None:
    config = config_of("nemotron_h") | {"dtype": "float32"}
    model = ModelLayout.from_hf_config(
        config, dtype="float8_e4m3fn", state_dtype="float16"
    )
    assert dtypes(model) == {
        "key": "float8_e4m3fn",
        "value": "float8_e4m3fn",
        "conv_x": "float8_e4m3fn",
        "conv_b": "float8_e4m3fn",
        "conv_c": "float8_e4m3fn",
        "ssm": "float16",
    }


def test_a_name_given_by_the_caller_wins() -> None:
    model = ModelLayout.from_hf_config(config_of("bamba"), name="bamba-9b")
    assert model.name == "bamba-9b"
