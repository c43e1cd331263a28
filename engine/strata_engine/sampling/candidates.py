"""The candidate stage: many blocks a row, each of which reads its segment of the logits once.

A block leaves every logit that can be among the row's `keep` largest. The largest logits of its threads are compared
with a bound that at least `keep` of them reach, found bit by bit from the top; so do the `keep` largest logits of the
segment, and few others. The bound is a float32, so equal logits stand or fall together. Should more than CAPACITY reach
it, the block takes the `keep` largest one by one: slow and exact.

Penalties and biases: the tokens they name in the segment are noted in a table in shared memory, one word a token: first
the count, then the adjusted logit, which replaces the one read. The cost follows the window.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .ptx import (
    WARP,
    add,
    bits_of,
    cuda,
    divide,
    far_float,
    far_word,
    float_of,
    inlined,
    load_ids,
    logit_macros,
    mul,
    opaque,
    ordered,
    sub,
    value_of,
    warp_max,
    warp_sum,
)
from .tables import CAPACITY, LISTS, WORDS, Shape, word

LOWEST = np.float32(np.finfo(np.float32).min)  # under this is only -inf
LOWEST_KEY = np.uint32(0x00800000)  # ordered(LOWEST)
ALL_ONES = np.uint32(0xFFFFFFFF)
SEEN, PEAK = 2, 3  # places of `counters`, shared uint32: 0 and 1 count the candidates of a list
LAST_KEY = np.uint64(0xFFFFFFFFFFFFFFFF)

REPEAT, FREQ, PRESENT = word("repeat"), word("freq"), word("present")
KEEP, LISTS_WANTED, ALTERNATIVES = word("keep"), word("lists"), word("alternatives")
WINDOW, LENGTH, BIASES = word("window"), word("length"), word("biases")
BIAS_IDS, BIAS_VALUES = word("bias_ids"), word("bias_values")


@inlined
def join(key, token):
    """A candidate: larger for a larger logit, then for a lower id. `key`: ordered logit."""
    return np.uint64(np.uint64(key) << np.uint64(32)) | np.uint64(np.uint32(ALL_ONES - np.uint32(token)))


@inlined
def key_of(candidate):
    return np.uint32(candidate >> np.uint64(32))


@inlined
def id_of(candidate):
    return np.int32(ALL_ONES - np.uint32(candidate & np.uint64(ALL_ONES)))


@inlined
def key_bound(key, keep):
    """An ordered float that at least `keep` of the block's keys reach, and few more unless they are equal.

    LOWEST_KEY if fewer do. `key`: one a thread. Meets at barriers.
    """
    found, bit = np.uint32(0), np.uint32(0x80000000)
    enough = keep + keep // 4 + 4
    for _ in range(opaque(32)):
        trial = np.uint32(found | bit)
        bit = np.uint32(bit >> np.uint32(1))
        count = cuda.syncthreads_count(1 if key >= trial else 0)
        if count >= keep:
            found = trial
            if count <= enough:
                break
    return max(found, LOWEST_KEY)


@inlined
def block_largest(x, counters):
    """The largest float32 of the block, in every thread. Meets at a barrier."""
    key = warp_max(ordered(x))
    if cuda.threadIdx.x % WARP == 0:
        cuda.atomic.max(counters, PEAK, key)
    cuda.syncthreads()
    return value_of(counters[PEAK])


@inlined
def block_sum(x, sums, warps):
    """The sum over the block, in thread 0, in the same order always. `sums`: shared float32 [warps]."""
    total = warp_sum(x)
    if cuda.threadIdx.x % WARP == 0:
        sums[np.uint32(cuda.threadIdx.x // WARP)] = total
    cuda.syncthreads()
    total = sums[0]
    for i in range(1, warps):
        total = add(total, sums[i])
    return total


@inlined
def bias_position(ints, at, token):
    """How many of the row's bias ids are below `token`."""
    low, high = 0, ints[at + BIASES]
    while low < high:
        middle = (low + high) // 2
        if far_word(ints[at + BIAS_IDS], ints[at + BIAS_IDS + 1], middle) < token:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def biased(logit, ints, at, entry, token):
    """`logit` with the biases of `token` added, in order; `entry`: where they may start."""
    while entry < ints[at + BIASES]:
        if far_word(ints[at + BIAS_IDS], ints[at + BIAS_IDS + 1], entry) != token:
            break
        value = far_float(ints[at + BIAS_VALUES], ints[at + BIAS_VALUES + 1], entry)
        logit = add(logit, value)
        entry += 1
    return logit


