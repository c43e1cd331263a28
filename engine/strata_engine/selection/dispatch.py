"""Which selection kernel runs a call. No GPU stack is imported here.

Measured on an H200 with normally distributed scores, times of a graph replay with a flushed L2 in us, an empty graph
(4.3) included (docs/benchmarks has all of them):

| queries | cells   | wide | sample | window |
| ------- | ------- | ---- | ------ | ------ |
| 256     | 8,192   | 19   | 13     |        |
| 256     | 16,384  | 22   | 17     |        |
| 256     | 32,768  | 28   | 26     |        |
| 256     | 65,536  | 39   | 54     |        |
| 256     | 131,072 | 62   | 25     |        |
| 256     | 524,288 | 189  | 47     |        |
| 8       | 8,192   | 16   | 11     | 11     |
| 8       | 16,384  | 17   | 13     | 13     |
| 8       | 32,768  | 19   | 18     | 23     |
| 8       | 65,536  | 25   | 31     | 36     |
| 8       | 131,072 | 37   | 17     | 19     |
| 8       | 262,144 | 60   | 20     | 19     |
| 8       | 524,288 | 100  | 27     | 20     |

Between 16,384 and 131,072 cells so large a part of the blocks is selected that the bound of `sample` keeps thousands of
candidates, and equal scores overflow them (up to twice the time of `wide`), so `wide` runs there.
"""

from __future__ import annotations

import os

KERNELS = ("wide", "sample", "window")
MAX_WINDOW = 8  # queries of the largest decode window
KEPT_WHOLE = 4096  # blocks up to which `sample` keeps every block as a candidate
SAMPLED_FROM = 32768  # blocks from which its bound leaves few candidates
WINDOW_FROM = 65536  # blocks from which a query is worth more than one block of threads
MAX_SAMPLED = 1 << 18  # blocks of a row that is sampled; past it the bound would be too loose


def choose(queries: int, active_blocks: int, capacity: int) -> str:
    """The kernel for `queries` queries over contexts of up to `active_blocks` of `capacity` blocks.

    Any kernel gives the same ids for any call; this picks the fastest. `STRATA_TOPK_SAMPLE=0` keeps `wide` for
    prompt calls.
    """
    blocks = min(active_blocks, capacity)
    if queries <= MAX_WINDOW and blocks >= WINDOW_FROM:
        return "window"
    if queries > MAX_WINDOW and os.environ.get("STRATA_TOPK_SAMPLE") == "0":
        return "wide"
    return "sample" if blocks <= KEPT_WHOLE or SAMPLED_FROM <= blocks <= MAX_SAMPLED else "wide"
