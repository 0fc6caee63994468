"""Hugging Face architectures: which layer of a model keeps what, from its fields.

Follows the config and model definitions of transformers 5 (`configuration_*.py`,
`modeling_*.py`), and reads the files of older versions where they name things
differently. A reader returns one tuple a layer, with the kinds that the layer holds:
none (feed-forward, experts), one or two.
"""

import dataclasses
from collections.abc import Callable, Mapping

from jaxcache.layouts.attention_layers import LatentAttention
from jaxcache.layouts.hf_fields import Fields
from jaxcache.layouts.hf_kinds import (
    Dtypes,
    bamba_mixer,
    full_attention,
    mamba2,
    mamba_channels,
    mamba_head_dim,
)
from jaxcache.layouts.layer_kind import LayerKind
from jaxcache.layouts.recurrent_layers import (
    GatedDeltaNet,
    KimiDeltaAttention,
    Mamba1,
    ShortConvolution,
)

LINEAR = "linear_attention"
FULL = "full_attention"

Kinds = list[tuple[LayerKind, ...]]


def _bamba(fields: Fields, dtypes: Dtypes) -> Kinds:
    num_layers = fields.num_layers()
    name, indices = fields.find("attn_layer_indices")
    # Null is what the config class has by default, and means no attention at all.
    full = fields.integers(name, [] if indices is None else indices, num_layers)
    mamba = (bamba_mixer(fields, dtypes, mamba_channels(fields)),)
    if not full:
        return [mamba] * num_layers
    attention = (full_attention(fields, dtypes),)
    return [attention if i in full else mamba for i in range(num_layers)]


def _falcon_h1(fields: Fields, dtypes: Dtypes) -> Kinds:
    name, channels = fields.find("mamba_d_ssm")
    if channels is None:
        channels = mamba_channels(fields)
    mamba = bamba_mixer(fields, dtypes, fields.as_integer(name, channels))
    both = (full_attention(fields, dtypes), mamba)
    return [both] * fields.num_layers()


def _granitemoehybrid(fields: Fields, dtypes: Dtypes) -> Kinds:
    num_layers = fields.num_layers()
    mamba = (bamba_mixer(fields, dtypes, mamba_channels(fields)),)
    names = ("layer_types", "layers_block_type")
    if fields.find(*names)[1] is None:  # as in the config class: no attention at all
        return [mamba] * num_layers
    types = fields.layer_types(*names, known=(LINEAR, FULL), num_layers=num_layers)
    if FULL not in types:
        return [mamba] * num_layers
    attention = (full_attention(fields, dtypes),)
    return [attention if t == FULL else mamba for t in types]


def _jamba(fields: Fields, dtypes: Dtypes) -> Kinds:
    period = fields.integer("attn_layer_period")
    offset = fields.integer("attn_layer_offset", minimum=0)
    if offset >= period:
        need = f"must be below attn_layer_period = {period}"
        raise fields.error("attn_layer_offset", need, offset)
    mamba = Mamba1(
        num_channels=mamba_channels(fields),
        state_dim=fields.integer("mamba_d_state"),
        conv_kernel=fields.integer("mamba_d_conv", minimum=2),
        conv_dtype=dtypes.cache,
        ssm_dtype=dtypes.state,
    )
    num_layers = fields.num_layers()
    full = range(offset, num_layers, period)
    if not full:
        return [(mamba,)] * num_layers
    attention = full_attention(fields, dtypes)
    return [(attention if i in full else mamba,) for i in range(num_layers)]


def _kimi_linear(fields: Fields, dtypes: Dtypes) -> Kinds:
    num_layers = fields.num_layers()
    fields = _flat_kimi_linear(fields, num_layers)
    types = fields.layer_types(
        "layer_types", known=(LINEAR, FULL), num_layers=num_layers
    )
    delta = KimiDeltaAttention(
        num_heads=fields.integer("linear_num_heads", "linear_num_key_heads"),
        head_dim=fields.integer("linear_head_dim", "linear_key_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim", minimum=2),
        conv_dtype=dtypes.cache,
        ssm_dtype=dtypes.state,
    )
    # What is kept of a token is the compressed vector and the rotary part of the key
    # that all heads share; keys and values are expanded from it when they are read.
    latent = LatentAttention(
        fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim", minimum=0),
        dtypes.cache,
    )
    return [(latent if t == FULL else delta,) for t in types]


def _flat_kimi_linear(fields: Fields, num_layers: int) -> Fields:
    """Returns the fields with those of the first release's nested dictionary on top."""
    nested = fields.get("linear_attn_config")
    if nested is None:
        return fields
    if not isinstance(nested, Mapping):
        raise fields.error("linear_attn_config", "must be an object", nested)
    names = {
        "num_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "short_conv_kernel_size": "linear_conv_kernel_dim",
    }
    flat = dict(fields.values)
    flat.update({new: nested[old] for old, new in names.items() if old in nested})
    if flat.get("layer_types") is None and "full_attn_layers" in nested:
        # These count the layers from 1.
        full, delta = (
            fields.integers(name, nested.get(name), num_layers + 1)
            for name in ("full_attn_layers", "kda_layers")
        )
        if sorted(full + delta) != list(range(1, num_layers + 1)):
            need = f"must name each layer from 1 to {num_layers} once"
            raise fields.error("full_attn_layers and kda_layers", need, nested)
        flat["layer_types"] = [
            FULL if i + 1 in full else LINEAR for i in range(num_layers)
        ]
    return dataclasses.replace(fields, values=flat)


