"""What the demo serves: which conversations, which model, on which devices."""

import dataclasses
import os
import pathlib
from collections.abc import Sequence

import jax

from jaxcache.demo.conversations import (
    BadInput,
    Conversation,
    from_documentation,
    from_jsonl,
    from_texts,
)
from jaxcache.demo.tokens import ByteTokens, Tokens, checkpoint_tokens
from jaxcache.engine import ModelStep
from jaxcache.models import TINY_CONFIG, load_model, random_model
from jaxcache.models.checkpoint import read_json

CONFIG_FILES = ("generation_config.json", "config.json")


@dataclasses.dataclass(frozen=True)
class Speaker:
    """A model and how to speak to it.

    Attributes:
        step: The model's compiled steps; those who share them share compilations.
        tokens: Turns text into its tokens.
        eos_ids: Tokens that end an answer.
        description: One line for the user.
    """

    step: ModelStep
    tokens: Tokens
    eos_ids: frozenset[int]
    description: str


def choose_conversations(
    jsonl: pathlib.Path | None, texts: Sequence[pathlib.Path], limit: int | None
) -> list[Conversation]:
    """The conversations from a file, about texts, or about the documentation.

    Raises:
        BadInput: if both are given, or what is given cannot be used.
    """
    if jsonl is not None and texts:
        raise BadInput("give either --conversations or --text, not both")
    if jsonl is not None:
        conversations = from_jsonl(jsonl)
    elif texts:
        conversations = from_texts(texts)
    else:
        conversations = from_documentation()
    return conversations[:limit]


def random_speaker(seed: int, mesh: jax.sharding.Mesh | None) -> Speaker:
    """A tiny model that needs no download: the same one for the same seed."""
    return Speaker(
        step=ModelStep(random_model(TINY_CONFIG, seed, mesh=mesh), mesh=mesh),
        tokens=ByteTokens(),
        eos_ids=frozenset(),
        description=f"a tiny random model (seed {seed}), bytes as tokens",
    )


def checkpoint_speaker(
    checkpoint: pathlib.Path, mesh: jax.sharding.Mesh | None
) -> Speaker:
    """The model, tokenizer and end tokens of a folder with Hugging Face files.

    Raises:
        BadInput: if the folder holds no model that this library has, or no tokens.
    """
    if not checkpoint.is_dir():
        raise BadInput(f"{checkpoint} is not a folder")
    try:
        model = load_model(checkpoint, mesh=mesh)
    except ValueError as error:
        raise BadInput(f"cannot load {checkpoint}: {error}") from error
    tokens = checkpoint_tokens(checkpoint, model.vocab_size)
    how = "bytes as tokens, since it has no tokenizer.json"
    if not isinstance(tokens, ByteTokens):
        how = "its own tokenizer"
    return Speaker(
        step=ModelStep(model, mesh=mesh),
        tokens=tokens,
        eos_ids=_end_tokens(checkpoint),
        description=f"{checkpoint}, {how}",
    )


def tensor_mesh(num_devices: int) -> jax.sharding.Mesh | None:
    """A mesh to split the model over; None for one device.

    On CPU the devices are made, which works only before JAX has started.

    Raises:
        BadInput: if there are fewer devices.
    """
    if num_devices == 1:
        return None
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", num_devices)
        except RuntimeError:
            pass  # JAX has started; what it has is counted below.
    devices = jax.devices()
    if len(devices) < num_devices:
        raise BadInput(
            f"--tensor-parallel {num_devices} needs as many devices, JAX has "
            f"{len(devices)} ({devices[0].platform})"
        )
    return jax.sharding.Mesh(devices[:num_devices], ("tensor",))


def _end_tokens(checkpoint: pathlib.Path) -> frozenset[int]:
    """The end-of-sequence ids that the checkpoint names."""
    for name in CONFIG_FILES:
        path = checkpoint / name
        if path.exists():
            try:
                ids = read_json(path).get("eos_token_id")
            except ValueError as error:
                raise BadInput(str(error)) from error
            ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
            if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
                raise BadInput(f"eos_token_id of {path} must be integers, got {ids}")
            if ids:
                return frozenset(ids)
    return frozenset()
