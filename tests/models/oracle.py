"""The recurrences token by token in float64, as plain as they are defined."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def mamba2_steps(
    x: Array, dt: Array, a: Array, b: Array, c: Array, state: Array
) -> tuple[Array, Array]:
    """Returns `y[n, heads, dim]` and the states before and after each token."""
    x, dt, a, b, c, state = (v.astype(np.float64) for v in (x, dt, a, b, c, state))
    heads_per_group = x.shape[1] // b.shape[1]
    ys, states = [], [state]
    for x_t, dt_t, b_t, c_t in zip(x, dt, b, c, strict=True):
        b_h, c_h = (np.repeat(v, heads_per_group, axis=0) for v in (b_t, c_t))
        added = (dt_t[:, None] * x_t)[:, :, None] * b_h[:, None, :]
        state = np.exp(dt_t * a)[:, None, None] * state + added
        ys.append(np.einsum("hps,hs->hp", state, c_h))
        states.append(state)
    return np.array(ys).reshape(x.shape), np.array(states)


def gated_delta_steps(
    q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array
) -> tuple[Array, Array]:
    """Returns `y[n, value_heads, dim]` and the states before and after each token."""
    q, k, v, g, beta, state = (w.astype(np.float64) for w in (q, k, v, g, beta, state))
    heads_per_key = v.shape[1] // k.shape[1]
    ys, states = [], [state]
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        q_h, k_h = (np.repeat(w, heads_per_key, axis=0) for w in (q_t, k_t))
        state = np.exp(g_t)[:, None, None] * state
        known = np.einsum("hkv,hk->hv", state, k_h)
        written = beta_t[:, None] * (v_t - known)
        state = state + k_h[:, :, None] * written[:, None, :]
        ys.append(np.einsum("hkv,hk->hv", state, q_h))
        states.append(state)
    return np.array(ys).reshape(v.shape), np.array(states)


def convolution_steps(
    x: Array, window: Array, weight: Array, bias: Array | None
) -> tuple[Array, Array]:
    """Returns `y[n, units, dim]` and the windows before and after each token."""
    x, window, weight = (v.astype(np.float64) for v in (x, window, weight))
    ys, windows = [], [window]
    for x_t in x:
        taps = np.concatenate([window, x_t[..., None]], axis=-1)
        ys.append((taps * weight).sum(-1) + (0 if bias is None else bias))
        window = taps[..., 1:]
        windows.append(window)
    return np.array(ys).reshape(x.shape), np.array(windows)


def attention_rows(
    queries: Array, keys: Array, values: Array, positions: Array
) -> Array:
    """Attends `[n, units, heads, dim]` to `[length, units, dim]`, causally."""
    queries, keys, values = (v.astype(np.float64) for v in (queries, keys, values))
    out = []
    for query, position in zip(queries, positions, strict=True):
        scores = np.einsum("uhd,tud->uht", query, keys[: position + 1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out.append(np.einsum("uht,tuv->uhv", weights, values[: position + 1]))
    return np.array(out)
