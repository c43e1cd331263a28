"""Ids and log-probabilities of the default model: with drafts or without, alone or among others."""

import itertools
import threading

import numpy as np
import pytest

from strata_engine.params import GenParams
from strata_engine.request import Done, Request, Token
from strata_engine.scheduler import Scheduler

pytestmark = pytest.mark.xdist_group("real")
KINDS = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 5},
    "penalised": {"penalty_repeat": 1.3, "penalty_freq": 0.2, "penalty_last_n": 64},
    "min_p + top_p": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.05, "seed": 6},
}
LINE = [504, 3575, 282, 4649, 314, 7042, 30]  # a sentence that, repeated, gives drafts something to find
PROMPT = (1, *LINE, *LINE, *LINE[:4])
NEW = 20


class Answer:
    """A sink that keeps what comes."""

    def __init__(self, scheduler: Scheduler, request: Request) -> None:
        self.choices, self.done, self._ended = [], None, threading.Event()
        scheduler.submit(request, self)

    def __call__(self, event) -> None:
        if isinstance(event, Token):
            self.choices.append((event.choice.token, event.choice.logprob, event.choice.top))
        elif isinstance(event, Done):
            self.done = event
            self._ended.set()

    def wait(self) -> list:
        assert self._ended.wait(60)
        return self.choices


@pytest.fixture(scope="module")
def scheduler(backend):
    scheduler = Scheduler(backend, eos=frozenset(), chunk=16)
    scheduler.start()
    yield scheduler
    scheduler.close()


@pytest.fixture(scope="module")
def plain():
    return {}


def ask(scheduler, kind, draft, prompt=PROMPT, seed=None):
    params = KINDS[kind] | ({} if seed is None else {"seed": seed})
    return Answer(scheduler, Request(NEW, GenParams(draft=draft, logprobs=2, **params), prompt))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("draft", "company"), list(itertools.product([0, 1, 4, 7], [False, True])))
def test_drafts_and_company(scheduler, plain, kind, draft, company):
    neighbours = [
        ask(scheduler, other, 7, (1, *np.random.default_rng(i).integers(3, 49152, 30 + i).tolist()), seed=i)
        for i, other in enumerate(KINDS)
        if company and i < 3
    ]
    answer = ask(scheduler, kind, draft)
    choices = answer.wait()
    for neighbour in neighbours:
        neighbour.wait()
    assert len(choices) == NEW
    assert choices == plain.setdefault(kind, choices)


def test_some_drafts_are_accepted_and_some_are_not(scheduler):
    """The matrix above says something about drafts only if both happen there."""
    answer = ask(scheduler, "greedy", 7)
    answer.wait()
    assert answer.done is not None and answer.done.drafts_accepted > 0
