"""Which selection kernel runs a call."""

from __future__ import annotations

import os

from .steps import CANDIDATES, MAX_BLOCKS

MAX_WINDOW = 8  # queries of the largest decode window

KERNELS = ("wide", "sample", "window")


def choose(queries: int, active_blocks: int, capacity: int) -> str:
    """The kernel for `queries` queries over contexts of up to `active_blocks` of `capacity` blocks.

    Any kernel gives the same ids for any call; this picks the fastest. `STRATA_TOPK_SAMPLE=0` keeps `wide` for
    prompt calls.
    """
    blocks = min(active_blocks, capacity)
    if queries <= MAX_WINDOW:
        return "window" if blocks > 4 * CANDIDATES else "sample"
    if os.environ.get("STRATA_TOPK_SAMPLE") == "0" or blocks > MAX_BLOCKS:
        return "wide"
    return "sample"