@inlined
def penalised(logit, count, floats, at):
    """Penalties on a logit whose token came `count` times. Rounded operation by operation, never fused."""
    repeat = floats[at + REPEAT]
    logit = mul(logit, repeat) if logit <= np.float32(0.0) else divide(logit, repeat)
    return sub(logit, add(mul(np.float32(count), floats[at + FREQ]), floats[at + PRESENT]))


@inlined
def table_word(logit):
    """The bits of an adjusted logit; those of -0 for 0, as 0 means that there is none."""
    bits = bits_of(logit)
    return np.uint32(0x80000000) if bits == 0 else bits


def adjuster(shape: Shape) -> Any:
    """Two device functions for the table of adjusted logits of a segment: the one before the logits, the one after."""
    threads, segment, quarter = shape.threads, shape.segment, shape.segment // 4

    @inlined
    def place(local):
        return local % 4 * quarter + local // 4

    @inlined
    def note(token, first, table, seen, counters):
        """Count a token of the window; `seen` takes each of the segment once."""
        local = token - first
        if 0 <= local < segment and cuda.atomic.add(table, np.uint32(place(local)), 1) == 0:
            seen[np.uint32(cuda.atomic.add(counters, SEEN, 1))] = local

    @inlined
    def note_four(windows, index, end, first, table, seen, counters):
        a, b, c, d = load_ids(windows, index, index < end)
        note(a, first, table, seen, counters)
        note(b, first, table, seen, counters)
        note(c, first, table, seen, counters)
        note(d, first, table, seen, counters)

    @inlined
    def count(first, requests, at, table, seen, counters):
        """table[place(local)]: how often the window holds a token of the segment. Ends at a barrier."""
        thread, ints = cuda.threadIdx.x, requests.ints
        for i in range(thread, segment, threads):
            table[np.uint32(i)] = 0
        cuda.syncthreads()
        start = ints[at + WINDOW]
        end = start + ints[at + LENGTH]
        for i in range(start + 4 * thread, end, 4 * threads):
            note_four(requests.windows, i, end, first, table, seen, counters)
        cuda.syncthreads()

    @inlined
    def adjust(logits, base, first, requests, at, table, seen, number):
        """table[place(local)]: the adjusted logit of a token that the window or the biases name, else 0.

        `number` tokens are in `seen`, counted in `table`. Ends at a barrier.
        """
        thread = cuda.threadIdx.x
        ints, floats = requests.ints, requests.floats
        for i in range(thread, number, threads):
            local = np.int32(seen[np.uint32(i)])
            token, entry = first + local, np.uint32(place(local))
            logit = logits[base + token]
            if ints[at + BIASES] > 0:
                logit = biased(logit, ints, at, bias_position(ints, at, token), token)
            table[entry] = table_word(penalised(logit, table[entry], floats, at))
        if ints[at + BIASES] > 0:
            low, high = bias_position(ints, at, first), bias_position(ints, at, first + segment)
            for i in range(low + thread, high, threads):
                token = far_word(ints[at + BIAS_IDS], ints[at + BIAS_IDS + 1], i)
                again = i > low and far_word(ints[at + BIAS_IDS], ints[at + BIAS_IDS + 1], i - 1) == token
                entry = np.uint32(place(token - first))
                if not again and table[entry] == 0:
                    table[entry] = table_word(biased(logits[base + token], ints, at, i, token))
        cuda.syncthreads()

    return count, adjust


