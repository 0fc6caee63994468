"""Checkpoints are read whole and exactly, or refused by what is wrong with them."""

import json
import pathlib
import shutil
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jaxcache.models import load_model, read_config
from jaxcache.models.checkpoint import CheckpointWeights
from tests.models.golden import FOLDER

SOURCE = FOLDER / "bamba"


def weights_of(folder: pathlib.Path) -> Any:
    return nnx.to_flat_state(nnx.state(load_model(folder)))


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of a checkpoint to spoil."""
    shutil.copytree(SOURCE, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def shard(folder: pathlib.Path, **index: Any) -> None:
    """Splits the checkpoint into two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {"a.safetensors": names[:20], "b.safetensors": names[20:]}
    for file, part in files.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map | index})
    )


def edit(folder: pathlib.Path, **tensors: np.ndarray[Any, Any] | None) -> None:
    path = folder / "model.safetensors"
    merged = load_file(path) | tensors
    save_file({n: t for n, t in merged.items() if t is not None}, path)


def test_a_sharded_checkpoint_is_the_same_model(folder: pathlib.Path) -> None:
    shard(folder)
    for (path, one), (_, two) in zip(
        weights_of(folder), weights_of(SOURCE), strict=True
    ):
        np.testing.assert_array_equal(one[...], two[...], err_msg=str(path))


def test_bfloat16_weights_become_the_same_float32(folder: pathlib.Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    halves = {name: t.astype(ml_dtypes.bfloat16) for name, t in tensors.items()}
    save_file(halves, folder / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    read = CheckpointWeights(folder).read(name, 64, 64)
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, halves[name].astype(np.float32))


def test_an_infinite_limit_is_read(folder: pathlib.Path) -> None:
    assert read_config(folder)["time_step_limit"] == [0.0, float("inf")]


def test_a_missing_tensor_is_named(folder: pathlib.Path) -> None:
    edit(folder, **{"model.layers.2.mamba.D": None})
    with pytest.raises(ValueError, match=r"no tensor model\.layers\.2\.mamba\.D"):
        load_model(folder)


def test_a_tensor_of_another_shape_is_named(folder: pathlib.Path) -> None:
    edit(folder, **{"lm_head.weight": np.zeros((256, 63), np.float32)})
    message = r"lm_head\.weight must have shape \(256, 64\), got \(256, 63\)"
    with pytest.raises(ValueError, match=message):
        load_model(folder)


def test_a_tensor_that_no_layer_uses_is_named(folder: pathlib.Path) -> None:
    extra = {"model.layers.0.mamba.extra": np.zeros(2, np.float32)}
    edit(folder, **extra)
    with pytest.raises(ValueError, match=r"does not use: .*mamba\.extra$"):
        load_model(folder)


def test_layers_for_speculation_may_be_there(folder: pathlib.Path) -> None:
    edit(folder, **{"mtp.layers.0.weight": np.zeros(2, np.float32)})
    assert load_model(folder).vocab_size == 256


def test_a_folder_without_a_config_is_refused(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"no file .*config\.json"):
        load_model(tmp_path)


def test_a_config_that_is_no_json_is_refused(folder: pathlib.Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is no JSON"):
        load_model(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, got list"):
        load_model(folder)


def test_a_folder_without_weights_is_refused(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no file .*model\.safetensors"):
        load_model(folder)


def test_weights_of_another_format_are_refused(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x80\x02pickle")
    with pytest.raises(ValueError, match="is no safetensors file"):
        load_model(folder)


def test_an_index_that_promises_too_much_is_refused(folder: pathlib.Path) -> None:
    shard(folder, **{"model.layers.9.norm": "a.safetensors"})
    with pytest.raises(
        ValueError, match=r"a\.safetensors lacks model\.layers\.9\.norm"
    ):
        load_model(folder)


def test_an_index_that_leaves_the_folder_is_refused(folder: pathlib.Path) -> None:
    shard(folder, **{"lm_head.weight": "../secret.safetensors"})
    with pytest.raises(ValueError, match="outside the folder"):
        load_model(folder)
