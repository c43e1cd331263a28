"""The merge stage: one block a row makes a choice of the candidates that the row's blocks left.

Candidates are narrowed by the same kind of bound as before, the few that reach it are ranked pairwise, and the chain
runs on the <= 64 that are kept. Weights are float64 exponentials, taken side by side; their running sums are added up
one by one in the order of the reference: a sum in another order can differ in the last bit and so pick another token.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .candidates import LAST_KEY, LOWEST, id_of, key_bound, key_of
from .philox import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, WEYL_0, WEYL_1, WORD
from .ptx import add, cuda, inlined, let_next_start, load_key, opaque, ordered, value_of, wait_for_previous
from .tables import CAPACITY, ENTRIES, HEAD, KEEP_MAX, LISTS, MAX_BLOCKS, Shape, word

SURVIVORS = 256  # candidates that are ranked at once
KEPT = LISTS * KEEP_MAX
PAIRS = 2 * KEEP_MAX  # weights of the chain: at temperature 1, at the row's
TEMPERATURE, TOP_P = word("temperature") // 2, word("top_p") // 2
SEED, INDEX = word("seed"), word("index")
MIN_P_LOG, KEEP, K, PLACE = word("min_p_log"), word("keep"), word("k"), word("place")
# places of `tally`: tokens that min_p leaves, the last that top_p leaves, the one drawn; then for each list how many
# candidates reach the bound, and the most candidates of a block
LIKELY, CUT, DRAWN, FOUND, WIDEST = 0, 1, 2, 3, 5
ALTERNATIVES, LISTS_WANTED = word("alternatives"), word("lists")


@inlined
def uniform(ints, at):
    """The twin of `philox.uniform`, for the seed and draw index of a record."""
    low, shift = np.uint64(WORD), np.uint64(32)
    k0, k1 = np.uint64(np.uint32(ints[at + SEED])), np.uint64(np.uint32(ints[at + SEED + 1]))
    c0, c1 = np.uint64(np.uint32(ints[at + INDEX])), np.uint64(np.uint32(ints[at + INDEX + 1]))
    c2, c3 = np.uint64(0), np.uint64(0)
    for _ in range(opaque(ROUNDS)):
        product_0, product_1 = np.uint64(MULTIPLIER_0) * c0, np.uint64(MULTIPLIER_1) * c2
        c0, c1, c2, c3 = (
            (product_1 >> shift) ^ c1 ^ k0,
            product_1 & low,
            (product_0 >> shift) ^ c3 ^ k1,
            product_0 & low,
        )
        k0, k1 = (k0 + np.uint64(WEYL_0)) & low, (k1 + np.uint64(WEYL_1)) & low
    return np.float64(np.uint32(c0 >> np.uint64(8))) * 2.0**-24


@inlined
def exp_from_head(value, head, temperature):
    if value == head:  # also where both are inf
        return 1.0
    return math.exp((np.float64(value) - np.float64(head)) / temperature)


@inlined
def slot(candidates, base, counts, places, blocks, i):
    """Candidate i of a row, 2^places a block: 0 where there is none."""
    block = i >> places
    entry = i - (block << places)
    inside = block < blocks and entry < counts[min(block, blocks - 1)]
    return load_key(candidates, base + block * CAPACITY + entry, inside)


@inlined
def running_sums(weights, sums, start, count):
    """sums[start + i] = weights[start] + ... + weights[start + i], i < count, one by one; four loads ahead of the sums.

    Both hold a multiple of four; what is past `count` is of no meaning.
    """
    total = 0.0
    for i in range(0, count, 4):
        at = np.uint32(start + i)
        a, b, c, d = weights[at], weights[at + 1], weights[at + 2], weights[at + 3]
        a += total
        b += a
        c += b
        total = c + d
        sums[at], sums[at + 1], sums[at + 2], sums[at + 3] = a, b, c, total


def merge_stage(shape: Shape) -> Any:
    """The device function of the merge stage.

    Grid: rows; block: shape.threads. Twin: reference.Chain. Reads `scratch`, `requests` (at once, as the candidate
    stage does) and, for a log-probability, the chosen token's raw logit; writes `outcome`.
    """
    threads, segment = shape.threads, shape.segment

    @inlined
    def widest(scratch, place, blocks, counts, tally, at):
        """Copy a list's counts to shared memory; the least p with 2^p >= all of them. tally[at] is 0 before."""
        i = cuda.threadIdx.x
        while i < blocks:
            count = scratch.counts[place * blocks + i]
            counts[np.uint32(i)] = count
            cuda.atomic.max(tally, at, count)
            i += opaque(threads)
        cuda.syncthreads()
        return np.int32(32 - cuda.clz(np.int32(max(tally[at], 2) - 1)))

    @inlined
    def in_rounds(candidates, base, counts, places, blocks, keep, kept, start, cell):
        """The `keep` best candidates of a row into kept[start:], in order; how many there are. A round each."""
        last = LAST_KEY
        for done in range(keep):
            if cuda.threadIdx.x == 0:
                cell[0] = np.uint64(0)
            cuda.syncthreads()
            best = np.uint64(0)
            i = cuda.threadIdx.x
            while i < blocks << places:
                candidate = slot(candidates, base, counts, places, blocks, i)
                if candidate < last and candidate > best:
                    best = candidate
                i += opaque(threads)
            cuda.atomic.max(cell, 0, best)
            cuda.syncthreads()
            last = cell[0]
            cuda.syncthreads()
            if last == 0:
                return done
            kept[np.uint32(start + done)] = last
        return keep

    @inlined
    def pass_on(candidate, bound, pool, tally, number):
        """Put a candidate that reaches the bound into the pool; it may be full, but is counted."""
        if candidate >= bound:
            position = cuda.atomic.add(tally, number, 1)
            if position < SURVIVORS:
                pool[np.uint32(position)] = candidate

    @inlined
    def rank(pool, count, keep, ranks, kept, start):
        """Put the `keep` largest of pool[:count] into kept[start:], in order. Eight threads compare for each."""
        thread = cuda.threadIdx.x
        i = thread // 8
        while i < count:
            mine, above = pool[np.uint32(i)], 0
            j = thread % 8
            while j < count:
                above += 1 if pool[np.uint32(j)] > mine else 0
                j += opaque(8)
            if above > 0:
                cuda.atomic.add(ranks, np.uint32(i), above)
            i += opaque(threads // 8)
        cuda.syncthreads()
        i = thread
        while i < count:
            place = ranks[np.uint32(i)]
            if place < keep:
                kept[np.uint32(start + place)] = pool[np.uint32(i)]

            i += opaque(threads)

    @inlined
    def select(scratch, row, which, blocks, keep, counts, tally, peaks, pool, ranks, kept, cell):
        """The `keep` best candidates of list `which` into kept[KEEP_MAX * which:], in order; how many there are.

        `ranks`, peaks[which] and the list's places of `tally` are 0 before, and a barrier has passed. Ends at one.
        """
        thread, place, number, start = cuda.threadIdx.x, row * LISTS + which, FOUND + which, KEEP_MAX * which
        places = widest(scratch, place, blocks, counts, tally, WIDEST + which)
        candidates, base = scratch.candidates, place * blocks * CAPACITY
        a = slot(candidates, base, counts, places, blocks, thread)
        b = slot(candidates, base, counts, places, blocks, thread + threads)
        c = slot(candidates, base, counts, places, blocks, thread + 2 * threads)
        d = slot(candidates, base, counts, places, blocks, thread + 3 * threads)
        largest = max(max(a, b), max(c, d))
        i = thread + 4 * threads
        while i < blocks << places:
            largest = max(largest, slot(candidates, base, counts, places, blocks, i))
            i += opaque(threads)
        bound = np.uint64(np.uint64(key_bound(key_of(largest), keep, peaks, which)) << np.uint64(32))
        if largest >= bound:
            pass_on(a, bound, pool, tally, number)
            pass_on(b, bound, pool, tally, number)
            pass_on(c, bound, pool, tally, number)
            pass_on(d, bound, pool, tally, number)
            i = thread + 4 * threads
            while i < blocks << places:
                pass_on(slot(candidates, base, counts, places, blocks, i), bound, pool, tally, number)
                i += opaque(threads)
        cuda.syncthreads()
        count = tally[number]
        if count > SURVIVORS:
            count = in_rounds(candidates, base, counts, places, blocks, keep, kept, start, cell)
        else:
            rank(pool, count, keep, ranks, kept, start)
        cuda.syncthreads()
        return min(count, keep)

    @inlined
    def drawn(kept, count, requests, row, u, weights, sums, tally):
        """(place of the chosen among the `count` >= 1 of `kept`, tokens left to draw from)."""
        thread, at = cuda.threadIdx.x, row * requests.stride
        temperature, top_p = requests.reals[at // 2 + TEMPERATURE], requests.reals[at // 2 + TOP_P]
        head = value_of(key_of(kept[0]))
        floor = requests.floats[at + MIN_P_LOG]  # an infinite head must not make it NaN
        if floor >= LOWEST:
            floor = add(head, floor)
        i = thread
        while i < PAIRS:
            j = i % KEEP_MAX
            weight = 0.0
            if j < count:
                value = value_of(key_of(kept[np.uint32(j)]))
                weight = exp_from_head(value, head, 1.0 if i < KEEP_MAX else temperature)
                if i < KEEP_MAX and value >= floor:
                    cuda.atomic.add(tally, LIKELY, 1)
            weights[np.uint32(i)] = weight
            i += opaque(threads)
        cuda.syncthreads()
        left = max(tally[LIKELY], 1)
        if thread < 2:
            running_sums(weights, sums, thread * KEEP_MAX, left)
        cuda.syncthreads()
        if top_p != 1.0:
            j = thread
            while j < left:
                if sums[np.uint32(j)] >= top_p * sums[np.uint32(left - 1)]:
                    cuda.atomic.min(tally, CUT, j)
                j += opaque(threads)
            cuda.syncthreads()
            left = min(left, tally[CUT] + 1)
        j = thread
        while j < left:
            if sums[np.uint32(KEEP_MAX + j)] > u[0] * sums[np.uint32(KEEP_MAX + left - 1)]:
                cuda.atomic.min(tally, DRAWN, j)
            j += opaque(threads)
        cuda.syncthreads()
        return min(tally[DRAWN], left - 1), left

    @inlined
    def log_total(scratch, row, blocks, vocab, terms, sums, peaks, u):
        """The largest raw logit; u[1] = log of the sum of exp(logit - largest). peaks[LISTS] is 0 before."""
        thread = cuda.threadIdx.x
        i = thread
        while i < blocks:
            cuda.atomic.max(peaks, LISTS, ordered(scratch.partials[(row * blocks + i) * 2]))
            i += opaque(threads)
        cuda.syncthreads()
        largest = value_of(peaks[LISTS])
        i = thread
        while i < blocks:
            top = scratch.partials[(row * blocks + i) * 2]
            total = np.float64(scratch.partials[(row * blocks + i) * 2 + 1])
            terms[np.uint32(i)] = total * exp_from_head(top, largest, 1.0) if top >= LOWEST else 0.0
            i += opaque(threads)
        cuda.syncthreads()
        if thread == 0:
            running_sums(terms, sums, 0, blocks)
            total = sums[np.uint32(blocks - 1)]
            u[1] = math.log(total if total > 0.0 else np.float64(vocab))  # no number at all: even shares
        cuda.syncthreads()
        return largest

    @inlined
    def report(logits, base, token, kept, start, count, place, largest, log_sum, outcome):
        """Log-probabilities of `token` and of the `count` raw candidates from kept[start]."""
        thread = cuda.threadIdx.x
        i = thread
        while i < count + 1:
            candidate = kept[np.uint32(start + max(i - 1, 0))]
            value = logits[base + token] if i == 0 else value_of(key_of(candidate))
            logprob = -log_sum
            if value != largest and largest >= LOWEST:
                logprob += np.float64(value) - np.float64(largest)
            outcome.logprobs[place * ENTRIES + i] = logprob
            if i > 0:
                outcome.ids[place * (ENTRIES - 1) + i - 1] = id_of(candidate)

            i += opaque(threads)

    @inlined
    def stage(logits, vocab, requests, scratch, outcome):
        thread, row = cuda.threadIdx.x, cuda.blockIdx.x
        counts = cuda.shared.array(MAX_BLOCKS, np.int32)
        pool = cuda.shared.array(SURVIVORS, np.uint64)
        ranks = cuda.shared.array(SURVIVORS, np.int32)
        kept = cuda.shared.array(KEPT, np.uint64)
        weights = cuda.shared.array(PAIRS, np.float64)  # of the chain, later a term a block
        sums = cuda.shared.array(PAIRS, np.float64)
        tally = cuda.shared.array(8, np.int32)
        peaks = cuda.shared.array(4, np.uint32)  # the largest key of each list, the largest raw logit
        cell = cuda.shared.array(1, np.uint64)
        u = cuda.shared.array(2, np.float64)  # the number drawn, the log of the whole
        at, blocks = row * requests.stride, (vocab + segment - 1) // segment
        ints = requests.ints
        sampled = requests.reals[at // 2 + TEMPERATURE] > 0.0
        lists, keep, alternatives = ints[at + LISTS_WANTED], ints[at + KEEP], ints[at + ALTERNATIVES]
        k, place = ints[at + K], ints[at + PLACE]
        if thread == threads - 1:
            u[0] = uniform(ints, at)
        if thread < 4:
            peaks[np.uint32(thread)] = 0
        if thread < 8:
            tally[np.uint32(thread)] = KEEP_MAX if thread in (CUT, DRAWN) else 0
        let_next_start()
        wait_for_previous()
        if keep == 0:
            return
        found, found_raw = 0, 0
        for which in range(lists):
            i = thread
            while i < SURVIVORS:
                ranks[np.uint32(i)] = 0
                i += opaque(threads)
            cuda.syncthreads()
            wanted = keep if which == 0 else alternatives
            found_raw = select(scratch, row, which, blocks, wanted, counts, tally, peaks, pool, ranks, kept, cell)
            if which == 0:
                found = found_raw
        token, left = 0, 1
        if found > 0:
            which = 0
            if sampled:
                which, left = drawn(kept, min(found, k), requests, row, u, weights, sums, tally)
            token = id_of(kept[np.uint32(which)])
        if thread == 0:
            requests.chosen[row] = token
            outcome.heads[place * HEAD] = token
            outcome.heads[place * HEAD + 1] = left
            outcome.heads[place * HEAD + 2] = min(found_raw, max(alternatives, 0))
        if alternatives >= 0:
            cuda.syncthreads()
            largest = log_total(scratch, row, blocks, vocab, weights, sums, peaks, u)
            filled, start = min(found_raw, alternatives), (lists - 1) * KEEP_MAX
            report(logits, row * vocab, token, kept, start, filled, place, largest, u[1], outcome)

    return stage
