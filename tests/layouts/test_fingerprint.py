"""Fingerprints: equal where peers can exchange slots, different where they cannot."""

import dataclasses
import hashlib
import subprocess
import sys

import pytest

from jaxcache.layouts import (
    BufferSpec,
    CacheLayout,
    FullAttention,
    Layer,
    LayerKind,
    Mamba2,
    ModelLayout,
    SlidingWindowAttention,
)

WINDOW = SlidingWindowAttention(2, 16, window=64, sink_tokens=4)
ATTENTION = FullAttention(2, 16)
MAMBA = Mamba2(8, 16, 2, 32, 4)


def model_of(
    window: LayerKind = WINDOW,
    attention: LayerKind = ATTENTION,
    mamba: LayerKind = MAMBA,
    name: str = "m",
) -> ModelLayout:
    layers = (Layer(0, mamba), Layer(1, window), Layer(2, attention), Layer(3, mamba))
    return ModelLayout(name, layers)


MODEL = model_of()
FINGERPRINT = CacheLayout(MODEL).fingerprint


def test_peers_of_any_tensor_parallelism_agree() -> None:
    for num_shards in (1, 2, 4, 8, 16):
        assert CacheLayout(MODEL, num_shards=num_shards).fingerprint == FINGERPRINT


def test_pipeline_stages_agree_with_their_model() -> None:
    for stage in ([0], [1, 2], [3]):
        assert CacheLayout(MODEL.select(stage)).fingerprint == FINGERPRINT


def test_equal_layouts_agree_whatever_the_order_of_declaration() -> None:
    backwards = ModelLayout("m", MODEL.layers[::-1])
    assert CacheLayout(backwards).fingerprint == FINGERPRINT


def test_other_processes_agree() -> None:
    script = (
        "from jaxcache.layouts import *\n"
        "mamba = Mamba2(8, 16, 2, 32, 4)\n"
        "window = SlidingWindowAttention(2, 16, window=64, sink_tokens=4)\n"
        "layers = (Layer(0, mamba), Layer(1, window), Layer(2, FullAttention(2, 16)),\n"
        "    Layer(3, mamba))\n"
        "print(CacheLayout(ModelLayout('m', layers)).fingerprint)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == FINGERPRINT


def test_the_fingerprint_is_the_hash_of_this_text() -> None:
    # Peers of different releases compare it, so a change of the text is a change of
    # `CONVENTIONS`, and stops them from exchanging slots.
    window = SlidingWindowAttention(2, 8, window=64, sink_tokens=4)
    layers = (Layer(1, Mamba2(4, 8, 2, 3, 4)), Layer(2, window), Layer(6, ATTENTION))
    text = (
        '{"conventions":1,"layers":['
        '{"buffers":[["conv_x",4,[8,3],"bfloat16"],["conv_b",2,[3,3],"bfloat16"],'
        '["conv_c",2,[3,3],"bfloat16"],["ssm",4,[8,3],"float32"]],'
        '"layer_id":1,"retention":["recurrent"]},'
        '{"buffers":[["key",2,[16,8],"bfloat16"],["value",2,[16,8],"bfloat16"]],'
        '"layer_id":2,"retention":["window",64,4]},'
        '{"buffers":[["key",2,[16,16],"bfloat16"],["value",2,[16,16],"bfloat16"]],'
        '"layer_id":6,"retention":["full"]}],'
        '"model":"m","order":"units","tokens_per_page":16}'
    )
    want = hashlib.sha256(text.encode()).hexdigest()
    assert CacheLayout(ModelLayout("m", layers)).fingerprint == want


DIFFERENT = {
    "tokens per page": CacheLayout(MODEL, tokens_per_page=32),
    "order": CacheLayout(MODEL, order="buffers"),
    "model name": CacheLayout(model_of(name="n")),
    "window": CacheLayout(model_of(window=dataclasses.replace(WINDOW, window=65))),
    "sinks": CacheLayout(model_of(window=dataclasses.replace(WINDOW, sink_tokens=5))),
    "no window": CacheLayout(model_of(window=ATTENTION)),
    "key dtype": CacheLayout(model_of(attention=FullAttention(2, 16, dtype="float16"))),
    "kv heads": CacheLayout(model_of(attention=FullAttention(4, 16))),
    "head dim": CacheLayout(model_of(attention=FullAttention(2, 32))),
    "value head dim": CacheLayout(model_of(attention=FullAttention(2, 16, 32))),
    "scales": CacheLayout(
        model_of(
            attention=FullAttention(
                2, 16, extra=(BufferSpec("key_scale", 2, (), "float32"),)
            )
        )
    ),
    "state dtype": CacheLayout(
        model_of(mamba=dataclasses.replace(MAMBA, ssm_dtype="bfloat16"))
    ),
    "conv dtype": CacheLayout(
        model_of(mamba=dataclasses.replace(MAMBA, conv_dtype="float32"))
    ),
    "kernel": CacheLayout(model_of(mamba=dataclasses.replace(MAMBA, conv_kernel=5))),
    "groups": CacheLayout(model_of(mamba=dataclasses.replace(MAMBA, num_groups=4))),
    "replay history": CacheLayout(
        model_of(
            mamba=dataclasses.replace(
                MAMBA, extra=(BufferSpec("replay_x", 8, (2, 16, 16), "bfloat16"),)
            )
        )
    ),
    "layer ids": CacheLayout(
        ModelLayout("m", (*MODEL.layers[:-1], Layer(4, MODEL.layers[-1].kind)))
    ),
    "fewer layers": CacheLayout(ModelLayout("m", MODEL.layers[:-1])),
    "more layers": CacheLayout(ModelLayout("m", (*MODEL.layers, Layer(9, ATTENTION)))),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_peers_that_differ_in_what_a_slot_means_do_not_agree(what: str) -> None:
    assert DIFFERENT[what].fingerprint != FINGERPRINT


def test_all_differences_are_told_apart() -> None:
    assert len({layout.fingerprint for layout in DIFFERENT.values()}) == len(DIFFERENT)


def test_a_layer_that_is_only_on_one_side_leaves_the_others_comparable() -> None:
    drafted = ModelLayout("m", (*MODEL.layers, Layer(9, ATTENTION)))
    here, there = CacheLayout(MODEL), CacheLayout(drafted, num_shards=4)
    assert here.fingerprint != there.fingerprint
    for layer_id in MODEL.layer_ids:
        same = here.layer_fingerprint(layer_id)
        assert same == there.layer_fingerprint(layer_id)
    assert len({here.layer_fingerprint(i) for i in MODEL.layer_ids}) == 4


def test_the_fingerprint_of_a_layer_sees_its_own_changes_only() -> None:
    changed = CacheLayout(model_of(attention=FullAttention(2, 16, dtype="float16")))
    here = CacheLayout(MODEL)
    differ = [
        layer_id
        for layer_id in MODEL.layer_ids
        if here.layer_fingerprint(layer_id) != changed.layer_fingerprint(layer_id)
    ]
    assert differ == [2]
