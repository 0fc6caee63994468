"""The architectures there are models for, and how to get one."""

import pathlib
from collections.abc import Mapping
from typing import Protocol

from jax.sharding import Mesh

from jaxcache.layouts.arguments import boolean, check_kind, integer
from jaxcache.models.bamba import build_bamba
from jaxcache.models.checkpoint import (
    CONFIG_FILE,
    CheckpointWeights,
    Config,
    RandomWeights,
    Weights,
)
from jaxcache.models.chunks import DEFAULT_CHUNK_SIZE
from jaxcache.models.hybrid import HybridModel
from jaxcache.models.nemotron_h import build_nemotron_h
from jaxcache.models.parameters import place_model
from jaxcache.models.qwen3_next import build_qwen3_next
from jaxcache.models.settings import ConfigError


class Builder(Protocol):
    """What builds the model of one architecture."""

    def __call__(
        self,
        config: Config,
        weights: Weights,
        *,
        chunk_size: int,
        match_transformers: bool,
    ) -> HybridModel:
        """Builds the model from its config and its tensors."""
        ...


_BUILDERS: dict[str, Builder] = {
    "bamba": build_bamba,
    "nemotron_h": build_nemotron_h,
    "qwen3_next": build_qwen3_next,
}

# Tensors that a checkpoint may hold though no model here uses them: extra layers for
# speculation, and buffers that older versions of transformers saved.
_IGNORED = (r"mtp\.", r".*\.rotary_emb\.inv_freq$", r"lm_head\.weight$")

ARCHITECTURES = tuple(_BUILDERS)
"""Names (`model_type` of a Hugging Face config) that there is a model for."""


def load_model(
    folder: str | pathlib.Path,
    *,
    mesh: Mesh | None = None,
    tensor_axis: str = "tensor",
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    match_transformers: bool = False,
) -> HybridModel:
    """Loads a Hugging Face checkpoint.

    Args:
        folder: A folder with config.json and safetensors files. Weights of any float
            type become float32, which is what the model computes in.
        mesh: A mesh to split the weights over; None for the default device.
        tensor_axis: The axis of the mesh that splits heads.
        chunk_size: Tokens a chunk of the recurrent scans holds, a power of two.
        match_transformers: Whether to compute what transformers 5.24 computes on a CPU
            even where it treats the same token differently in prefill and in decode
            (see the architectures). Then a state depends on how its tokens came, and
            reuse is no longer exact: for comparisons only.

    Raises:
        ValueError: if there is no model for the architecture, or if the config or the
            tensors are not those of one; a wrong field is named with its file.
    """
    boolean("match_transformers", match_transformers)
    weights = CheckpointWeights(folder)
    try:
        model = _builder(weights.config)(
            weights.config,
            weights,
            chunk_size=chunk_size,
            match_transformers=match_transformers,
        )
    except ConfigError as error:
        raise ValueError(f"{pathlib.Path(folder) / CONFIG_FILE}: {error}") from error
    weights.check_all_read(*_IGNORED)
    place_model(model, mesh, tensor_axis)
    return model


def random_model(
    config: Config,
    seed: int = 0,
    *,
    mesh: Mesh | None = None,
    tensor_axis: str = "tensor",
    chunk_size: int = DEFAULT_CHUNK_SIZE,
) -> HybridModel:
    """Builds a model with weights drawn from a seed, the same every time.

    Args:
        config: What a config.json would hold, for example `TINY_CONFIG`.
        seed: Another seed is another model.
        mesh: A mesh to split the weights over; None for the default device.
        tensor_axis: The axis of the mesh that splits heads.
        chunk_size: Tokens a chunk of the recurrent scans holds, a power of two.

    Raises:
        ValueError: if there is no model for the architecture, or if the config is not
            that of one.
    """
    build = _builder(config)
    seed = integer("seed", seed, 0)
    weights = RandomWeights(seed, centred_norms=build is build_qwen3_next)
    model = build(config, weights, chunk_size=chunk_size, match_transformers=False)
    place_model(model, mesh, tensor_axis)
    return model


def _builder(config: Config) -> Builder:
    check_kind("config", config, Mapping)
    name = config.get("model_type")
    if not isinstance(name, str) or name not in _BUILDERS:
        raise ConfigError(
            f"model_type must be one of {', '.join(ARCHITECTURES)}, got {name!r}"
        )
    return _BUILDERS[name]


TINY_CONFIG: Config = {
    "model_type": "nemotron_h",
    "dtype": "float32",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "layers_block_type": [
        "linear_attention",
        "mlp",
        "full_attention",
        "linear_attention",
        "mlp",
        "full_attention",
    ],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "conv_kernel": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
"""A hybrid over bytes that steps in milliseconds on a CPU."""