def candidate_stage(shape: Shape) -> tuple[Any, Any]:
    """The two device functions of the candidate stage: what it can do before the logits are there, and the rest.

    Grid: (blocks, rows); block: shape.threads. Twin: reference.Chain.penalise and top_k. Reads logits [rows, vocab]
    float32 and `requests`, writes `scratch` (tables.py says what they hold).
    """
    macros = logit_macros(shape.threads, shape.vectors, shape.wide)
    load, overlay, largest = macros.load, macros.overlay, macros.largest
    above, pick, exp_sum = macros.above, macros.pick, macros.exp_sum
    count_window, adjust = adjuster(shape)
    threads, segment, quarter = shape.threads, shape.segment, shape.segment // 4
    warps = threads // WARP

    @inlined
    def one_by_one(logits, base, first, end, keep, table, patched, out, at, cell):
        """The `keep` largest of a segment in order, into `out`; how many there are. Rounds over all of it."""
        thread = cuda.threadIdx.x
        last = LAST_KEY
        for done in range(keep):
            if thread == 0:
                cell[0] = np.uint64(0)
            cuda.syncthreads()
            best = np.uint64(0)
            for local in range(thread, end - first, threads):
                logit = logits[base + first + local]
                if patched:
                    entry = table[np.uint32(local % 4 * quarter + local // 4)]
                    if entry != 0:
                        logit = float_of(entry)
                if logit >= LOWEST:
                    candidate = join(ordered(logit), first + local)
                    if candidate < last and candidate > best:
                        best = candidate
            cuda.atomic.max(cell, 0, best)
            cuda.syncthreads()
            last = cell[0]
            cuda.syncthreads()
            if last == 0:
                return done
            if thread == 0:
                out[at + done] = last
        return keep

    @inlined
    def leave(x, keep, first, out, at, counters, which):
        """Write what reaches the bound to `out`; how many that are, of which CAPACITY are written."""
        top = largest(x)
        bound = value_of(key_bound(ordered(top), keep))
        mask = above(x, bound) if top >= bound else np.uint32(0)
        while mask != 0:
            i = np.int32(cuda.ffs(mask)) - 1
            mask = np.uint32(mask & np.uint32(mask - np.uint32(1)))
            position = cuda.atomic.add(counters, which, 1)
            if position < CAPACITY:
                token = first + 4 * (i // 4 * threads + cuda.threadIdx.x) + i % 4
                out[at + position] = join(ordered(pick(x, i)), token)
        cuda.syncthreads()
        return counters[which]

    @inlined
    def prepare(requests, at, table, seen, counters):
        """True if the row's logits are adjusted; then the window is counted. Ends at a barrier."""
        thread, ints = cuda.threadIdx.x, requests.ints
        patched = ints[at + LENGTH] > 0 or ints[at + BIASES] > 0
        if thread < 4:
            counters[np.uint32(thread)] = 0
        if patched:
            count_window(cuda.blockIdx.x * segment, requests, at, table, seen, counters)
        else:
            cuda.syncthreads()
        return patched

    @inlined
    def stage(logits, vocab, requests, scratch, patched, table, seen, counters):
        """`patched`, `table`, `seen`, `counters`: from `prepare`."""
        thread, block, row, blocks = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y, cuda.gridDim.x
        cell = cuda.shared.array(1, np.uint64)
        sums = cuda.shared.array(warps, np.float32)
        at, ints = row * WORDS, requests.ints
        first, base = block * segment, row * vocab
        end = min(vocab, first + segment)
        lists, alternatives = ints[at + LISTS_WANTED], ints[at + ALTERNATIVES]
        x = load(logits, base, first, thread, vocab)
        if alternatives >= 0:
            top = block_largest(largest(x), counters)
            total = np.float32(0.0)
            if top >= LOWEST:
                total = block_sum(exp_sum(x, top), sums, warps)
            if thread == 0:
                scratch.partials[(row * blocks + block) * 2] = top
                scratch.partials[(row * blocks + block) * 2 + 1] = total
        if patched:
            adjust(logits, base, first, requests, at, table, seen, counters[SEEN])
        for which in range(lists - 1, -1, -1):
            keep = ints[at + KEEP] if which == 0 else alternatives
            if which == 0 and patched:
                x = overlay(x, table, thread)
            place = (row * LISTS + which) * blocks + block
            count = leave(x, keep, first, scratch.candidates, place * CAPACITY, counters, which)
            if count > CAPACITY:
                adjusted = which == 0 and patched
                count = one_by_one(
                    logits, base, first, end, keep, table, adjusted, scratch.candidates, place * CAPACITY, cell
                )
            if thread == 0:
                scratch.counts[place] = count

    return prepare, stage
