"""The bound of `sample` and `window`: a key that about three times as many blocks reach as are needed.

A sample of the scores is dealt to the warps; each warp's few largest tell a bound that few of all samples reach; those
are listed and ranked. A block of THREADS threads runs each step together.
"""

# mypy: disable-error-code="arg-type, assignment"

from __future__ import annotations

import numpy as np

from .ptx import (
    SIMULATED,
    THREADS,
    WARPS,
    bits_float,
    cuda,
    largest,
    load_runs,
    quad_sum,
    reach,
    warp_all,
    warp_kth_largest,
)
from .reference import BLOCK
from .steps import CANDIDATES, LISTED, RESULT, TOP, key_of, u

LOG_STRIDE = 3 if SIMULATED else 5  # one score of 32 is in the sample
LOG_RUN = 2  # 4 loads of 4 scores stand side by side in the sample: 64 bytes, as memory likes to be read
SAMPLE_LOADS = 4  # at most, a thread
SPARE = 4 if SIMULATED else 16  # samples over the expected number, so that too few passing is rare
LOOSE = max(WARPS // 4, 1)  # of the warps' bounds the one that lists a third too many samples, and rarely too few
MOST_LISTED = THREADS // 2  # samples that are ranked; scattered scores list 100 at most, sorted ones 250
LOG_WARPS = np.int32(WARPS.bit_length() - 1)
QUADS = np.int32(THREADS // 4)


@cuda.jit(device=True)
def score_of(key):
    """The score that has a key."""
    return bits_float(key ^ u(0x80000000) if key >= u(0x80000000) else ~key)


@cuda.jit(device=True)
def sampled(j, log):
    """The load of the row that is the thread's j-th of the sample: runs of 4, one of 2^log, dealt to the warps."""
    thread = cuda.threadIdx.x
    run = np.int32((8 * j + ((thread & 31) >> 2)) * WARPS + (thread >> 5))
    return np.int32((run << LOG_RUN + log) + (thread & 3))


@cuda.jit(device=True)
def sample_log(loads):
    """The logarithm of how many runs there are for each that is sampled: SAMPLE_LOADS loads a thread must do."""
    log = np.int32(LOG_STRIDE)
    while loads >> (LOG_RUN + log) << LOG_RUN > SAMPLE_LOADS * THREADS:
        log = np.int32(log + 1)
    return log


@cuda.jit(device=True)
def load_sample(row, loads, log):
    """The thread's scores of the sample, 16; NaN, which reaches no bound, where it has fewer."""
    end = np.int32(loads >> (LOG_RUN + log) << (LOG_RUN + log))  # past it stands no whole stride
    return load_runs(row, sampled(0, log), np.int32(8 * WARPS << (LOG_RUN + log)), end)


@cuda.jit(device=True)
def _list_samples(row, log, hits, pool, ws):
    """List the keys of the samples marked in `hits` in `pool`, up to MOST_LISTED of them."""
    if hits == 0:
        return
    place = np.int32(cuda.atomic.add(ws, LISTED, u(cuda.popc(hits))))
    while hits != 0 and place < MOST_LISTED:
        bit = np.int32(cuda.ffs(hits) - 1)
        hits = u(hits & (hits - u(1)))
        pool[u(place)] = key_of(row[u(BLOCK * sampled(bit >> 2, log) + (bit & 3))])
        place = np.int32(place + 1)


@cuda.jit(device=True)
def _rank_samples(wanted, log, pool, ws):
    """`ws[RESULT]` gets the key of the `wanted`-th largest listed sample, `ws[TOP]` that of an eighth of it.

    `ws[RESULT]` stays 0 where so many samples reach that key that the blocks that do will not fit. A quad of lanes
    compares a sample with the others.
    """
    thread = cuda.threadIdx.x
    listed = np.int32(ws[LISTED])
    if listed > MOST_LISTED:
        return
    wanted = np.int32(min(wanted, listed))
    done = np.int32(0)
    ahead = np.int32(0 if SIMULATED else thread >> 5 << 3)  # a warp stops where the samples do
    while done + ahead < listed:
        e = np.int32(done + (thread >> 2))
        counts = np.int32(0)  # samples above, and 65,536 times those as large
        mine = u(0)
        if e < listed:
            mine = pool[u(e)]
            i = np.int32(thread & 3)
            while i < listed:
                other = pool[u(i)]
                counts = np.int32(counts + (1 if other > mine else 0) + (65536 if other == mine else 0))
                i = np.int32(i + 4)
        counts = quad_sum(counts)
        above, reached = np.int32(counts & 65535), np.int32((counts & 65535) + (counts >> 16))
        if above < wanted <= reached and reached << log <= CANDIDATES:
            ws[RESULT] = mine
        if above < wanted >> 3 <= reached:
            ws[TOP] = mine
        done = np.int32(done + QUADS)


@cuda.jit(device=True)
def lower_bound(row, loads, width, log, x, pool, ws):
    """A key that about twice the blocks needed and SPARE * 32 reach, from the sample `x`; 0 if it cannot tell.

    One of 32 runs of loads is sampled (fewer in rows past 131,072 blocks). The r-th largest lane maximum of a warp,
    r * warps >= wanted, is reached by about wanted / warps samples there or more; the lowest but a few of all warps'
    is reached by more than `wanted` in all; those few are ranked. `ws[LISTED]`, `[COUNT]`, `[RESULT]` and `[TOP]` are
    0 at the call; a barrier must follow where it cannot tell.
    """
    thread = cuda.threadIdx.x
    samples = np.int32(loads >> (LOG_RUN + log) << LOG_RUN)
    wanted = np.int32((np.int32(2 * (np.int32(width + BLOCK - 1) >> 2)) >> log) + SPARE)
    rounds = np.int32(np.int32(wanted + WARPS - 1) >> LOG_WARPS)
    bound = np.float32(-np.inf)
    few = samples < rounds * WARPS or rounds > 32  # all are listed
    if not few:
        kth = warp_kth_largest(key_of(largest(x)), rounds)
        if thread & 31 == 0:
            ws[u(thread >> 5)] = kth
    cuda.syncthreads()
    if not few:
        lane = np.int32(thread & 31)
        mine = ws[u(lane & (WARPS - 1))]
        if warp_all(mine == ws[0]):  # so many scores are equal that the blocks that reach them will not fit
            return u(0)
        lowest = warp_kth_largest(u(~mine) if lane < WARPS else u(0), np.int32(LOOSE))
        bound = score_of(u(~lowest))
    _list_samples(row, log, reach(x, bound), pool, ws)
    cuda.syncthreads()
    _rank_samples(wanted, log, pool, ws)
    cuda.syncthreads()
    return ws[RESULT]
