"""The candidate stage: many blocks a row, each of which reads its segment of the logits once.

A block leaves every logit that can be among the row's `keep` largest. The largest logits of its threads are compared
with a bound that at least `keep` of them reach, found bit by bit from the top; so do the `keep` largest logits of the
segment, and few others. The bound is a float32, so equal logits stand or fall together. Should more than CAPACITY reach
it, the block takes the `keep` largest one by one: slow and exact.

Penalties and biases: the host has sorted a row's window by segment and counted it, so a block reads its own entries
alone. They are marked in a bitmap in shared memory, a word of which covers the logits that one thread holds; their
logits are read apart, adjusted and laid in a table while the segment is on its way; then the table's values take the
place of what was read.
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
    let_next_start,
    load_entries,
    load_entry_logits,
    local_of,
    local_part,
    logit_macros,
    mul,
    opaque,
    ordered,
    sub,
    value_of,
    wait_for_previous,
    warp_max,
    warp_sum,
)
from .tables import CAPACITY, COUNT_SHIFT, LISTS, WORDS, Shape, word

LOWEST = np.float32(np.finfo(np.float32).min)  # under this is only -inf
HIGHEST = np.float32(np.finfo(np.float32).max)
LOWEST_KEY = np.uint32(0x00800000)  # ordered(LOWEST)
ALL_ONES = np.uint32(0xFFFFFFFF)
# places of `counters`, shared uint32: candidates of each list (0, 1), the largest raw logit, each list's largest key, 1
# if the late token has no entry
PEAK, PEAKS, ALONE, COUNTERS = 2, 3, 5, 6
OCTAVE = np.uint32(0x007FFFFF)  # ordered floats from a power of two to the next, less one
LAST_KEY = np.uint64(0xFFFFFFFFFFFFFFFF)

REPEAT, FREQ, PRESENT = word("repeat"), word("freq"), word("present")
KEEP, LISTS_WANTED, ALTERNATIVES = word("keep"), word("lists"), word("alternatives")
LATE, BIASES = word("late"), word("biases")
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
def key_bound(key, keep, peaks, place):
    """An ordered float that at least `keep` of the block's keys reach, and few more unless they are equal.

    LOWEST_KEY if fewer do. `key`: one a thread, 0 for none. peaks[place]: shared uint32, 0 before; it takes the largest
    key, from which the distance to the bound is searched bit by bit. Meets at barriers.
    """
    highest = warp_max(key)
    if cuda.threadIdx.x % WARP == 0:
        cuda.atomic.max(peaks, place, highest)
    cuda.syncthreads()
    peak = peaks[place]
    distance = np.uint32(peak - key)
    reach, bit = OCTAVE, np.uint32(0x00400000)
    enough = keep + keep // 8 + 2
    count = cuda.syncthreads_count(1 if distance <= reach else 0)
    if count < keep:  # rare: the logits are spread over more than a factor of two
        reach, bit = ALL_ONES, np.uint32(0x80000000)
        count = enough + 1
    while bit != 0 and count > enough:
        trial = np.uint32(reach ^ bit)
        bit = np.uint32(bit >> np.uint32(1))
        reached = cuda.syncthreads_count(1 if distance <= trial else 0)
        if reached >= keep:
            reach, count = trial, reached
    peak = max(peak, LOWEST_KEY)
    return np.uint32(peak - min(reach, np.uint32(peak - LOWEST_KEY)))


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
def penalised(logit, count, repeat, freq, present):
    """Penalties on a logit whose token came `count` times. Rounded operation by operation, never fused."""
    logit = mul(logit, repeat) if logit <= np.float32(0.0) else divide(logit, repeat)
    return sub(logit, add(mul(np.float32(count), freq), present))


def adjuster(shape: Shape) -> tuple[Any, ...]:
    """Device functions: `mark` what is penalised or biased in a segment, two to adjust its logits, one to look one up.

    What is marked has a bit in the word of `hits` of the thread that holds its logit, and its adjusted logit in the
    table, by local index. ints[begin:end]: the block's entries, tables.py says of what. `late`: the local index of the
    token that the host did not know yet, -1 for none here.
    """
    threads, segment = shape.threads, shape.segment
    macros = logit_macros(shape.threads, shape.vectors, shape.wide)
    owner_of, bit_of = macros.owner_of, macros.bit_of

    @inlined
    def mark_one(local, hits):
        """Mark a token, whoever else does at the same time; -1 is none. Its owner's word before."""
        if local < 0:
            return np.uint32(0)
        return cuda.atomic.or_(hits, np.uint32(owner_of(local)), bit_of(local))

    @inlined
    def mark(a, b, c, d, ints, begin, end, late, hits, counters):
        """Mark the window, before the logits are there; a..d: the thread's first entries.

        counters[ALONE] = 1 if the late token has no entry. `hits` is 0, and a barrier has passed; another ends this.
        """
        mark_one(local_part(a), hits)
        mark_one(local_part(b), hits)
        mark_one(local_part(c), hits)
        mark_one(local_part(d), hits)
        i = begin + 4 * threads + cuda.threadIdx.x
        while i < end:
            mark_one(local_part(ints[i]), hits)
            i += opaque(threads)
        if late >= 0:
            cuda.syncthreads()
            if cuda.threadIdx.x == 0 and np.uint32(mark_one(late, hits) & bit_of(late)) == 0:
                counters[ALONE] = 1

    @inlined
    def put(logit, entry, late, repeat, freq, present, table):
        """Lay the adjusted logit of an entry in the table; -1 is none."""
        local = local_part(entry)
        if local >= 0:
            count = (entry >> COUNT_SHIFT) + (1 if local == late else 0)
            table[np.uint32(local)] = bits_of(penalised(logit, count, repeat, freq, present))

    @inlined
    def adjust_more(logits, base, first, ints, begin, end, late, repeat, freq, present, table, counters):
        """Adjust what is not among the threads' first entries: seldom anything."""
        i = begin + 4 * threads + cuda.threadIdx.x
        while i < end:
            put(logits[base + first + local_part(ints[i])], ints[i], late, repeat, freq, present, table)
            i += opaque(threads)
        if cuda.threadIdx.x == 0 and counters[ALONE] == 1:
            put(logits[base + first + late], late, late, repeat, freq, present, table)

    @inlined
    def adjust_biased(logits, base, first, requests, at, begin, end, late, table, hits, counters):
        """Mark the biases, too, and fill the table: as if no biased token were in the window, then for the window."""
        ints, floats, thread = requests.ints, requests.floats, cuda.threadIdx.x
        for part in range(opaque(3)):  # biases, entries, the late token that has none
            i, high = thread, np.int32(counters[ALONE])
            if part == 0:
                i, high = bias_position(ints, at, first) + thread, bias_position(ints, at, first + segment)
            elif part == 1:
                i, high = begin + thread, end
            while i < high:
                local, count = late, 1
                if part == 0:
                    local, count = far_word(ints[at + BIAS_IDS], ints[at + BIAS_IDS + 1], i) - first, 0
                    mark_one(local, hits)
                elif part == 1:
                    local = local_part(ints[i])
                    count = (ints[i] >> COUNT_SHIFT) + (1 if local == late else 0)
                logit = logits[base + first + local]
                logit = biased(logit, ints, at, bias_position(ints, at, first + local), first + local)
                if count > 0:
                    logit = penalised(logit, count, floats[at + REPEAT], floats[at + FREQ], floats[at + PRESENT])
                table[np.uint32(local)] = bits_of(logit)
                i += opaque(threads)
            cuda.syncthreads()

    @inlined
    def adjusted(logit, local, table, hits):
        """What stands for the logit of a local index."""
        return (
            float_of(table[np.uint32(local)])
            if np.uint32(hits[np.uint32(owner_of(local))] & bit_of(local)) != 0
            else logit
        )

    return mark, put, adjust_more, adjust_biased, adjusted


