"""Builds a model from the config and the tensors of a `qwen3_next` checkpoint."""

from jaxcache.layouts.hf_fields import MAX_LAYERS
from jaxcache.models.attention_layer import Attention, AttentionShape
from jaxcache.models.checkpoint import Config, Weights
from jaxcache.models.feed_forward import GatedFeedForward
from jaxcache.models.gated_delta_layer import GatedDelta, GatedDeltaShape
from jaxcache.models.hybrid import HybridModel, Residual
from jaxcache.models.normalization import RMSNorm
from jaxcache.models.settings import (
    ConfigError,
    integer,
    integers,
    number,
    read_head,
    read_layout,
    require,
    rotary_setting,
    texts,
)


def build_qwen3_next(
    config: Config, weights: Weights, *, chunk_size: int, match_transformers: bool
) -> HybridModel:
    """Builds the model: each layer a gated delta net or an attention, then dense.

    Args:
        config: The parsed config.json.
        weights: Where the tensors come from.
        chunk_size: Tokens a chunk of the recurrent scans holds.
        match_transformers: Without effect: transformers is consistent here.

    Raises:
        ValueError: naming the field of the config or the tensor that does not fit; a
            layer with a sparse mixture of experts does not.
    """
    del match_transformers
    require(config, "hidden_act", "silu", default="silu")
    require(config, "attention_bias", False, default=False)
    kinds = _layer_kinds(config)
    _check_dense(config, len(kinds))
    dim = integer(config, "hidden_size")
    channels = integer(config, "intermediate_size")
    eps = number(config, "rms_norm_eps", 1e-6)
    head_dim = integer(config, "head_dim", 256)
    attention = AttentionShape(
        dim=dim,
        num_heads=integer(config, "num_attention_heads"),
        kv_heads=integer(config, "num_key_value_heads"),
        head_dim=head_dim,
        rotary=rotary_setting(config, head_dim, 0.25),
        is_gated=True,
        norm_eps=eps,
    )
    delta = GatedDeltaShape(
        dim=dim,
        key_heads=integer(config, "linear_num_key_heads"),
        value_heads=integer(config, "linear_num_value_heads"),
        key_dim=integer(config, "linear_key_head_dim"),
        value_dim=integer(config, "linear_value_head_dim"),
        conv_kernel=integer(config, "linear_conv_kernel_dim", 4),
        norm_eps=eps,
    )
    layers = []
    for layer_id, kind in enumerate(kinds):
        name = f"model.layers.{layer_id}"
        mixer: Attention | GatedDelta
        if kind == "full_attention":
            mixer = Attention(layer_id, attention, weights, f"{name}.self_attn")
        else:
            mixer = GatedDelta(layer_id, delta, weights, f"{name}.linear_attn")
        feed_forward = GatedFeedForward(weights, f"{name}.mlp", dim, channels)
        norm = RMSNorm.read_centred(weights, eps, f"{name}.input_layernorm", dim)
        layers.append(Residual(norm, mixer))
        norm = RMSNorm.read_centred(
            weights, eps, f"{name}.post_attention_layernorm", dim
        )
        layers.append(Residual(norm, feed_forward))
    vocab = integer(config, "vocab_size")
    return HybridModel(
        read_layout(config),
        embedding=weights.read("model.embed_tokens.weight", vocab, dim),
        layers=layers,
        norm=RMSNorm.read_centred(weights, eps, "model.norm", dim),
        head=read_head(config, weights, vocab, dim),
        chunk_size=chunk_size,
    )


def _layer_kinds(config: Config) -> list[str]:
    """Returns `linear_attention` or `full_attention` for each layer."""
    num_layers = integer(config, "num_hidden_layers", maximum=MAX_LAYERS)
    interval = integer(config, "full_attention_interval", 4)
    by_interval = [
        "linear_attention" if (layer_id + 1) % interval else "full_attention"
        for layer_id in range(num_layers)
    ]
    kinds = texts(config, "layer_types", by_interval) or by_interval
    for layer_id, kind in enumerate(kinds):
        if kind not in ("linear_attention", "full_attention"):
            raise ConfigError(
                "layer_types of a qwen3_next must hold linear_attention and "
                f"full_attention, got {kind!r} for layer {layer_id}"
            )
    return kinds


def _check_dense(config: Config, num_layers: int) -> None:
    """Refuses the layers that transformers would build with a mixture of experts."""
    num_experts = integer(config, "num_experts", 512, minimum=0)
    sparse_step = integer(config, "decoder_sparse_step", 1)
    dense = integers(config, "mlp_only_layers", ())
    for layer_id in range(num_layers):
        is_sparse = num_experts > 0 and (layer_id + 1) % sparse_step == 0
        if is_sparse and layer_id not in dense:
            raise ConfigError(
                f"mlp_only_layers of a qwen3_next must list every layer, or num_experts"
                f" be 0: layer {layer_id} has num_experts={num_experts}, and a sparse "
                "mixture of experts is not built"
            )
