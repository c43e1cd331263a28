"""Run one selection kernel in numba's simulator over small cases; prints a JSON line a case.

    NUMBA_ENABLE_CUDASIM=1 python simulate.py wide|sample|window KIND,... CELLS,...

In the simulator blocks have 64 threads and room for 256 candidates, so small contexts cross every bound.
"""

import json
import sys

import numpy as np

from strata_engine.selection import reference, sample, scores, steps, wide
from strata_engine.selection.ptx import SIMULATED, THREADS

WIDTH, CAP, UNTOUCHED = 103, 110, -7


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


def run(kernel, kind, cells):
    """One query, its row padded with +inf: does the kernel write what the reference writes?"""
    blocks = -(-cells // 4)
    table = np.full((1, blocks // 4 * 4 + 8), np.inf, dtype=np.float32)
    table[0, :blocks] = scores.make_row(kind, cells, cells)[:blocks]
    records = reference.step_records([cells - 1], WIDTH - 3)
    active = np.array([table.shape[1]], dtype=np.int32)
    ids, expected = (np.full((1, CAP), UNTOUCHED, dtype=np.int32) for _ in range(2))
    reference.select_rows(table, records, expected)
    flags = launch(kernel, table, records, ids, active)
    flag = None if flags is None else int(flags[0])
    print(json.dumps({"kind": kind, "cells": cells, "same": bool((ids == expected).all()), "flag": flag}), flush=True)


if __name__ == "__main__":
    assert SIMULATED, "set NUMBA_ENABLE_CUDASIM=1"
    for a_kind in sys.argv[2].split(","):
        for count in sys.argv[3].split(","):
            run(sys.argv[1], a_kind, int(count))
