"""Which selection kernel runs a call. No GPU stack is imported here.

Measured on an H200 with normally distributed scores and, where they say so, with all scores equal, which `sample` and
`window` give up on and hand to `wide`. Times of a graph replay with a flushed L2 in us, an empty graph (4.2) included
(docs/benchmarks has all of them, clustered scores among them):

| queries | cells   | wide | sample | window | equal: wide | sample | window |
| ------- | ------- | ---- | ------ | ------ | ----------- | ------ | ------ |
| 256     | 8,192   | 19   | 13     |        | 20          | 12     |        |
| 256     | 16,384  | 22   | 17     |        | 22          | 16     |        |
| 256     | 20,000  | 24   | 20     |        | 24          | 29     |        |
| 256     | 32,768  | 27   | 18     |        | 27          | 29     |        |
| 256     | 65,536  | 37   | 20     |        | 37          | 41     |        |
| 256     | 131,072 | 58   | 23     |        | 57          | 60     |        |
| 256     | 524,288 | 187  | 45     |        | 183         | 189    |        |
| 8       | 8,192   | 16   | 10     | 11     | 16          | 9      | 9      |
| 8       | 16,384  | 17   | 13     | 13     | 17          | 12     | 12     |
| 8       | 20,000  | 18   | 14     | 19     | 18          | 21     | 20     |
| 8       | 32,768  | 18   | 13     | 16     | 19          | 20     | 19     |
| 8       | 65,536  | 24   | 13     | 14     | 24          | 25     | 25     |
| 8       | 131,072 | 35   | 15     | 14     | 35          | 37     | 35     |
| 8       | 524,288 | 96   | 22     | 15     | 100         | 103    | 99     |

Just past 4,096 blocks equal scores cost `sample` a fifth more than `wide`, so `wide` runs from there to 8,192 blocks.
"""

from __future__ import annotations

import os

KERNELS = ("wide", "sample", "window")
MAX_WINDOW = 8  # queries of the largest decode window
KEPT_WHOLE = 4096  # blocks up to which `sample` keeps every block as a candidate
SAMPLED_FROM = 8192  # blocks from which its bound leaves few enough candidates
WINDOW_FROM = 32768  # blocks from which a query is worth more than one block of threads
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
