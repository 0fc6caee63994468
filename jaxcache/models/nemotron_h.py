"""Builds a model from the config and the tensors of a `nemotron_h` checkpoint."""

from jaxcache.models.attention_layer import Attention, AttentionShape
from jaxcache.models.checkpoint import Config, Weights
from jaxcache.models.feed_forward import SquaredReluFeedForward
from jaxcache.models.hybrid import HybridModel, Residual
from jaxcache.models.mamba2_layer import Mamba2, Mamba2Shape
from jaxcache.models.normalization import RMSNorm
from jaxcache.models.settings import (
    ConfigError,
    flag,
    integer,
    limits,
    number,
    read_head,
    read_layout,
    require,
    setting,
    texts,
)

# Older configs spell the layers as one string, or call them by other names.
_PATTERN = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OLD_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


def build_nemotron_h(
    config: Config, weights: Weights, *, chunk_size: int, match_transformers: bool
) -> HybridModel:
    """Builds the model: each layer one Mamba-2, one attention or one feed-forward.

    Args:
        config: The parsed config.json.
        weights: Where the tensors come from.
        chunk_size: Tokens a chunk of the recurrent scans holds.
        match_transformers: Whether the step sizes of prefill tokens, and only theirs,
            are at least `time_step_min`, as transformers 5.24 has it without its CUDA
            kernels. The kernels, and training, know only `time_step_limit`.

    Raises:
        ValueError: naming the field of the config or the tensor that does not fit.
    """
    require(config, "mamba_hidden_act", "silu", default="silu")
    require(config, "mlp_hidden_act", "relu2", default="relu2")
    for field in ("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"):
        require(config, field, False, default=False)
    require(config, "sliding_window", None, default=None)
    dim = integer(config, "hidden_size")
    channels = integer(config, "intermediate_size")
    eps = number(config, "layer_norm_epsilon", 1e-5)
    mamba2 = _mamba2_shape(config, dim, eps, match_transformers)
    attention = AttentionShape(
        dim=dim,
        num_heads=integer(config, "num_attention_heads"),
        kv_heads=integer(config, "num_key_value_heads"),
        head_dim=integer(config, "head_dim"),
    )
    layers = []
    for layer_id, kind in enumerate(_layer_kinds(config)):
        name = f"backbone.layers.{layer_id}"
        mixer: Attention | Mamba2 | SquaredReluFeedForward
        if kind == "full_attention":
            mixer = Attention(layer_id, attention, weights, f"{name}.mixer")
        elif kind == "linear_attention":
            mixer = Mamba2(layer_id, mamba2, weights, f"{name}.mixer")
        else:
            mixer = SquaredReluFeedForward(weights, f"{name}.mixer", dim, channels)
        norm = RMSNorm.read(weights, eps, f"{name}.norm", dim)
        layers.append(Residual(norm, mixer))
    vocab = integer(config, "vocab_size")
    return HybridModel(
        read_layout(config),
        embedding=weights.read("backbone.embeddings.weight", vocab, dim),
        layers=layers,
        norm=RMSNorm.read(weights, eps, "backbone.norm_f", dim),
        head=read_head(config, weights, vocab, dim),
        chunk_size=chunk_size,
    )


def _layer_kinds(config: Config) -> list[str]:
    """Returns what each layer is, in today's names."""
    kinds = texts(config, "layers_block_type", None)
    if kinds is None:
        pattern = setting(config, "hybrid_override_pattern", "")
        if not isinstance(pattern, str):
            raise ConfigError(
                f"hybrid_override_pattern of a nemotron_h must be a text, "
                f"got {pattern!r}"
            )
        kinds = [_PATTERN.get(letter, letter) for letter in pattern]
    kinds = [_OLD_NAMES.get(kind, kind) for kind in kinds]
    built = ("linear_attention", "full_attention", "mlp")
    for layer_id, kind in enumerate(kinds):
        if kind not in built:
            raise ConfigError(
                f"layers_block_type of a nemotron_h must hold {', '.join(built)}, "
                f"got {kind!r} for layer {layer_id}"
            )
    if not kinds:
        raise ConfigError("the config of a nemotron_h lacks layers_block_type")
    return kinds


def _mamba2_shape(
    config: Config, dim: int, eps: float, match_transformers: bool
) -> Mamba2Shape:
    num_groups = integer(config, "n_groups")
    least, most = limits(config, "time_step_limit")
    prefill_least = least
    if match_transformers:
        prefill_least = number(config, "time_step_min", 0.001)
    return Mamba2Shape(
        dim=dim,
        num_heads=integer(config, "mamba_num_heads"),
        head_dim=integer(config, "mamba_head_dim"),
        num_groups=num_groups,
        state_dim=integer(config, "ssm_state_size"),
        conv_kernel=integer(config, "conv_kernel", 4),
        has_conv_bias=flag(config, "use_conv_bias", True),
        dt_limit=(least, most),
        prefill_dt_limit=(prefill_least, most),
        norm_groups=num_groups,
        norm_eps=eps,
    )
