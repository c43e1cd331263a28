"""Drafts do not bend the distribution: 20,000 draws at one place behind accepted drafts, against the exact one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from scheduler_fake import Answer, Clock, ask, request

from strata_engine.params import GenParams
from strata_engine.rows import Choice, Draw, Float32, Rows
from strata_engine.sampling.cpu import CpuSampler
from strata_engine.sampling.reference import Chain, exp_from_head
from strata_engine.scheduler import Scheduler

VOCAB, COUNT = 24, 20_000
PROMPT = (*range(1, 9), *range(1, 9), 1, 2)  # 3 comes with the prompt, then the drafts are 4, 5, 6
FORK = 5  # 3, 4 and 5 follow for certain; what follows 5 is drawn, and the draft for it is 6
PLACE = 3  # of that draw in the output: the third row of the first window
SAMPLED = {"temperature": 0.9, "top_k": 12, "top_p": 0.97, "min_p": 0.02}
PENALISED = {**SAMPLED, "penalty_repeat": 1.2, "penalty_present": 0.4, "penalty_freq": 0.1, "penalty_last_n": 12}


def table() -> Float32:
    """Logits [token, vocab] by the last token: the next one for certain, several after FORK."""
    logits = np.full((VOCAB, VOCAB), -30.0, np.float32)
    logits[np.arange(VOCAB), (np.arange(VOCAB) + 1) % VOCAB] = 30.0
    logits[FORK] = np.random.default_rng(5).normal(0.0, 1.0, VOCAB)
    logits[FORK, 6] = 2.0  # the draft is likely, and the penalties see it and what stands before it
    return logits


class MarkovBackend:
    """A backend whose logits follow from the last token alone, with the real sampler."""

    device, feeds, vocab, context, slots, max_rows = "cpu", False, VOCAB, 64, 1, 512

    def __init__(self) -> None:
        self.clock = Clock()
        self._table, self._sampler = table(), CpuSampler(VOCAB)
        self._logits = np.empty((0, VOCAB), np.float32)

    def forward(self, rows: Rows) -> None:
        self._logits = self._table[rows.token[rows.wanted]]
        self.clock.now += 0.01

    def choose(self, draws: Sequence[Draw]) -> list[Choice]:
        return self._sampler.choose(self._logits, draws)

    def logits(self) -> Float32:
        return self._logits.copy()

    def close(self) -> None:
        pass


def draw_all(scheduler: Scheduler, count: int, **params) -> list[Answer]:
    answers = [ask(scheduler, request(PROMPT, PLACE + 2, seed=seed, **params)) for seed in range(count)]
    assert all(answer.done() for answer in answers)
    return answers


def exact(params: dict) -> np.ndarray:
    """The probabilities [vocab] of the token at PLACE."""
    chain, asked = Chain(), GenParams(**params)
    history = np.array([*PROMPT, 3, 4, FORK], np.int32)
    scores = chain.penalise(table()[FORK], asked, chain.window(history, asked))
    ids = chain.keep(scores, asked)
    weights = exp_from_head(scores[ids], asked.temperature)
    probabilities = np.zeros(VOCAB)
    probabilities[ids] = weights / weights.sum()
    return probabilities


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """The statistic over the possible tokens, and its degrees of freedom."""
    possible = probabilities > 0
    assert not counts[~possible].any(), "a token that the chain cuts"
    wanted = probabilities[possible] * counts.sum()
    assert wanted.min() > 20
    return float(((counts[possible] - wanted) ** 2 / wanted).sum()), int(possible.sum()) - 1


def critical(freedom: int) -> float:
    """What chi-square passes once in a thousand times (the approximation of Wilson and Hilferty, 1931)."""
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + 3.09 * spread**0.5) ** 3


@pytest.mark.parametrize("params", [SAMPLED, PENALISED], ids=["sampled", "penalised"])
def test_the_distribution_behind_accepted_drafts_is_the_targets(start, params):
    answers = draw_all(start(MarkovBackend(), queue=COUNT), COUNT, **params)
    assert min(answer.done().drafts_accepted for answer in answers) >= 2, "the place is behind two accepted drafts"
    right = sum(answer.ids[PLACE] == 6 for answer in answers)
    assert 0.1 < right / COUNT < 0.9, "the draft for it is accepted and rejected"
    counts = np.bincount([answer.ids[PLACE] for answer in answers], minlength=VOCAB)
    statistic, freedom = chi_square(counts, exact(params))
    assert statistic < critical(freedom)


def test_the_statistic_sees_a_draft_that_is_favoured():
    """Three in a hundred draws turned into the draft would not pass."""
    counts = exact(SAMPLED) * COUNT * 0.97
    counts[6] += 0.03 * COUNT
    statistic, freedom = chi_square(counts, exact(SAMPLED))
    assert statistic > critical(freedom)


def test_the_same_seeds_without_drafts_draw_the_same(start):
    scheduler = start(MarkovBackend(), queue=1000)
    drafted, plain = (draw_all(scheduler, 400, draft=draft, **PENALISED) for draft in (7, 0))
    assert [answer.ids for answer in drafted] == [answer.ids for answer in plain]