def _lfm2(fields: Fields, dtypes: Dtypes) -> Kinds:
    num_layers = fields.num_layers()
    if fields.get("layer_types") is None and "full_attn_idxs" in fields.values:
        ids = fields.values["full_attn_idxs"]
        full = fields.integers("full_attn_idxs", ids, num_layers)
        types = tuple(FULL if i in full else "conv" for i in range(num_layers))
    else:
        types = fields.layer_types(
            "layer_types", known=("conv", FULL), num_layers=num_layers
        )
    kinds: dict[str, tuple[LayerKind, ...]] = {}
    if "conv" in types:
        channels = fields.integer("hidden_size")
        taps = fields.integer("conv_L_cache", minimum=2)
        kinds["conv"] = (ShortConvolution(channels, taps, dtypes.cache),)
    if FULL in types:
        kinds[FULL] = (full_attention(fields, dtypes),)
    return [kinds[t] for t in types]


# Characters of the older `hybrid_override_pattern`.
NEMOTRON_H_PATTERN = {"M": LINEAR, "E": "moe", "*": FULL, "-": "mlp"}


def _nemotron_h(fields: Fields, dtypes: Dtypes) -> Kinds:
    names = ("layers_block_type", "layer_types")
    pattern = fields.get("hybrid_override_pattern")
    if fields.get(*names) is None and pattern is not None:
        if not isinstance(pattern, str) or set(pattern) - set(NEMOTRON_H_PATTERN):
            need = f"must be a string of {' '.join(NEMOTRON_H_PATTERN)}"
            raise fields.error("hybrid_override_pattern", need, pattern)
        fields.check_num_layers("hybrid_override_pattern", len(pattern))
        types = tuple(NEMOTRON_H_PATTERN[char] for char in pattern)
    else:
        types = fields.layer_types(*names, known=(LINEAR, FULL, "mlp", "moe"))
    if LINEAR not in types and FULL not in types:
        need = "must have a layer that keeps something"
        raise fields.error("layers_block_type", need, list(types))
    kinds: dict[str, tuple[LayerKind, ...]] = {}
    if LINEAR in types:
        kinds[LINEAR] = (
            mamba2(
                fields,
                dtypes,
                num_heads=fields.integer("mamba_num_heads"),
                head_dim=fields.integer("mamba_head_dim"),
                groups=("n_groups", "mamba_n_groups"),
                state=("ssm_state_size",),
                kernel=("conv_kernel", "mamba_d_conv"),
            ),
        )
    if FULL in types:
        # `sliding_window` is in the config, but the model attends to everything.
        head_dim = fields.integer("head_dim", "attention_head_dim")
        kinds[FULL] = (full_attention(fields, dtypes, head_dim),)
    return [kinds.get(t, ()) for t in types]


def _qwen3_next(fields: Fields, dtypes: Dtypes) -> Kinds:
    num_layers = fields.num_layers()
    interval_name = "full_attention_interval"
    if fields.get("layer_types") is None and interval_name in fields.values:
        interval = fields.integer(interval_name)
        types = tuple(LINEAR if (i + 1) % interval else FULL for i in range(num_layers))
    else:
        types = fields.layer_types(
            "layer_types", known=(LINEAR, FULL), num_layers=num_layers
        )
    kinds: dict[str, tuple[LayerKind, ...]] = {}
    if LINEAR in types:
        key_heads = fields.integer("linear_num_key_heads")
        value_heads = fields.integer("linear_num_value_heads")
        fields.divide(
            value_heads, "linear_num_value_heads", key_heads, "linear_num_key_heads"
        )
        delta = GatedDeltaNet(
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_head_dim=fields.integer("linear_key_head_dim"),
            value_head_dim=fields.integer("linear_value_head_dim"),
            conv_kernel=fields.integer("linear_conv_kernel_dim", minimum=2),
            conv_dtype=dtypes.cache,
            ssm_dtype=dtypes.state,
        )
        kinds[LINEAR] = (delta,)
    if FULL in types:
        head_dim = fields.integer("head_dim")
        kinds[FULL] = (full_attention(fields, dtypes, head_dim),)
    return [kinds[t] for t in types]


def _zamba2(fields: Fields, dtypes: Dtypes) -> Kinds:
    types = fields.layer_types(
        "layers_block_type",
        "layer_types",
        known=(LINEAR, "hybrid"),
        num_layers=fields.num_layers(),
    )
    num_heads = fields.integer("n_mamba_heads")
    channels = mamba_channels(fields)
    mamba = mamba2(
        fields,
        dtypes,
        num_heads=num_heads,
        head_dim=mamba_head_dim(
            fields, "mamba_headdim", channels, num_heads, "n_mamba_heads"
        ),
        groups=("mamba_ngroups",),
        state=("mamba_d_state",),
        kernel=("mamba_d_conv",),
    )
    if "hybrid" not in types:
        return [(mamba,)] * len(types)
    # The attention block is shared, and so are its weights, but each layer that runs it
    # has keys and values of its own. Its input is twice as wide as the model.
    if fields.get("attention_head_dim") is None:
        width = 2 * fields.integer("hidden_size")
        heads = fields.integer("num_attention_heads")
        head_dim = fields.divide(width, "2 * hidden_size", heads, "num_attention_heads")
    else:
        head_dim = fields.integer("attention_head_dim")
    attention = full_attention(fields, dtypes, head_dim)
    return [(attention, mamba) if t == "hybrid" else (mamba,) for t in types]


READERS: Mapping[str, Callable[[Fields, Dtypes], Kinds]] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granitemoehybrid,
    "jamba": _jamba,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "nemotron_h": _nemotron_h,
    "qwen3_next": _qwen3_next,
    "zamba2": _zamba2,
}
