"""Score sets that are hard in different ways, for tests and benchmarks."""

from __future__ import annotations

import numpy as np

from .reference import BLOCK, TAIL_BONUS, Float32

KINDS = ("normal", "relu", "levels", "equal", "adversarial", "cluster", "ascending", "descending")


def make(kind: str, count: int, seed: int) -> Float32:
    """`count` scores of one kind, float32; the same seed gives the same scores.

    normal; relu (half are zero); levels (64 or so distinct values); equal; adversarial (NaN, both zeros, inf);
    cluster (all within 1e-3 of 3); ascending; descending. Raises ValueError for another kind.
    """
    if kind == "equal":
        return np.full(count, 0.25, dtype=np.float32)
    s = np.random.RandomState(seed).standard_normal(count).astype(np.float32)
    if kind == "relu":
        return np.maximum(s, np.float32(0))
    if kind == "levels":
        return np.floor(s * np.float32(16)) / np.float32(16)
    if kind == "adversarial":
        s[::97], s[1::3], s[2::3], s[5::1001] = np.nan, 0.0, -0.0, np.inf
        return s
    if kind == "cluster":
        return s * np.float32(1e-4) + np.float32(3.0)
    if kind in ("ascending", "descending"):
        return np.sort(s) if kind == "ascending" else np.sort(s)[::-1].copy()
    if kind == "normal":
        return s
    raise ValueError(f"unknown kind of scores {kind!r}, expected one of {', '.join(KINDS)}")


def make_row(kind: str, cells: int, seed: int) -> Float32:
    """Scores of a query that sees `cells` cells, float32 [cells // 4 + 1], its tail block already raised."""
    s = make(kind, cells // BLOCK + 1, seed)
    if cells % BLOCK:
        s[-1] = s[-1] + TAIL_BONUS if np.isfinite(s[-1]) else TAIL_BONUS
    return s
