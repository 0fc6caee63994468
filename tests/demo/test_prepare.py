"""What a checkpoint says of its end tokens is what ends an answer."""

import json
import pathlib
import shutil

import pytest

from jaxcache.demo.prepare import checkpoint_speaker, random_speaker, tensor_mesh

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "hf_golden"


@pytest.mark.parametrize(
    ("generation", "eos_ids"),
    [(None, {2}), ({"eos_token_id": [5, 7]}, {5, 7}), ({}, {2})],
)
def test_end_tokens_come_from_the_generation_config_or_the_config(
    tmp_path: pathlib.Path, generation: dict[str, object] | None, eos_ids: set[int]
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / "nemotron_h", folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    speaker = checkpoint_speaker(folder, None)
    assert speaker.eos_ids == eos_ids
    assert speaker.description == (
        f"{folder}, bytes as tokens, since it has no tokenizer.json"
    )


def test_the_random_model_never_ends_early() -> None:
    assert random_speaker(3, None).eos_ids == frozenset()


def test_one_device_needs_no_mesh() -> None:
    assert tensor_mesh(1) is None
    mesh = tensor_mesh(2)
    assert mesh is not None
    assert dict(mesh.shape) == {"tensor": 2}
