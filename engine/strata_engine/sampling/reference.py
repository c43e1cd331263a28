"""The sampling chain in plain NumPy: what every kernel of this folder must reproduce, token for token.

Logits are compared and penalised in float32; probabilities are float64 sums over the few tokens that are left, never
divided by their total, so that equal logits have exactly equal shares. NaN counts as -inf. A token at -inf is never
kept, unless every one of the row is: then the lowest id is chosen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..params import GenParams
from ..rows import Float32, Int32
from .philox import uniform

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reference:
    """What the chain makes of one row."""

    token: int
    kept: int  # tokens left to draw from; 1 for a greedy row
    u: np.float32 | None  # the number drawn; None for a greedy row


def without_nan(logits: Float32) -> Float32:
    """A copy of `logits` with -inf for NaN."""
    return np.where(np.isnan(logits), np.float32(-np.inf), logits)


def best(logits: Float32, count: int) -> Int64:
    """The first `count` ids by logit descending, then id ascending. Only what can be among them is sorted."""
    candidates = np.arange(len(logits))
    if count < len(logits):
        candidates = np.flatnonzero(logits >= np.partition(logits, -count)[-count])
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]


def exp_from_head(logits: Float32, temperature: float = 1.0) -> Float64:
    """exp((l - l[0]) / temperature) in float64 for a descending `logits`; what equals the head gives 1, inf or not.

    Shifting before dividing keeps every exponent <= 0: no temperature overflows.
    """
    shift = np.zeros(len(logits))
    below = logits != logits[0]
    with np.errstate(over="ignore", divide="ignore"):
        shift[below] = (logits[below].astype(np.float64) - np.float64(logits[0])) / temperature
    return np.exp(shift)


class Chain:
    """The stages in their order. The parity fixtures replace one at a time to see that its absence shows."""

    def choose(self, logits: Float32, params: GenParams, history: Int32, index: int) -> Reference:
        """The choice for a row of `logits` [vocab]; `history` is the prompt and output before it, oldest first."""
        scores = self.penalise(self.bias(without_nan(logits), params), params, self.window(history, params))
        if not params.sampled:
            return Reference(self.arg_max(scores), 1, None)
        assert params.seed is not None, "a sampled request has a seed"
        ids = self.keep(scores, params)
        u = self.uniform(params.seed, index)
        return Reference(self.draw(ids, exp_from_head(scores[ids], params.temperature), u), len(ids), u)

    def window(self, history: Int32, params: GenParams) -> Int32:
        """The tokens that the penalties look at: the last `penalty_last_n`."""
        return history[max(0, len(history) - params.penalty_last_n) :]

    def bias(self, logits: Float32, params: GenParams) -> Float32:
        biased = logits.copy()
        for token, value in params.logit_bias:
            biased[token] += np.float32(value)
        return biased

    def penalise(self, logits: Float32, params: GenParams, window: Int32) -> Float32:
        """float32: l <= 0 -> l * repeat, else l / repeat; then l - (count * freq + present), once a token id."""
        if not params.penalised:
            return logits
        ids, counts = np.unique(window, return_counts=True)
        seen, repeat = logits[ids], np.float32(params.penalty_repeat)
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            seen = np.where(seen <= 0, seen * repeat, seen / repeat)
        seen = seen - (counts.astype(np.float32) * np.float32(params.penalty_freq) + np.float32(params.penalty_present))
        penalised = logits.copy()
        penalised[ids] = without_nan(seen)  # -inf times a repeat that underflows to 0
        return penalised

    def arg_max(self, scores: Float32) -> int:
        """The largest, ties to the lowest id."""
        return int(np.argmax(scores))

    def keep(self, scores: Float32, params: GenParams) -> Int64:
        """The ids to draw from, best first."""
        ids = self.top_k(scores, params.top_k)
        ids = self.min_p(ids, scores[ids], params.min_p)
        return self.top_p(ids, scores[ids], params.top_p)

    def top_k(self, scores: Float32, k: int) -> Int64:
        ids = best(scores, k)
        return ids[: max(1, int(np.count_nonzero(scores[ids] > -np.inf)))]

    def min_p(self, ids: Int64, logits: Float32, min_p: float) -> Int64:
        if min_p == 0.0:
            return ids
        floor = logits[0] + np.float32(math.log(min_p))
        return ids[: max(1, int(np.count_nonzero(logits >= floor)))]

    def top_p(self, ids: Int64, logits: Float32, top_p: float) -> Int64:
        """Up to and with the first token at which the running sum reaches `top_p` of the whole."""
        if top_p == 1.0:
            return ids
        running = np.cumsum(exp_from_head(logits))
        return ids[: int(np.argmax(running >= top_p * running[-1])) + 1]

    def uniform(self, seed: int, index: int) -> np.float32:
        return uniform(seed, index)

    def draw(self, ids: Int64, weights: Float64, u: np.float32) -> int:
        """The first id whose running sum exceeds `u` of the whole. u < 1, so there is always one."""
        running = np.cumsum(weights)
        return int(ids[int(np.argmax(running > np.float64(u) * running[-1]))])


def choose_reference(logits: Float32, params: GenParams, history: Int32, index: int) -> Reference:
    """The chain's choice for one row; see `Chain.choose`."""
    return Chain().choose(logits, params, history, index)


def log_softmax(logits: Float32) -> Float64:
    """Log-probabilities [vocab] of raw `logits` [vocab]. Infinite heads (and an all -inf row) share evenly."""
    row = without_nan(logits).astype(np.float64)
    head = row.max()
    shift = np.zeros(len(row))
    below = row != head
    shift[below] = row[below] - head
    return shift - math.log(np.exp(shift).sum())


def top_logprobs(logits: Float32, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest (id, log-probability), best first, ties to the lowest id; none at -inf."""
    if count == 0:
        return ()
    row, logprobs = without_nan(logits), log_softmax(logits)
    return tuple((int(i), float(logprobs[i])) for i in best(row, count) if row[i] > -np.inf)
