"""A float64 evaluation of the golden gated delta net, written out in NumPy.

The golden logits were computed in float32 with differences of running sums of decays,
which is where they lose their fourth digit. This says how far they are from the exact
ones, and that the model is closer.
"""

from typing import Any

import numpy as np

from jaxcache.models.checkpoint import CheckpointWeights
from tests.models.driver import Driver
from tests.models.golden import Array, compiled, load_golden
from tests.models.oracle import attention_rows, convolution_steps, gated_delta_steps

KEY_HEADS, VALUE_HEADS, HEADS, KV_HEADS, DIM = 2, 4, 4, 2, 16


def test_logits_are_closer_to_the_exact_ones_than_the_golden_are() -> None:
    golden, driver = load_golden("qwen3_next"), Driver(compiled("qwen3_next"))
    exact = exact_logits(golden.prompt)
    driver.start(0)
    logits = driver.prefill(0, golden.prompt, 150)
    assert 2e-4 < np.abs(golden.logits - exact).max() < 2.4e-4
    assert np.abs(logits - exact).max() < 1e-4


def exact_logits(prompt: Array) -> Any:
    """The whole model over one prompt."""
    hidden = read("model.embed_tokens.weight", 256, 64)[prompt]
    for layer_id in range(4):
        name = f"model.layers.{layer_id}"
        mix = attention if layer_id == 3 else gated_delta
        hidden = hidden + mix(name, normalize(hidden, f"{name}.input_layernorm"))
        inner = normalize(hidden, f"{name}.post_attention_layernorm")
        gate, up = (
            inner @ read(f"{name}.mlp.{leaf}_proj.weight", 128, 64).T
            for leaf in ("gate", "up")
        )
        hidden = (
            hidden + silu(gate) * up @ read(f"{name}.mlp.down_proj.weight", 64, 128).T
        )
    return normalize(hidden, "model.norm") @ read("lm_head.weight", 256, 64).T


def gated_delta(name: str, hidden: Array) -> Any:
    name = f"{name}.linear_attn"
    fused = hidden @ read(f"{name}.in_proj_qkvz.weight", 192, 64).T
    by_head = fused.reshape(-1, KEY_HEADS, 96)
    q, k, v, z = np.split(by_head, (16, 32, 64), axis=-1)
    flat = [part.reshape(len(hidden), -1) for part in (q, k, v)]
    mixed = np.concatenate(flat, axis=-1)[:, None]
    weight = read(f"{name}.conv1d.weight", 128, 1, 4).swapaxes(0, 1)
    mixed = silu(convolution_steps(mixed, np.zeros((1, 128, 3)), weight, None)[0])
    q, k, v = np.split(mixed[:, 0], (32, 64), axis=-1)
    ba = hidden @ read(f"{name}.in_proj_ba.weight", 8, 64).T
    b, a = np.split(ba.reshape(-1, KEY_HEADS, 4), 2, axis=-1)
    step = np.logaddexp(0, a.reshape(-1, VALUE_HEADS) + read(f"{name}.dt_bias", 4))
    y, _ = gated_delta_steps(
        unit(q.reshape(-1, KEY_HEADS, DIM)) * DIM**-0.5,
        unit(k.reshape(-1, KEY_HEADS, DIM)),
        v.reshape(-1, VALUE_HEADS, DIM),
        -np.exp(read(f"{name}.A_log", 4)) * step,
        1 / (1 + np.exp(-b.reshape(-1, VALUE_HEADS))),
        np.zeros((VALUE_HEADS, DIM, DIM)),
    )
    y = y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6)
    y = y * read(f"{name}.norm.weight", DIM) * silu(z.reshape(y.shape))
    return y.reshape(len(y), -1) @ read(f"{name}.out_proj.weight", 64, 64).T


def attention(name: str, hidden: Array) -> Any:
    name = f"{name}.self_attn"
    fused = hidden @ read(f"{name}.q_proj.weight", 128, 64).T
    q, gate = np.split(fused.reshape(-1, HEADS, 2 * DIM), 2, axis=-1)
    k, v = (
        (hidden @ read(f"{name}.{leaf}_proj.weight", 32, 64).T).reshape(
            -1, KV_HEADS, DIM
        )
        for leaf in ("k", "v")
    )
    q, k = (
        rotate(normalize(q, f"{name}.q_norm")),
        rotate(normalize(k, f"{name}.k_norm")),
    )
    queries = q.reshape(-1, KV_HEADS, HEADS // KV_HEADS, DIM) * DIM**-0.5
    y = attention_rows(queries, k, v, np.arange(len(q))).reshape(gate.shape)
    y = y / (1 + np.exp(-gate))
    return y.reshape(len(y), -1) @ read(f"{name}.o_proj.weight", 64, 64).T


def rotate(x: Array) -> Any:
    """Rotates the first quarter of each head."""
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(0, 4, 2) / 4)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high, rest = x[..., :2], x[..., 2:4], x[..., 4:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin, rest], -1)


def normalize(x: Array, name: str) -> Any:
    root = np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return x / root * (1 + read(f"{name}.weight", x.shape[-1]))


def unit(x: Array) -> Any:
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def silu(x: Array) -> Any:
    return x / (1 + np.exp(-x))


def read(name: str, *shape: int) -> Array:
    weights = CheckpointWeights(load_golden("qwen3_next").folder)
    return weights.read(name, *shape).astype(np.float64)
