"""The sampling chain on the CPU: numba kernels, and `CpuSampler`, which hands them a step's rows.

The twin is `reference.py`: same token, same number kept, always. No kernel uses fast maths, and float sums and products
run in the order in which they are written, so a row's result depends on that row alone.

The work on a row of `vocab` logits is a few vector passes; the rest touches only the penalty window and the <= 64 kept
tokens. Bias and penalties are patched into the row and taken out again, so their cost follows the window and the logits
stay raw for whoever reads them next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ..jit import njit
from ..params import LOGPROBS_MAX, TOP_K_MAX, GenParams
from ..rows import Choice, Draw, Float32
from .philox import MULTIPLIER_0, MULTIPLIER_1, ROUNDS, WEYL_0, WEYL_1, WORD

LANES = 1024  # partial maxima of a row: many enough that the 64th largest of them is a tight bound
CHUNK = 512  # logits tested at once
LOWEST = np.float32(np.finfo(np.float32).min)  # under this is only -inf

_jit: Any = njit(nogil=True, cache=True, error_model="numpy")


@_jit
def lane_maxima(row, lanes):
    """lanes[j] = max of row[j], row[j + LANES], ...; -inf where there is none. NaN never wins a comparison.

    Element by element over two arrays, because LLVM does not vectorise a scalar float maximum without fast maths.
    """
    lanes[:] = -np.inf
    for start in range(0, len(row), LANES):
        part = row[start : start + LANES]
        for j in range(len(part)):
            lanes[j] = part[j] if part[j] > lanes[j] else lanes[j]


@_jit
def arg_max(row, lanes):
    """The id of the largest logit of `row`, the lowest where several are equal; 0 if all are -inf or NaN."""
    lane_maxima(row, lanes)
    best = lanes[0]
    for j in range(1, LANES):
        best = lanes[j] if lanes[j] > best else best
    if best < LOWEST:
        return 0
    for start in range(0, len(row), CHUNK):
        part = row[start : start + CHUNK]
        hits = 0
        for j in range(len(part)):
            hits += part[j] == best
        if hits > 0:
            for j in range(len(part)):
                if part[j] == best:
                    return start + j
    return 0


@_jit
def insert(values, ids, count, k, value, token):
    """Put (value, token) behind all that are as large, dropping the last of k; the new count."""
    at = count if count < k else k - 1
    while at > 0 and values[at - 1] < value:
        values[at], ids[at] = values[at - 1], ids[at - 1]
        at -= 1
    values[at], ids[at] = value, token
    return min(count + 1, k)


@_jit
def lower_bound(lanes, k, values, ids):
    """The k-th largest lane maximum: k logits are at least as large, so the k largest of the row are too."""
    count = 0
    for j in range(LANES):
        if lanes[j] >= LOWEST and (count < k or lanes[j] > values[k - 1]):
            count = insert(values, ids, count, k, lanes[j], 0)
    return values[k - 1] if count == k else LOWEST


@_jit
def top_k(row, k, lanes, values, ids):
    """Fill `values` and `ids` with the k largest of `row` by (value descending, id ascending); how many there are.

    Nothing at -inf or NaN is taken. Ids are visited in ascending order: behind a full list only a larger value enters.
    """
    lane_maxima(row, lanes)
    bound = lower_bound(lanes, k, values, ids)
    count = 0
    for start in range(0, len(row), CHUNK):
        part = row[start : start + CHUNK]
        hits = 0
        for j in range(len(part)):
            hits += part[j] >= bound
        if hits == 0:
            continue
        for j in range(len(part)):
            if part[j] >= bound and (count < k or part[j] > values[k - 1]):
                count = insert(values, ids, count, k, part[j], start + j)
        if count == k:
            bound = np.nextafter(values[k - 1], np.float32(np.inf))
    return count


@_jit
def uniform(seed, draw):
    """The twin of `philox.uniform`; seed and draw are uint64."""
    low, shift = np.uint64(WORD), np.uint64(32)
    c0, c1, c2, c3 = draw & low, draw >> shift, np.uint64(0), np.uint64(0)
    k0, k1 = seed & low, seed >> shift
    for _ in range(ROUNDS):
        product_0, product_1 = np.uint64(MULTIPLIER_0) * c0, np.uint64(MULTIPLIER_1) * c2
        c0, c1, c2, c3 = (
            (product_1 >> shift) ^ c1 ^ k0,
            product_1 & low,
            (product_0 >> shift) ^ c3 ^ k1,
            product_0 & low,
        )
        k0, k1 = (k0 + np.uint64(WEYL_0)) & low, (k1 + np.uint64(WEYL_1)) & low
    return np.float64(c0 >> np.uint64(8)) * 2.0**-24


@_jit
def exp_from_head(value, head, temperature):
    if value == head:  # also where both are inf
        return 1.0
    return math.exp((np.float64(value) - np.float64(head)) / temperature)


@_jit
def keep(values, count, min_p_log, top_p):
    """How many of the `count` >= 1 descending `values` min_p, then top_p, leave."""
    floor = min_p_log if min_p_log == -np.inf else values[0] + min_p_log  # an infinite head must not make it NaN
    kept = 1
    while kept < count and values[kept] >= floor:
        kept += 1
    if top_p == 1.0:
        return kept
    total = 0.0
    for i in range(kept):
        total += exp_from_head(values[i], values[0], 1.0)
    running = 0.0
    for i in range(kept):
        running += exp_from_head(values[i], values[0], 1.0)
        if running >= top_p * total:
            return i + 1
    return kept


@_jit
def pick(values, kept, temperature, u):
    """The index of the first of `kept` descending `values` whose running softmax sum exceeds `u`."""
    total = 0.0
    for i in range(kept):
        total += exp_from_head(values[i], values[0], temperature)
    running = 0.0
    for i in range(kept):
        running += exp_from_head(values[i], values[0], temperature)
        if running > u * total:
            return i
    return kept - 1


@_jit
def sample(row, k, min_p_log, top_p, temperature, u, lanes):
    """(token, kept): top_k, min_p, top_p, temperature and the draw on `row`; (0, 1) if all are -inf or NaN."""
    values, ids = np.empty(TOP_K_MAX, np.float32), np.empty(TOP_K_MAX, np.int32)
    count = top_k(row, k, lanes, values, ids)
    if count == 0:
        return 0, 1
    kept = keep(values, count, min_p_log, top_p)
    return ids[pick(values, kept, temperature, u)], kept


@_jit
def add_bias(row, ids, values, saved):
    """Add values[i] to row[ids[i]], in order; `saved` takes what was there."""
    for i in range(len(ids)):
        saved[i] = row[ids[i]]
        row[ids[i]] += values[i]


@_jit
def penalise(row, window, repeat, freq, present, counts, seen, saved):
    """Penalise each token id of `window` once, in `row`; how many ids `seen` and what they were, `saved`, take.

    `counts` [vocab] is all zero before and after.
    """
    n = 0
    for token in window:
        if counts[token] == 0:
            seen[n] = token
            n += 1
        counts[token] += 1
    for i in range(n):
        logit = row[seen[i]]
        saved[i] = logit
        logit = logit * repeat if logit <= 0 else logit / repeat
        row[seen[i]] = logit - (np.float32(counts[seen[i]]) * freq + present)
        counts[seen[i]] = 0
    return n


@_jit
def restore(row, ids, saved, n):
    """Undo a patch, last first, as an id may stand in it twice."""
    for i in range(n - 1, -1, -1):
        row[ids[i]] = saved[i]


@_jit
def log_sum_exp(row, head):
    """log of the sum of exp(l - head) over `row`, NaN as -inf, for its finite maximum `head`. float64.

    exp is 2^n * exp(r) with |r| <= ln(2) / 2 and exp(r) its Taylor sum; plain arithmetic, so that it vectorises, in
    CHUNK running sums, so that the order of additions is fixed. Adding 1.5 * 2^52 rounds x / ln(2) to n and leaves n in
    the low bits of the sum, from where a shift moves it into the exponent. Error: some 1e-15.
    """
    shifted, series = np.empty(CHUNK, np.float64), np.empty(CHUNK, np.float64)
    power = np.empty(CHUNK, np.float64)
    bits = power.view(np.int64)
    sums = np.zeros(CHUNK, np.float64)
    for start in range(0, len(row), CHUNK):
        part = row[start : start + CHUNK]
        for j in range(len(part)):
            below = np.float64(part[j]) - np.float64(head)
            x = below if below > -700.0 else -700.0  # NaN too; exp(-700) is nothing beside the head's 1
            rounded = x * 1.4426950408889634 + 6755399441055744.0
            n = rounded - 6755399441055744.0
            power[j] = rounded
            shifted[j] = (x - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10
        for j in range(len(part)):
            bits[j] = (bits[j] << 52) + (1023 << 52)
        for j in range(len(part)):
            r = shifted[j]
            s = 1.0 / 479001600.0
            s = s * r + 1.0 / 39916800.0
            s = s * r + 1.0 / 3628800.0
            s = s * r + 1.0 / 362880.0
            s = s * r + 1.0 / 40320.0
            s = s * r + 1.0 / 5040.0
            s = s * r + 1.0 / 720.0
            s = s * r + 1.0 / 120.0
            s = s * r + 1.0 / 24.0
            s = s * r + 1.0 / 6.0
            s = s * r + 0.5
            s = s * r + 1.0
            series[j] = s * r + 1.0
        for j in range(len(part)):
            sums[j] += series[j] * power[j]
    total = 0.0
    for j in range(CHUNK):
        total += sums[j]
    return math.log(total)


@_jit
def log_probabilities(row, token, count, lanes, out_ids, out_logprobs):
    """Log-softmax of the raw `row`: entry 0 for `token`, then the `count` best, ties to the lowest id.

    How many entries are filled; tokens at -inf are no alternatives. An infinite head is shared evenly.
    """
    values, ids = np.empty(TOP_K_MAX, np.float32), np.empty(TOP_K_MAX, np.int32)
    found = top_k(row, max(count, 1), lanes, values, ids)
    head = values[0] if found > 0 else np.float32(-np.inf)
    if math.isinf(head):
        equal = 0
        for logit in row:
            equal += logit == head or (found == 0)
        log_total = math.log(equal)
    else:
        log_total = log_sum_exp(row, head)
    out_ids[0], out_logprobs[0] = token, -log_total
    if row[token] != head and found > 0:
        out_logprobs[0] += np.float64(row[token]) - np.float64(head)
    filled = min(found, count)
    for i in range(filled):
        out_ids[i + 1], out_logprobs[i + 1] = ids[i], -log_total
        if values[i] != head:
            out_logprobs[i + 1] += np.float64(values[i]) - np.float64(head)
    return filled + 1


@_jit
def choose_rows(
    logits, reals, ints, words, history, bias_ids, bias_values, counts, lanes, tokens, kept, logprobs, alternatives
):
    """The choice for each row of `logits` [m, >= vocab] float32, which are as before when it returns.

    reals [m, 6] float64, ints [m, 5] int64, words [m, 2] uint64: see `_real_row`, `_int_row`, `_word_row`.
    history [*] int32 and bias_ids [*] int32, bias_values [*] float32: all rows' windows and biases, end to end.
    counts [vocab] uint16, zero; lanes [LANES] float32: scratch.
    tokens, kept [m] int32; alternatives [m, 1 + LOGPROBS_MAX] int32 and logprobs of that shape, float64: the results.
    """
    history_start = bias_start = 0
    for i in range(len(logits)):
        row = logits[i][: len(counts)]
        temperature, top_p, min_p_log = reals[i, 0], reals[i, 1], np.float32(reals[i, 2])
        repeat, freq, present = np.float32(reals[i, 3]), np.float32(reals[i, 4]), np.float32(reals[i, 5])
        k, wanted, history_end, bias_end = ints[i, 0], ints[i, 1], ints[i, 2], ints[i, 3]
        if temperature == 0.0 and history_start == history_end and bias_start == bias_end:
            tokens[i], kept[i] = arg_max(row, lanes), 1
        else:
            window, ids = history[history_start:history_end], bias_ids[bias_start:bias_end]
            saved, saved_bias = np.empty(len(window), np.float32), np.empty(len(ids), np.float32)
            seen = np.empty(len(window), np.int32)
            add_bias(row, ids, bias_values[bias_start:bias_end], saved_bias)
            n = penalise(row, window, repeat, freq, present, counts, seen, saved)
            if temperature == 0.0:
                tokens[i], kept[i] = arg_max(row, lanes), 1
            else:
                u = uniform(words[i, 0], words[i, 1])
                tokens[i], kept[i] = sample(row, k, min_p_log, top_p, temperature, u, lanes)
            restore(row, seen, saved, n)
            restore(row, ids, saved_bias, len(ids))
        if wanted >= 0:
            ints[i, 4] = log_probabilities(row, tokens[i], wanted, lanes, alternatives[i], logprobs[i])
        history_start, bias_start = history_end, bias_end


def _real_row(params: GenParams) -> tuple[float, ...]:
    """One row of `reals`: temperature, top_p, log(min_p) or -inf where it is off, the three penalties."""
    min_p_log = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    penalties = params.penalty_repeat, params.penalty_freq, params.penalty_present
    return params.temperature, params.top_p, min_p_log, *penalties


def _int_row(params: GenParams, history_end: int, bias_end: int) -> tuple[int, ...]:
    """One row of `ints`: top_k, alternatives wanted (-1: no log-probabilities), two ends, room for how many came."""
    wanted = -1 if params.logprobs is None else params.logprobs
    return params.top_k, wanted, history_end, bias_end, 0


def _word_row(draw: Draw) -> tuple[int, int]:
    """One row of `words`: seed and draw index; both unused, so 0, in a greedy row."""
    if not draw.params.sampled:
        return 0, 0
    if draw.params.seed is None:
        raise ValueError("a sampled row needs a seed")
    return draw.params.seed, draw.index


def _window(draw: Draw) -> np.ndarray:
    """The tokens to penalise, [<= penalty_last_n] int32; none without a penalty, whatever the history holds."""
    if not draw.params.penalised:
        return _NO_TOKENS
    return draw.history[-draw.params.penalty_last_n :]


_NO_TOKENS = np.empty(0, np.int32)
_NO_VALUES = np.empty(0, np.float32)


class CpuSampler:
    """Chooses a token for each row of a step. One thread at a time: it owns scratch of one row's size."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.kept = np.empty(0, np.int32)  # [m] tokens left to draw from in each row of the last `choose`; 1 if greedy
        self._counts = np.zeros(vocab, np.uint16)
        self._lanes = np.empty(LANES, np.float32)

    def choose(self, logits: Float32, draws: Sequence[Draw]) -> list[Choice]:
        """One choice a row of raw `logits` [m, >= vocab] (C-contiguous, writable; patched and restored on the way).

        Columns past the vocabulary are padding: neither read nor written.

        Token ids of histories and biases are inside the vocabulary: who parsed the request has checked it, and nothing
        here does. ValueError if the logits do not fit or a sampled row has no seed.
        """
        m = len(draws)
        if len(logits) != m or logits.ndim != 2 or logits.shape[1] < self.vocab or logits.dtype != np.float32:
            raise ValueError(f"{m} draws need float32 logits [{m}, {self.vocab}], got {logits.dtype} {logits.shape}")
        if not (logits.flags.c_contiguous and logits.flags.writeable):
            raise ValueError("the sampler needs logits that are C-contiguous and writable")
        if m == 0:
            return []
        tokens, self.kept = np.empty(m, np.int32), np.empty(m, np.int32)
        shape = (m, 1 + LOGPROBS_MAX) if any(draw.params.logprobs is not None for draw in draws) else (m, 1)
        logprobs, alternatives = np.empty(shape, np.float64), np.empty(shape, np.int32)
        reals, ints, words, *lists = self._pack(draws)
        scratch = self._counts, self._lanes
        choose_rows(logits, reals, ints, words, *lists, *scratch, tokens, self.kept, logprobs, alternatives)
        return [
            Choice(token) if draw.params.logprobs is None else _with_logprobs(ids[:n], values[:n])
            for draw, token, ids, values, n in zip(
                draws, tokens.tolist(), alternatives, logprobs, ints[:, 4].tolist(), strict=True
            )
        ]

    def _pack(self, draws: Sequence[Draw]) -> tuple[np.ndarray, ...]:
        """The tables that `choose_rows` reads: reals, ints, words, history, bias ids, bias values."""
        params = [draw.params for draw in draws]
        windows = [_window(draw) for draw in draws]
        ends = accumulate(map(len, windows)), accumulate(len(p.logit_bias) for p in params)
        biases = [pair for p in params for pair in p.logit_bias]
        return (
            np.array([_real_row(p) for p in params], np.float64),
            np.array([_int_row(*row) for row in zip(params, *ends, strict=True)], np.int64),
            np.array([_word_row(draw) for draw in draws], np.uint64),
            np.concatenate(windows, dtype=np.int32),
            np.array([i for i, _ in biases], np.int32) if biases else _NO_TOKENS,
            np.array([value for _, value in biases], np.float32) if biases else _NO_VALUES,
        )

    def warm_up(self) -> None:
        """Compile the kernels, or load them from numba's cache on disk: the first `choose` will not wait for them."""
        self.choose(np.zeros((1, self.vocab), np.float32), [Draw(GenParams(), 0, _NO_TOKENS)])


def _with_logprobs(ids: np.ndarray, logprobs: np.ndarray) -> Choice:
    """A choice with log-probabilities; entry 0 is the chosen token, the rest are the alternatives."""
    (token, *others), (logprob, *values) = ids.tolist(), logprobs.tolist()
    return Choice(token, logprob, tuple(zip(others, values, strict=True)))
