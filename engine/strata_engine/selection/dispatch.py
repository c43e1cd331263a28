"""Which selection kernel runs a call. No GPU stack is imported here.

Measured on an H200, times of a graph replay with a flushed L2 in us, an empty graph (4.4) included:

| queries | cells   | wide | sample | window |
| ------- | ------- | ---- | ------ | ------ |
| 256     | 8,192   | 28   | 18     |        |
| 256     | 131,072 | 90   | 37     |        |
| 256     | 524,288 | 264  | 58     |        |
| 8       | 8,192   | 19   | 13     | 12     |
| 8       | 32,768  | 25   | 23     | 26     |
| 8       | 131,072 | 52   | 26     | 23     |
| 8       | 524,288 | 137  | 37     | 25     |
"""

from __future__ import annotations

import os

KERNELS = ("wide", "sample", "window")
MAX_WINDOW = 8  # queries of the largest decode window
WINDOW_FROM = 16384  # blocks from which a query is worth more than one block of threads
MAX_SAMPLED = 1 << 18  # blocks of a row that is sampled; past it the bound would be too loose


def choose(queries: int, active_blocks: int, capacity: int) -> str:
    """The kernel for `queries` queries over contexts of up to `active_blocks` of `capacity` blocks.

    Any kernel gives the same ids for any call; this picks the fastest. `STRATA_TOPK_SAMPLE=0` keeps `wide` for
    prompt calls.
    """
    blocks = min(active_blocks, capacity)
    if queries <= MAX_WINDOW:
        return "window" if blocks >= WINDOW_FROM else "sample"
    if os.environ.get("STRATA_TOPK_SAMPLE") == "0" or blocks > MAX_SAMPLED:
        return "wide"
    return "sample"
