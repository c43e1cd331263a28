"""The shape of a model, read from GGUF metadata, and its rotary table."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..rows import Float32


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions are stretched: `kind` is none, linear or yarn (Peng et al., 2023)."""

    kind: str = "none"
    factor: float = 1.0
    attention_factor: float = 1.0
    original_context: int = 0


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a llama model. q has heads * head_dim outputs, k and v have kv_heads * head_dim."""

    arch: str
    vocab: int
    layers: int
    width: int  # embedding length
    ff: int  # feed-forward length
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int  # trained context
    rms_eps: float
    rope_base: float
    rope_dims: int  # leading dimensions of a head that are rotated, in adjacent pairs
    rope_scaling: RopeScaling = RopeScaling()

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def rope_table(geometry: Geometry, positions: int, factors: Float32 | None = None) -> tuple[Float32, Float32]:
    """Cosine and sine of every rotation: two float32 [positions, rope_dims / 2].

    Dimensions 2i and 2i + 1 of a head turn by position * base^(-2i / rope_dims), divided by `factors[i]` (Llama 3's
    rope_freqs tensor) and scaled as `geometry.rope_scaling` says.
    """
    half = geometry.rope_dims // 2
    frequency = geometry.rope_base ** (-2.0 * np.arange(half) / geometry.rope_dims)
    if factors is not None:
        frequency = frequency / factors.astype(np.float64)
    scaling, magnitude = geometry.rope_scaling, geometry.rope_scaling.attention_factor
    if scaling.kind == "linear":
        frequency = frequency / scaling.factor
    elif scaling.kind == "yarn":
        keep = _yarn_ramp(geometry, half)
        frequency = frequency / scaling.factor * (1.0 - keep) + frequency * keep
        magnitude *= 1.0 + 0.1 * math.log(scaling.factor)
    angle = np.arange(positions, dtype=np.float64)[:, None] * frequency
    return (np.cos(angle) * magnitude).astype(np.float32), (np.sin(angle) * magnitude).astype(np.float32)


def _yarn_ramp(geometry: Geometry, half: int) -> np.ndarray:
    """1 for the fast dimensions, which keep their frequency, 0 for the slow ones, a ramp between (YaRN, eq. 23)."""

    def dimension(rotations: float) -> float:
        context = geometry.rope_scaling.original_context or geometry.context_length
        return geometry.rope_dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(geometry.rope_base))

    low = max(0.0, math.floor(dimension(32.0)))
    high = min(geometry.rope_dims - 1.0, math.ceil(dimension(1.0)))
    return 1.0 - np.clip((np.arange(half) - low) / max(0.001, high - low), 0.0, 1.0)
