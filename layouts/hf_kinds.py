"""Layer kinds that several Hugging Face architectures share, from their fields."""

import dataclasses

from jaxcache.layouts.attention_layers import FullAttention
from jaxcache.layouts.hf_fields import Fields
from jaxcache.layouts.recurrent_layers import Mamba2


@dataclasses.dataclass(frozen=True)
class Dtypes:
    """Types of the buffers.

    Attributes:
        cache: Type of keys, values, latents and convolution inputs.
        state: Type of recurrent states.
    """

    cache: str
    state: str


def full_attention(
    fields: Fields, dtypes: Dtypes, head_dim: int | None = None
) -> FullAttention:
    """Returns full attention; the head size is a field or follows from the width."""
    name, kv_heads = fields.find("num_key_value_heads")
    if kv_heads is None:
        kv_heads = fields.integer("num_attention_heads")
    kv_heads = fields.as_integer(name, kv_heads)
    heads = fields.integer("num_attention_heads")
    fields.divide(heads, "num_attention_heads", kv_heads, "num_key_value_heads")
    if head_dim is None and fields.get("head_dim") is not None:
        head_dim = fields.integer("head_dim")
    if head_dim is None:
        width = fields.integer("hidden_size")
        head_dim = fields.divide(width, "hidden_size", heads, "num_attention_heads")
    return FullAttention(kv_heads, head_dim, dtype=dtypes.cache)


def bamba_mixer(fields: Fields, dtypes: Dtypes, channels: int) -> Mamba2:
    """Returns the Mamba-2 layer with the field names of Bamba and its descendants."""
    num_heads = fields.integer("mamba_n_heads")
    return mamba2(
        fields,
        dtypes,
        num_heads=num_heads,
        head_dim=mamba_head_dim(
            fields, "mamba_d_head", channels, num_heads, "mamba_n_heads"
        ),
        groups=("mamba_n_groups",),
        state=("mamba_d_state",),
        kernel=("mamba_d_conv",),
    )


def mamba2(
    fields: Fields,
    dtypes: Dtypes,
    *,
    num_heads: int,
    head_dim: int,
    groups: tuple[str, ...],
    state: tuple[str, ...],
    kernel: tuple[str, ...],
) -> Mamba2:
    """Returns a Mamba-2 layer; the last three arguments are spellings of its fields."""
    num_groups = fields.integer(*groups)
    fields.divide(num_heads, "the number of Mamba heads", num_groups, groups[0])
    return Mamba2(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_dim=fields.integer(*state),
        conv_kernel=fields.integer(*kernel, minimum=2),
        conv_dtype=dtypes.cache,
        ssm_dtype=dtypes.state,
    )


def mamba_channels(fields: Fields) -> int:
    """Returns the inner channels that follow from the width."""
    channels = fields.integer("mamba_expand") * fields.integer("hidden_size")
    return fields.as_integer("mamba_expand * hidden_size", channels)


def mamba_head_dim(
    fields: Fields, name: str, channels: int, num_heads: int, heads_name: str
) -> int:
    """Returns the channels of one head; the field may be missing, null or "auto"."""
    head_dim = fields.divide(channels, "the inner channels", num_heads, heads_name)
    value = fields.get(name)
    if value is not None and value != "auto" and value != head_dim:
        need = f"must be {channels} inner channels over {num_heads} heads = {head_dim}"
        raise fields.error(name, need, value)
    return head_dim
