"""Hugging Face configs: the layers of a hybrid model from its `config.json`.

Types: keys, values, latents and convolution inputs take the config's `dtype`
(`torch_dtype`), bfloat16 where it is null. The recurrent state is float32, unless the
config has a type for it: rounding the state at every token adds up.
"""

import os
from collections.abc import Mapping
from typing import Any

from jaxcache.layouts.hf_architectures import READERS
from jaxcache.layouts.hf_fields import Fields, load_config
from jaxcache.layouts.hf_kinds import Dtypes
from jaxcache.layouts.model import Layer
from jaxcache.layouts.roles import check_dtype

DEFAULT_DTYPE = "bfloat16"
DEFAULT_STATE_DTYPE = "float32"


def read_hf_config(
    config: Mapping[str, Any] | str | os.PathLike[str],
    dtype: str | None,
    state_dtype: str | None,
) -> tuple[str, tuple[Layer, ...]]:
    """Returns the `model_type` of a config and the layers that keep something.

    Raises:
        ValueError: if the architecture is unknown, or a field is missing or wrong.
    """
    values = load_config(config)
    architecture = values.get("model_type")
    reader = READERS.get(architecture) if isinstance(architecture, str) else None
    if reader is None:
        raise ValueError(
            f"model_type must be one of {', '.join(READERS)}, got {architecture!r}; "
            "for another architecture declare the layers by hand, for example "
            "ModelLayout('mine', (Layer(0, FullAttention(kv_heads=8, head_dim=128)), "
            "Layer(1, Mamba2(num_heads=64, head_dim=64, num_groups=8, state_dim=128, "
            "conv_kernel=4))))"
        )
    fields = Fields(str(architecture), values)
    if dtype is not None:
        check_dtype("dtype", dtype)
    if state_dtype is not None:
        check_dtype("state_dtype", state_dtype)
    dtypes = Dtypes(
        dtype or fields.dtype("dtype", "torch_dtype") or DEFAULT_DTYPE,
        state_dtype
        or fields.dtype("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
        or DEFAULT_STATE_DTYPE,
    )
    kinds = reader(fields, dtypes)
    layers = tuple(Layer(i, kind) for i, layer in enumerate(kinds) for kind in layer)
    return fields.architecture, layers
