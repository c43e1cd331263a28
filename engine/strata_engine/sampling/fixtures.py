"""What a sampler of any device must do, as fixtures that first prove that they can see it done wrong.

A fixture is a check on a `Choose`: what differs, or "" where all is right. It names samplers that are broken in the
very feature it watches; one that it lets pass makes it blind, and a blind fixture counts as failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..params import KEYS, SEED_MAX, GenParams
from ..rows import Choice, Draw, Float32, Int32
from .reference import Chain, Float64, Int64, Reference, best, log_softmax, top_logprobs, without_nan

Choose = Callable[[Float32, Sequence[Draw]], list[Choice]]
NO_TOKENS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class Case:
    """A stored row with the right answer."""

    logits: Float32
    draw: Draw
    token: int
    kept: int | None  # None in a greedy case, as `u`
    u: float | None

    @classmethod
    def parse(cls, case: dict[str, Any]) -> Case:
        """A case of `tests/data/sampler.json`; that file's `meta` says how its logits are made.

        Raises LookupError, TypeError or ValueError for a damaged one.
        """
        for name, kind in NUMBERS.items():
            value = ({"kept": 0, "u": 0.0} | case)[name]
            if not isinstance(value, kind):
                raise TypeError(f"{name} {value!r} is no {kind.__name__}")
        noise = np.random.RandomState(case["logits_seed"]).standard_normal(case["vocab"])
        logits = (noise * case["scale"]).astype(np.float32)
        for target, source in case.get("copies", ()):
            logits[target] = logits[source]
        params = dict(case["params"])
        index = params.pop("draw")
        draw = Draw(_checked(GenParams(**params)), index, np.array(case.get("history", ()), np.int32))
        if not all(0 <= token < len(logits) for token in draw.history):
            raise ValueError(f"the history is outside the vocabulary 0..{len(logits) - 1}")
        if not 0 <= index <= SEED_MAX:
            raise ValueError(f"draw {index} must be in 0..2^64-1")
        return cls(logits, draw, case["token"], case.get("kept"), case.get("u"))

    def mismatch(self, choose: Choose) -> str:
        """How the answer of `choose` differs from the right one; "" if it does not."""
        token = choose(self.logits[None].copy(), [self.draw])[0].token
        return "" if token == self.token else f"token {token}, not {self.token}"

    def reference_mismatch(self) -> str:
        """How the NumPy reference differs from the right answer; "" if it does not."""
        found = Chain().choose(self.logits, self.draw.params, self.draw.history, self.draw.index)
        right = (self.token, self.kept or 1, None if self.u is None else f"{self.u:.8f}")
        got = (found.token, found.kept, None if found.u is None else f"{found.u:.8f}")
        return "" if got == right else f"reference: (token, kept, u) {got}, not {right}"


def _checked(params: GenParams) -> GenParams:
    """`params` if a request could carry them. Raises TypeError or ValueError."""
    for key in KEYS:
        value = getattr(params, key.name)
        if key.kind in ("float", "int") and value != key.default and not key.in_range(value):
            raise ValueError(f"{key.name} {value} must be {key.rule}")
    if params.sampled and params.seed is None:
        raise ValueError("a sampled case needs a seed")
    return params


NUMBERS = {"vocab": int, "logits_seed": int, "token": int, "kept": int, "u": float}  # of a stored case


@dataclass(frozen=True, slots=True)
class Fixture:
    name: str
    check: Callable[[Choose], str]
    broken: tuple[Choose, ...]

    def run(self, choose: Choose) -> str:
        """What is wrong with `choose`, or with the fixture itself; "" if nothing is."""
        for i, broken in enumerate(self.broken):
            if not self.check(broken):
                return f"blind: cannot tell broken sampler {i + 1} from a right one"
        return self.check(choose)


def sampler(chain: Chain) -> Choose:
    """A `Choose` that runs `chain`, row by row."""

    def choose(logits: Float32, draws: Sequence[Draw]) -> list[Choice]:
        return [_choice(chain, row, draw) for row, draw in zip(logits, draws, strict=True)]

    return choose


def _choice(chain: Chain, row: Float32, draw: Draw) -> Choice:
    token = chain.choose(row, draw.params, draw.history, draw.index).token
    if draw.params.logprobs is None:
        return Choice(token)
    return Choice(token, float(log_softmax(row)[token]), top_logprobs(row, draw.params.logprobs))


reference = sampler(Chain())
FIXTURES: list[Fixture] = []


def fixture(name: str, *broken: Choose) -> Callable[[Callable[[Choose], str]], Callable[[Choose], str]]:
    """Register the decorated check."""

    def register(check: Callable[[Choose], str]) -> Callable[[Choose], str]:
        FIXTURES.append(Fixture(name, check, broken))
        return check

    return register


def row(*logits: float) -> Float32:
    return np.array(logits, np.float32)


def tokens_of(choose: Choose, logits: Float32, draws: Sequence[Draw]) -> list[int]:
    """The tokens chosen from one row [vocab] under each of `draws`, or from a row for each [m, vocab]."""
    rows = np.tile(logits, (len(draws), 1)) if logits.ndim == 1 else logits.copy()
    return [choice.token for choice in choose(rows, draws)]


def token(choose: Choose, logits: Float32, history: Sequence[int] = (), **params: Any) -> int:
    """The token chosen from `logits` [vocab] with `params`."""
    return tokens_of(choose, logits, [Draw(GenParams(**params), 0, np.array(history, np.int32))])[0]


def expect(found: object, right: object, what: str = "tokens") -> str:
    return "" if found == right else f"{what} {_short(found)}, not {_short(right)}"


def like_reference(choose: Choose, logits: Float32, draws: Sequence[Draw]) -> str:
    found, right = tokens_of(choose, logits, draws), tokens_of(reference, logits, draws)
    wrong = [i for i, pair in enumerate(zip(found, right, strict=True)) if pair[0] != pair[1]]
    return f"{len(wrong)} of {len(draws)} rows, the first {found[wrong[0]]}, not {right[wrong[0]]}" if wrong else ""


def draws_of(count: int, history: Sequence[int] = (), **params: Any) -> list[Draw]:
    """`count` draws, one after the other, of one request."""
    return [Draw(GenParams(**params), i, np.array(history, np.int32)) for i in range(count)]


def noise(seed: int, *shape: int) -> Float32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class TiesToHighest(Chain):
    def arg_max(self, scores: Float32) -> int:
        return len(scores) - 1 - int(np.argmax(scores[::-1]))

    def top_k(self, scores: Float32, k: int) -> Int64:
        return len(scores) - 1 - best(scores[::-1], k)


@fixture("greedy arg-max, ties to the lowest id", sampler(TiesToHighest()))
def greedy_ties(choose: Choose) -> str:
    wide = noise(1, 49152)
    wide[[40_000, 1_025, 31_111]] = 9.0
    rows = [row(1, 3, 3, 2), row(-1, -2, -1), np.zeros(33, np.float32), row(0.0, -0.0), row(-0.0, 0.0), wide]
    return expect([token(choose, logits) for logits in rows], [1, 0, 0, 0, 0, 1_025])


class TemperatureFirst(Chain):
    def keep(self, scores: Float32, params: GenParams) -> Int64:
        return super().keep((scores / params.temperature).astype(np.float32), params)


class TopPBeforeMinP(Chain):
    def keep(self, scores: Float32, params: GenParams) -> Int64:
        ids = self.top_k(scores, params.top_k)
        ids = self.top_p(ids, scores[ids], params.top_p)
        return self.min_p(ids, scores[ids], params.min_p)


class TopPBeforeTopK(Chain):
    def keep(self, scores: Float32, params: GenParams) -> Int64:
        ids = best(scores, len(scores))
        ids = self.top_p(ids, scores[ids], params.top_p)[: params.top_k]
        return self.min_p(ids, scores[ids], params.min_p)


class BiasAfterPenalties(Chain):
    def bias(self, logits: Float32, params: GenParams) -> Float32:
        return logits

    def penalise(self, logits: Float32, params: GenParams, window: Int32) -> Float32:
        return super().bias(super().penalise(logits, params, window), params)


@fixture(
    "the order of the stages",
    *map(sampler, (TemperatureFirst(), TopPBeforeMinP(), TopPBeforeTopK(), BiasAfterPenalties())),
)
def stage_order(choose: Choose) -> str:
    common: dict[str, Any] = {"temperature": 2.5, "seed": 5}
    spread = row(*np.linspace(2.0, -2.0, 40))
    draws = draws_of(200, top_p=0.6, min_p=0.2, **common) + draws_of(200, top_k=4, top_p=0.7, **common)
    biased = token(choose, row(0, 2.5), [0], penalty_repeat=2.0, logit_bias=((0, 4.0),))
    return like_reference(choose, spread, draws) or expect(biased, 1, "with bias, token")


class GreedyDraws(Chain):
    def choose(self, logits: Float32, params: GenParams, history: Int32, index: int) -> Reference:
        drawn = params if params.sampled else replace(params, temperature=1.0, seed=params.seed or 0)
        return super().choose(logits, drawn, history, index)


@fixture("greedy ignores the seed and the draw index", sampler(GreedyDraws()))
def greedy_seed(choose: Choose) -> str:
    draws = [Draw(GenParams(seed=seed), index, NO_TOKENS) for seed in (0, 1, 2**64 - 1) for index in range(20)]
    return expect(set(tokens_of(choose, row(1.0, 1.1, 1.0), draws)), {1})


class RepeatDivides(Chain):
    def penalise(self, logits: Float32, params: GenParams, window: Int32) -> Float32:
        penalised = logits.copy()
        penalised[window] = logits[window] / np.float32(params.penalty_repeat)
        return penalised


class RepeatMultiplies(RepeatDivides):
    def penalise(self, logits: Float32, params: GenParams, window: Int32) -> Float32:
        return super().penalise(logits, replace(params, penalty_repeat=1 / params.penalty_repeat), window)


@fixture(
    "repeat multiplies negative logits, divides positive ones", *map(sampler, (RepeatDivides(), RepeatMultiplies()))
)
def repeat_sign(choose: Choose) -> str:
    rows = row(-1.0, -1.5), row(3.0, 2.0)
    return expect([token(choose, logits, [0], penalty_repeat=2.0) for logits in rows], [1, 1])


class PresenceCounts(Chain):
    def penalise(self, logits: Float32, params: GenParams, window: Int32) -> Float32:
        counted = params.penalty_freq + params.penalty_present
        return super().penalise(logits, replace(params, penalty_freq=counted, penalty_present=0.0), window)


class FrequencyIsFlag(Chain):
    def penalise(self, logits: Float32, params: GenParams, window: Int32) -> Float32:
        return super().penalise(logits, params, np.unique(window))


@fixture("presence is a flag, frequency a count", *map(sampler, (PresenceCounts(), FrequencyIsFlag())))
def presence_flag(choose: Choose) -> str:
    logits, history = row(2.0, 1.0), [0, 0, 0]
    found = token(choose, logits, history, penalty_present=0.6), token(choose, logits, history, penalty_freq=0.6)
    return expect(found, (0, 1))


@fixture("temperature 0 is the arg-max, whatever else is set", sampler(GreedyDraws()))
def temperature_0(choose: Choose) -> str:
    logits = noise(2, 100) * np.float32(0.1)
    draws = draws_of(20, seed=3, top_k=50, top_p=0.9, min_p=0.01) + draws_of(20, seed=3, temperature=1e-9)
    return expect(set(tokens_of(choose, logits, draws)), {int(np.argmax(logits))})


class NoPenalties(Chain):
    def penalise(self, logits: Float32, params: GenParams, window: Int32) -> Float32:
        return logits


class NoTemperature(Chain):
    def draw(self, ids: Int64, weights: Float64, u: np.float32) -> int:
        return super().draw(ids, weights**0.8, u)  # undoes the fixture's temperature of 0.8


class NoTopP(Chain):
    def top_p(self, ids: Int64, logits: Float32, top_p: float) -> Int64:
        return ids


@fixture("the full chain with penalties", *map(sampler, (NoPenalties(), NoTemperature(), NoTopP())))
def full_chain(choose: Choose) -> str:
    penalties = {"penalty_repeat": 1.3, "penalty_freq": 0.2, "penalty_present": 0.4}
    params: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 11, **penalties}
    history = np.random.default_rng(3).integers(0, 1000, 300).tolist()
    return like_reference(choose, noise(4, 200, 1000) * 2, draws_of(200, history, penalty_last_n=256, **params))


class NoMinP(Chain):
    def min_p(self, ids: Int64, logits: Float32, min_p: float) -> Int64:
        return ids


class MinPOfWhole(Chain):
    def min_p(self, ids: Int64, logits: Float32, min_p: float) -> Int64:
        probabilities = np.exp(logits) / np.exp(logits).sum()
        return ids[: max(1, int(np.count_nonzero(probabilities >= min_p)))]


@fixture("min_p at 0, 0.5 and 0.9", *map(sampler, (NoMinP(), MinPOfWhole())))
def min_p_values(choose: Choose) -> str:
    logits = row(*(math.log(p) for p in (0.4, 1.0, 0.05, 0.6, 0.95)))
    flat: dict[str, Any] = {"temperature": 1e6, "seed": 6}
    found = [set(tokens_of(choose, logits, draws_of(200, min_p=min_p, **flat))) for min_p in (0.0, 0.5, 0.9)]
    return expect(found, [{0, 1, 2, 3, 4}, {1, 3, 4}, {1, 4}], "tokens drawn")


class WindowIsHead(Chain):
    def window(self, history: Int32, params: GenParams) -> Int32:
        return history[: params.penalty_last_n]


class WindowIsAll(Chain):
    def window(self, history: Int32, params: GenParams) -> Int32:
        return history


@fixture("the penalty window is the tail of the history", *map(sampler, (WindowIsHead(), WindowIsAll())))
def window_tail(choose: Choose) -> str:
    return expect(token(choose, row(1.0, 1.5, 0.5), [0, 2, 0, 1], penalty_present=2.0, penalty_last_n=1), 0, "token")


class PenaltiesTwice(Chain):
    def penalise(self, logits: Float32, params: GenParams, window: Int32) -> Float32:
        return super().penalise(super().penalise(logits, params, window), params, window)


@fixture("penalties apply once (8,000 draws)", *map(sampler, (PenaltiesTwice(), NoPenalties())))
def penalties_once(choose: Choose) -> str:
    found = tokens_of(choose, row(1.0, 0.0), draws_of(8000, [0], temperature=1.0, seed=9, penalty_present=1.0))
    share = sum(found) / len(found)
    return "" if abs(share - 0.5) < 0.028 else f"share of token 1 {share:.3f}, not 0.500"  # 5 standard deviations


class StaleHistory(Chain):
    def penalise(self, logits: Float32, params: GenParams, window: Int32) -> Float32:
        return super().penalise(logits, replace(params, penalty_last_n=64), window)

    def window(self, history: Int32, params: GenParams) -> Int32:
        return history


@fixture("a stale history with penalty_last_n 0 is inert", sampler(StaleHistory()))
def stale_history(choose: Choose) -> str:
    return expect(token(choose, row(2.0, 1.0), [0] * 8, penalty_present=2.0, penalty_last_n=0), 0, "token")


class ShortIndex(Chain):
    def uniform(self, seed: int, index: int) -> np.float32:
        return super().uniform(seed, index & 0xFFFFFFFF)


def neighbour(logits: Float32, draws: Sequence[Draw]) -> list[Choice]:
    """Broken: every row takes the draw index of the first."""
    return reference(logits, [replace(draw, index=draws[0].index) for draw in draws])


@fixture("32 rows are 32 single rows are a repeat, past draw 2^32", sampler(ShortIndex()), neighbour)
def batch_of_32(choose: Choose) -> str:
    logits = noise(7, 32, 1000)
    history = np.arange(40, dtype=np.int32)
    draws = [
        Draw(GenParams(i % 4 * 0.5, seed=i, penalty_freq=i % 3 * 0.1), 2**32 - 16 + i * 2**20, history)
        for i in range(32)
    ]
    together = tokens_of(choose, logits, draws)
    singles = [tokens_of(choose, logits[i], [draws[i]])[0] for i in range(32)]
    return (
        expect(singles, together, "single rows")
        or expect(tokens_of(choose, logits, draws), together, "repeat")
        or like_reference(choose, logits, draws)
    )


WIDE_SETS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 64, "min_p": 0.05},
    {"temperature": 5.0, "top_k": 1},
    {"temperature": 0.9, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.2, "penalty_freq": 0.1},
)


@fixture("248,320 tokens with duplicates, five parameter sets", sampler(TiesToHighest()))
def wide_vocabulary(choose: Choose) -> str:
    logits = noise(8, 248_320)
    ids = best(logits, 32)
    logits[np.random.default_rng(8).integers(0, 248_320, 64)] = np.repeat(logits[ids], 2)
    draws = [draw for i, params in enumerate(WIDE_SETS) for draw in draws_of(8, ids[:9].tolist(), seed=i, **params)]
    return like_reference(choose, logits, draws)


class NanWins(Chain):
    def arg_max(self, scores: Float32) -> int:
        return int(np.argmax(np.where(np.isneginf(scores), np.inf, scores)))

    def top_k(self, scores: Float32, k: int) -> Int64:
        return best(np.where(np.isneginf(scores), np.float32(np.inf), scores), k)


@fixture("NaN, -inf and all-equal rows give a valid id", sampler(NanWins()))
def odd_rows(choose: Choose) -> str:
    nan, inf = math.nan, math.inf
    rows = np.array([[nan] * 5, [-inf] * 5, [nan, -inf, nan, 1, nan], [-inf, 2, nan, 2, 1], [3] * 5], np.float32)
    narrow = {"temperature": 1e-9, "seed": 1, "top_p": 0.5, "min_p": 0.5}
    sets: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 1}, narrow)
    for params in sets:
        draws = draws_of(len(rows), **params)
        wrong = like_reference(choose, rows, draws)
        for found, logits in zip(tokens_of(choose, rows, draws), rows, strict=True):
            possible = np.flatnonzero(without_nan(logits) > -inf).tolist() or [0]
            wrong = wrong or ("" if found in possible else f"token {found}, not one of {possible}")
        if wrong:
            return wrong
    return ""


def logprobs_of_scores(logits: Float32, draws: Sequence[Draw]) -> list[Choice]:
    """Broken: log-probabilities after bias and penalties."""
    chain = Chain()
    scores = [
        chain.penalise(chain.bias(logits[i], d.params), d.params, chain.window(d.history, d.params))
        for i, d in enumerate(draws)
    ]
    return reference(np.stack(scores), draws)


@fixture("log-probabilities are those of the raw logits", logprobs_of_scores)
def raw_logprobs(choose: Choose) -> str:
    logits = noise(10, 8, 1000)
    params: dict[str, Any] = {"logprobs": 20, "penalty_present": 2.0, "logit_bias": ((5, 3.0),)}
    draws = draws_of(8, list(range(500)), temperature=0.7, seed=2, **params)
    for found, right in zip(choose(logits.copy(), draws), reference(logits, draws), strict=True):
        wrong = expect([i for i, _ in found.top], [i for i, _ in right.top], "alternatives")
        wrong = wrong or _logprob_difference(found, right)
        if wrong:
            return wrong
    return ""


def _logprob_difference(found: Choice, right: Choice) -> str:
    if found.logprob is None or right.logprob is None:
        return f"log-probability {found.logprob}"
    pairs = [(found.logprob, right.logprob), *((a[1], b[1]) for a, b in zip(found.top, right.top, strict=True))]
    error = max(abs(a - b) for a, b in pairs)
    return "" if error < 1e-6 else f"log-probabilities off by {error:.3g}"
