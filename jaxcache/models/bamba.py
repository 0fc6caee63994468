"""Builds a model from the config and the tensors of a `bamba` checkpoint."""

import dataclasses

from jaxcache.layouts import ModelLayout
from jaxcache.models.attention_layer import Attention, AttentionShape
from jaxcache.models.checkpoint import Config, Weights
from jaxcache.models.feed_forward import GatedFeedForward
from jaxcache.models.hybrid import HybridModel, Residual
from jaxcache.models.mamba2_layer import Mamba2, Mamba2Shape
from jaxcache.models.normalization import RMSNorm
from jaxcache.models.settings import read_head, require, rotary_setting, setting


def build_bamba(
    config: Config, weights: Weights, *, chunk_size: int, match_transformers: bool
) -> HybridModel:
    """Builds the model: each layer a Mamba-2 or an attention, then a feed-forward.

    Args:
        config: The parsed config.json.
        weights: Where the tensors come from.
        chunk_size: Tokens a chunk of the recurrent scans holds.
        match_transformers: Whether generated tokens are rotated as if they stood at
            position 0. transformers 5.24 asks its first layer how many tokens there
            are before them, and a Mamba layer does not count.

    Raises:
        ValueError: naming the field of the config or the tensor that does not fit.
    """
    require(config, "hidden_act", "silu", default="silu")
    for field in ("attention_bias", "mlp_bias", "mamba_proj_bias"):
        require(config, field, False, default=False)
    dim = setting(config, "hidden_size")
    channels = setting(config, "intermediate_size")
    eps = setting(config, "rms_norm_eps", 1e-5)
    attention_ids = setting(config, "attn_layer_indices", ())
    mamba2 = _mamba2_shape(config, dim, eps)
    attention = _attention_shape(config, dim, match_transformers)
    layers = []
    for layer_id in range(setting(config, "num_hidden_layers")):
        name = f"model.layers.{layer_id}"
        mixer: Attention | Mamba2
        if layer_id in attention_ids:
            mixer = Attention(layer_id, attention, weights, f"{name}.self_attn")
        else:
            mixer = Mamba2(layer_id, mamba2, weights, f"{name}.mamba")
        feed_forward = GatedFeedForward(weights, f"{name}.feed_forward", dim, channels)
        norm = RMSNorm.read(weights, eps, f"{name}.input_layernorm", dim)
        layers.append(Residual(norm, mixer))
        norm = RMSNorm.read(weights, eps, f"{name}.pre_ff_layernorm", dim)
        layers.append(Residual(norm, feed_forward))
    vocab = setting(config, "vocab_size")
    return HybridModel(
        ModelLayout.from_hf_config(config),
        embedding=weights.read("model.embed_tokens.weight", vocab, dim),
        layers=layers,
        norm=RMSNorm.read(weights, eps, "model.final_layernorm", dim),
        head=read_head(config, weights, vocab, dim),
        chunk_size=chunk_size,
    )


def _mamba2_shape(config: Config, dim: int, eps: float) -> Mamba2Shape:
    num_heads = setting(config, "mamba_n_heads")
    num_groups = setting(config, "mamba_n_groups")
    head_dim = setting(config, "mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = setting(config, "mamba_expand", 2) * dim // num_heads
    dt_limit = tuple(setting(config, "time_step_limit", (0.0, float("inf"))))
    return Mamba2Shape(
        dim=dim,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_dim=setting(config, "mamba_d_state"),
        conv_kernel=setting(config, "mamba_d_conv"),
        has_conv_bias=setting(config, "mamba_conv_bias", True),
        dt_limit=dt_limit,
        prefill_dt_limit=dt_limit,
        norm_groups=num_groups,
        norm_eps=eps,
    )


def _attention_shape(config: Config, dim: int, restarts: bool) -> AttentionShape:
    num_heads = setting(config, "num_attention_heads")
    head_dim = setting(config, "head_dim", dim // num_heads)
    rotary = rotary_setting(config, head_dim, 0.5)
    return AttentionShape(
        dim=dim,
        num_heads=num_heads,
        kv_heads=setting(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        rotary=dataclasses.replace(rotary, restarts=restarts),
    )
