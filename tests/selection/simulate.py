"""Run one selection kernel in numba's simulator over small cases, all in one launch; prints a JSON line a case.

    NUMBA_ENABLE_CUDASIM=1 python simulate.py wide|sample|window KIND,CELLS,WIDTH,TAIL ...

TAIL is the score of the tail block before it is raised. In the simulator blocks have 64 threads and room for 256
candidates, so small contexts cross every bound.
"""

import json
import sys

import numpy as np

from strata_engine.selection import reference, sample, scores, steps, wide
from strata_engine.selection.ptx import SIMULATED, THREADS

CAP, ACTIVE, UNTOUCHED = 520, 9101, -7  # of a row of ids; blocks that hold scores; a slot of ids
PAST = np.float32(3e38)  # fills a row past its last block; it would win


class Guarded:
    """A row of scores of which nothing past the last block may be read."""

    def __init__(self, row):
        self.row = row

    def __len__(self):
        return len(self.row)

    def __getitem__(self, i):
        if self.row[i] == PAST:
            raise IndexError(f"score {i} is past the last block")
        return self.row[i]


def settled(row):
    return Guarded(row) if row.dtype == np.float32 else row


def kept(blocks):
    """Scores of which 25 reach the bound for 103 cells.

    Of 128 blocks the first 16 are in the sample; its ten largest decide, five for each of two warps.
    """
    s = np.zeros(blocks, dtype=np.float32)
    s[: 128 * 10 : 128] = 1 + np.arange(10) / 100
    s[16:31] = 2
    return s


def make(kind, blocks):
    """Scores of one query: a kind of `scores`, or one that the tail block's bonus does not decide."""
    normal = scores.make("normal", blocks, blocks)
    if kind == "kept":
        return kept(blocks)
    if kind == "rivals":  # multiples of the bonus
        return np.round(normal) * reference.TAIL_BONUS
    if kind == "negative":
        return normal - np.float32(6)
    if kind == "zeros":
        return np.copysign(np.float32(0), normal)
    if kind == "gaps":
        return np.where(normal > 1.5, normal, np.float32(np.nan))
    return scores.make(kind, blocks, blocks)


def launch(kernel, table, records, ids, active):
    """Run `kernel`; the flags, or None for `wide`."""
    queries = len(records)
    flags = np.full(queries, UNTOUCHED, dtype=np.int32)
    if kernel == "wide":
        wide.wide[queries, THREADS](table, records, active, ids)
        return None
    if kernel == "sample":
        sample.sample[queries, THREADS](table, records, active, ids, flags)
        return flags
    parts = np.zeros((queries, sample.SPLITS, 2 * steps.CANDIDATES), dtype=np.uint32)
    counts, done = np.zeros((queries, sample.SPLITS), dtype=np.int32), np.zeros((queries, 1), dtype=np.int32)
    sample.window[(sample.SPLITS, queries), THREADS](table, records, active, ids, flags, parts, counts, done)
    assert not done.any(), "the arrival count is left at 0 for the next launch"
    return flags


def run(kernel, cases):
    """A query a case, in one launch: does the kernel write what the reference writes?"""
    table = np.full((len(cases), ACTIVE // 4 * 4 + 8), PAST, dtype=np.float32)
    records = np.array([(cells - 1, cells, cells // 4, width) for _, cells, width, _ in cases], dtype=np.int32)
    for row, (kind, cells, _, tail) in zip(table, cases, strict=True):
        blocks = min(-(-cells // 4), ACTIVE)
        row[:blocks] = make(kind, blocks)
        if cells % 4:
            row[blocks - 1] = tail
    ids, expected = (np.full((len(cases), CAP), UNTOUCHED, dtype=np.int32) for _ in range(2))
    reference.select_rows(table, records, expected, ACTIVE)
    flags = launch(kernel, table, records, ids, np.array([ACTIVE], dtype=np.int32))
    for i, case in enumerate(cases):
        same, flag = bool((ids[i] == expected[i]).all()), None if flags is None else int(flags[i])
        print(json.dumps({"case": case, "same": same, "flag": flag}))


if __name__ == "__main__":
    assert SIMULATED, "set NUMBA_ENABLE_CUDASIM=1"
    sys.setswitchinterval(2e-4)  # s: the simulator polls its threads, and is four times as fast for it
    sample.settled = wide.settled = settled
    fields = (argument.split(",") for argument in sys.argv[2:])
    run(sys.argv[1], [(kind, int(cells), int(width), float(tail)) for kind, cells, width, tail in fields])
