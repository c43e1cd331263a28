"""The forward of a llama model in float64, written like the papers: the plain twin of every backend's forward.

Slow, and meant to be: it keeps no cells and shares no code with the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .reader import Model

Float64 = NDArray[np.float64]


def reference_logits(model: Model, tokens: Sequence[int]) -> Float64:
    """The logits behind every token of a text: float64 [n, vocab]."""
    g = model.geometry
    cos, sin = (table.astype(np.float64)[:, None] for table in model.rope(len(tokens)))  # [n, 1, rope_dims / 2]
    x = _weights(model, "token_embd")[list(tokens)]  # [n, width]
    for layer in range(g.layers):
        prefix = f"blk.{layer}."
        normed = _rms_norm(x, model.vector(prefix + "attn_norm"), g.rms_eps)
        q, k, v = (
            (normed @ _weights(model, prefix + name).T).reshape(len(tokens), -1, g.head_dim)
            for name in ("attn_q", "attn_k", "attn_v")
        )
        attended = _attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        x = x + attended @ _weights(model, prefix + "attn_output").T
        normed = _rms_norm(x, model.vector(prefix + "ffn_norm"), g.rms_eps)
        gate, up = (normed @ _weights(model, prefix + name).T for name in ("ffn_gate", "ffn_up"))
        x = x + (_silu(gate) * up) @ _weights(model, prefix + "ffn_down").T
    normed = _rms_norm(x, model.vector("output_norm"), g.rms_eps)
    return normed @ _weights(model, "token_embd" if model.tied else "output").T


def _weights(model: Model, name: str) -> Float64:
    return model.matrix(name).dequantize().astype(np.float64)


def _rms_norm(x: Float64, weight: NDArray, eps: float) -> Float64:
    """Zhang and Sennrich, 2019."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def _rotate(x: Float64, cos: Float64, sin: Float64) -> Float64:
    """Rotary embedding of x [n, heads, dim]: adjacent pairs of its leading dimensions (Su et al., 2021)."""
    out, dims = x.copy(), 2 * cos.shape[-1]
    even, odd = x[..., 0:dims:2], x[..., 1:dims:2]
    out[..., 0:dims:2] = even * cos - odd * sin
    out[..., 1:dims:2] = even * sin + odd * cos
    return out


def _attention(q: Float64, k: Float64, v: Float64) -> Float64:
    """Causal attention with grouped queries (Ainslie et al., 2023): [n, heads, dim] -> [n, heads * dim]."""
    n, heads, dim = q.shape
    k, v = (np.repeat(a, heads // a.shape[1], axis=1) for a in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
    scores[:, ~np.tri(n, dtype=bool)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(n, heads * dim)


def _silu(x: Float64) -> Float64:
    return x / (1.0 + np.exp(-x))
