"""Builds a model from the config and the tensors of a `bamba` checkpoint."""

import dataclasses

from jaxcache.layouts.hf_fields import MAX_LAYERS
from jaxcache.models.attention_layer import Attention, AttentionShape
from jaxcache.models.checkpoint import Config, Weights
from jaxcache.models.feed_forward import GatedFeedForward
from jaxcache.models.hybrid import HybridModel, Residual
from jaxcache.models.mamba2_layer import Mamba2, Mamba2Shape
from jaxcache.models.normalization import RMSNorm
from jaxcache.models.settings import (
    flag,
    integer,
    integers,
    limits,
    number,
    read_head,
    read_layout,
    require,
    rotary_setting,
    setting,
)


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
    dim = integer(config, "hidden_size")
    channels = integer(config, "intermediate_size")
    eps = number(config, "rms_norm_eps", 1e-5)
    attention_ids = integers(config, "attn_layer_indices", ())
    mamba2 = _mamba2_shape(config, dim, eps)
    attention = _attention_shape(config, dim, match_transformers)
    layers = []
    num_layers = integer(config, "num_hidden_layers", maximum=MAX_LAYERS)
    for layer_id in range(num_layers):
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
    vocab = integer(config, "vocab_size")
    return HybridModel(
        read_layout(config),
        embedding=weights.read("model.embed_tokens.weight", vocab, dim),
        layers=layers,
        norm=RMSNorm.read(weights, eps, "model.final_layernorm", dim),
        head=read_head(config, weights, vocab, dim),
        chunk_size=chunk_size,
    )


def _mamba2_shape(config: Config, dim: int, eps: float) -> Mamba2Shape:
    num_heads = integer(config, "mamba_n_heads")
    num_groups = integer(config, "mamba_n_groups")
    if setting(config, "mamba_d_head", "auto") == "auto":
        head_dim = integer(config, "mamba_expand", 2) * dim // num_heads
    else:
        head_dim = integer(config, "mamba_d_head")
    dt_limit = limits(config, "time_step_limit")
    return Mamba2Shape(
        dim=dim,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_dim=integer(config, "mamba_d_state"),
        conv_kernel=integer(config, "mamba_d_conv"),
        has_conv_bias=flag(config, "mamba_conv_bias", True),
        dt_limit=dt_limit,
        prefill_dt_limit=dt_limit,
        norm_groups=num_groups,
        norm_eps=eps,
    )


def _attention_shape(config: Config, dim: int, restarts: bool) -> AttentionShape:
    num_heads = integer(config, "num_attention_heads")
    head_dim = integer(config, "head_dim", dim // num_heads)
    rotary = rotary_setting(config, head_dim, 0.5)
    return AttentionShape(
        dim=dim,
        num_heads=num_heads,
        kv_heads=integer(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        rotary=dataclasses.replace(rotary, restarts=restarts),
    )