def candidate_stage(shape: Shape) -> Any:
    """The device function of the candidate stage.

    Grid: (blocks, rows); block: shape.threads. Twin: reference.Chain.penalise and top_k. Reads logits [rows, vocab]
    float32 and `requests`, writes `scratch` (tables.py says what they hold). It starts before the kernel ahead is done
    and reads `requests` at once: what writes those must be done before the kernel ahead starts.
    """
    macros = logit_macros(shape.threads, shape.vectors, shape.wide)
    load, largest, above = macros.load, macros.largest, macros.above
    pick, exp_sum, patched = macros.pick, macros.exp_sum, macros.patched
    mark, put, adjust_more, adjust_biased, adjusted = adjuster(shape)
    threads, segment = shape.threads, shape.segment
    warps = threads // WARP

    @inlined
    def one_by_one(logits, base, first, end, keep, table, hits, of_adjusted, out, at, cell):
        """The `keep` largest of a segment in order, into `out`; how many there are. Rounds over all of it."""
        thread = cuda.threadIdx.x
        last = LAST_KEY
        for done in range(keep):
            if thread == 0:
                cell[0] = np.uint64(0)
            cuda.syncthreads()
            best = np.uint64(0)
            local = thread
            while local < end - first:
                logit = logits[base + first + local]
                if of_adjusted:
                    logit = adjusted(logit, local, table, hits)
                if logit >= LOWEST:
                    candidate = join(ordered(logit), first + local)
                    if candidate < last and candidate > best:
                        best = candidate
                local += opaque(threads)
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
        bound = value_of(key_bound(ordered(top), keep, counters, PEAKS + which))
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
    def stage(logits, vocab, requests, scratch):
        thread, block, row, blocks = cuda.threadIdx.x, cuda.blockIdx.x, cuda.blockIdx.y, cuda.gridDim.x
        table = cuda.shared.array(segment, np.uint32)
        hits = cuda.shared.array(threads, np.uint32)
        counters = cuda.shared.array(COUNTERS, np.uint32)
        cell = cuda.shared.array(1, np.uint64)
        sums = cuda.shared.array(warps, np.float32)
        at, ints = row * requests.stride, requests.ints
        first, base = block * segment, row * vocab
        keep, lists, alternatives = ints[at + KEEP], ints[at + LISTS_WANTED], ints[at + ALTERNATIVES]
        begin, end, biases = ints[at + WORDS + block], ints[at + WORDS + block + 1], ints[at + BIASES]
        if thread < COUNTERS:
            counters[np.uint32(thread)] = 0
        hits[np.uint32(thread)] = 0
        cuda.syncthreads()
        late = ints[at + LATE] - 1  # behind the barrier: what is compared next must not hold up the reads above
        if late >= 0:
            late = local_of(requests.chosen[late], first, segment)
        changed = begin < end or late >= 0 or biases > 0
        a, b, c, d = load_entries(ints, begin, end, thread, threads)
        if changed:
            mark(a, b, c, d, ints, begin, end, late, hits, counters)
        let_next_start()
        wait_for_previous()
        if keep == 0:
            return
        if biases > 0:
            cuda.syncthreads()
            adjust_biased(logits, base, first, requests, at, begin, end, late, table, hits, counters)
        of_a, of_b, of_c, of_d = load_entry_logits(logits, base + first, a, b, c, d)  # these arrive before the others
        x = load(logits, base, first, thread, vocab)
        if changed and biases == 0:
            floats = requests.floats
            repeat, freq, present = floats[at + REPEAT], floats[at + FREQ], floats[at + PRESENT]
            put(of_a, a, late, repeat, freq, present, table)
            put(of_b, b, late, repeat, freq, present, table)
            put(of_c, c, late, repeat, freq, present, table)
            put(of_d, d, late, repeat, freq, present, table)
            adjust_more(logits, base, first, ints, begin, end, late, repeat, freq, present, table, counters)
            cuda.syncthreads()
        if alternatives >= 0:
            top = block_largest(largest(x), counters)
            equal = np.float32(cuda.popc(above(x, top)))
            total = block_sum(equal if top > HIGHEST else exp_sum(x, top), sums, warps)
            if thread == 0:
                scratch.partials[(row * blocks + block) * 2] = top
                scratch.partials[(row * blocks + block) * 2 + 1] = total
        for which in range(lists - 1, -1, -1):
            of_adjusted = which == 0 and changed
            if of_adjusted and hits[np.uint32(thread)] != 0:
                x = patched(x, thread, table, hits[np.uint32(thread)])
            wanted = keep if which == 0 else alternatives
            place = (row * LISTS + which) * blocks + block
            count = leave(x, wanted, first, scratch.candidates, place * CAPACITY, counters, which)
            if count > CAPACITY:
                end, out = min(vocab, first + segment), scratch.candidates
                count = one_by_one(
                    logits, base, first, end, wanted, table, hits, of_adjusted, out, place * CAPACITY, cell
                )
            if thread == 0:
                scratch.counts[place] = count

    return stage
