"""Weights by their Hugging Face names: from a checkpoint folder, or drawn at random."""

import functools
import json
import os
import pathlib
import re
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from safetensors import safe_open

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

Config = Mapping[str, Any]


class Weights(Protocol):
    """Where a model takes its weights from when it is built."""

    def read(self, name: str, *shape: int) -> np.ndarray[Any, Any]:
        """Returns the tensor `name` as float32, checked to have this shape."""
        ...


class CheckpointWeights:
    """The tensors of a folder of safetensors files, one file or many with an index.

    Attributes:
        config: The parsed config.json.
    """

    def __init__(self, folder: str | pathlib.Path) -> None:
        """Reads the config; the files of tensors are opened at the first tensor.

        Args:
            folder: A folder with config.json and model.safetensors, or with
                model.safetensors.index.json and the files that it names.

        Raises:
            ValueError: if the config is missing or is not what its name says.
        """
        self._folder = _folder(folder)
        self.config: Config = read_config(self._folder)
        self._files: dict[str, Any] = {}
        self._read: set[str] = set()

    @functools.cached_property
    def _file_of(self) -> dict[str, str]:
        """The file that each tensor is in."""
        index = self._folder / INDEX_FILE
        if not index.is_file():
            return dict.fromkeys(self._open(WEIGHTS_FILE).keys(), WEIGHTS_FILE)
        file_of = read_json(index).get("weight_map", {})
        if not isinstance(file_of, dict) or not all(
            isinstance(file, str) for file in file_of.values()
        ):
            raise ValueError(f"weight_map of {index} must name a file for each tensor")
        for file in sorted(set(file_of.values())):
            if pathlib.PurePath(file).name != file:
                raise ValueError(f"{index} names a file outside the folder: {file}")
            there = set(self._open(file).keys())
            missing = {name for name, at in file_of.items() if at == file} - there
            if missing:
                raise ValueError(
                    f"{self._folder / file} lacks {min(missing)}, which the index "
                    "says it holds"
                )
        return file_of

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self._folder / file
            if not path.is_file():
                raise ValueError(f"the checkpoint has no file {path}")
            try:
                self._files[file] = safe_open(path, framework="np")
            except Exception as error:  # safetensors has its own class, not exported
                raise ValueError(f"{path} is no safetensors file: {error}") from error
        return self._files[file]

    def read(self, name: str, *shape: int) -> np.ndarray[Any, Any]:
        """Returns the tensor `name` as float32.

        Raises:
            ValueError: if the tensor is missing or its shape is another one.
        """
        if name not in self._file_of:
            raise ValueError(f"the checkpoint {self._folder} has no tensor {name}")
        tensor = self._open(self._file_of[name]).get_tensor(name)
        if tensor.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tensor.shape}")
        self._read.add(name)
        return np.asarray(tensor, np.float32)

    def check_all_read(self, *ignored: str) -> None:
        """Checks that the model used every tensor: an unused one means a wrong model.

        Args:
            *ignored: Regular expressions of names that may stay unread.

        Raises:
            ValueError: naming one tensor that no part of the model asked for.
        """
        pattern = re.compile("|".join(ignored) or r"(?!)")
        unread = self._file_of.keys() - self._read
        left = sorted(name for name in unread if not pattern.match(name))
        if left:
            raise ValueError(
                f"the checkpoint {self._folder} has tensors that the model does not "
                f"use: {left[0]}" + (f" and {len(left) - 1} more" if left[1:] else "")
            )


class RandomWeights:
    """Weights drawn from a seed: each by its name, whatever the order of reading.

    The scales keep activations of order one through any number of layers and spread
    the logits, so that the best token is rarely a near tie.
    """

    def __init__(self, seed: int, *, centred_norms: bool = False) -> None:
        """Prepares the draws.

        Args:
            seed: Any integer of 32 bits; another seed is another model.
            centred_norms: Whether the model's norms multiply by `1 + weight`.
        """
        self._seed = seed
        self._norm_mean = 0.0 if centred_norms else 1.0

    def read(self, name: str, *shape: int) -> np.ndarray[Any, Any]:
        """Draws the tensor `name`."""
        rng = np.random.default_rng((self._seed, zlib.crc32(name.encode())))
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        return np.asarray(self._draw(rng, leaf, shape), np.float32)

    def _draw(self, rng: np.random.Generator, leaf: str, shape: tuple[int, ...]) -> Any:
        if leaf == "A_log":
            return np.log(rng.uniform(1.0, 16.0, shape))
        if leaf == "dt_bias":
            # softplus(dt_bias) between 1e-3 and 1e-1, evenly on a log scale.
            dt = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), shape))
            return dt + np.log(-np.expm1(-dt))
        if leaf == "D":
            return np.ones(shape)
        normal = rng.standard_normal(shape)
        if "norm" in leaf:
            return self._norm_mean + 0.1 * normal
        if leaf.startswith("embed"):
            return normal
        if leaf == "bias":
            return 0.1 * normal
        if leaf == "lm_head":
            return 4.0 * normal / np.sqrt(shape[-1])
        return normal / np.sqrt(np.prod(shape[1:]))


def read_config(folder: str | pathlib.Path) -> Config:
    """Reads config.json of a checkpoint folder.

    Raises:
        ValueError: if there is none or it is no JSON object.
    """
    return read_json(_folder(folder) / CONFIG_FILE)


def _folder(folder: object) -> pathlib.Path:
    if not isinstance(folder, str | os.PathLike):
        raise ValueError(f"folder must be a path, got {folder!r}")
    return pathlib.Path(folder)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
        ValueError: naming the file, if it is missing or holds something else.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    try:
        value = json.loads(path.read_text(), object_hook=_json_object)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _json_object(value: dict[str, Any]) -> Any:
    """Understands the spelling of infinities that transformers 5 writes."""
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    return value
