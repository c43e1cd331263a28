"""Sampling through verify windows, on the real model: drafts, company and reused cells never change an answer.

The clock stands still for the drafting policy: every window looks as cheap as one row, so it drafts wherever there is
a match, however busy the machine is, and right and wrong drafts both come in plenty.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, cycle

import pytest

from strata_engine.params import GenParams
from strata_engine.paths import default_model
from strata_engine.request import Choice, Done, Event, Failed, Request, Token
from strata_engine.scheduler import Scheduler, Ticket

pytestmark = [
    pytest.mark.skipif(not default_model().is_file(), reason=f"no model at {default_model()}: make model"),
    pytest.mark.xdist_group("windows"),
]

DRAFTS = (0, 1, 4, 7)
LENGTH = 40
KINDS: dict[str, dict] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 2**64 - 5},
    "penalised": {"penalty_repeat": 1.05, "penalty_present": 0.2, "penalty_last_n": 24},
    "min_p + top_p": {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "seed": 11},
    "all at once": {"temperature": 0.8, "top_p": 0.95, "min_p": 0.02, "penalty_freq": 0.1, "seed": 4},
}
TEXT = (
    "The lighthouse at Cape Verdance was built in 1871. The tower is 41 metres high and its lamp could be seen from 35"
    " kilometres away. In 1923 a storm broke the lower windows."
)


@dataclass(eq=False)
class Answer:
    """A sink that keeps what comes, and cancels behind the `cancel_at`-th token."""

    cancel_at: int = 0
    choices: list[Choice] = field(default_factory=list)
    ticket: Ticket | None = None
    _last: Event | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Token):
            self.choices.append(event.choice)
            if len(self.choices) == self.cancel_at and self.ticket:
                self.ticket.cancel()
        self._last = event
        if isinstance(event, Done | Failed):
            self._ended.set()

    @property
    def ids(self) -> list[int]:
        return [choice.token for choice in self.choices]

    def done(self) -> Done:
        assert self._ended.wait(60), "the request did not end"
        assert isinstance(self._last, Done), self._last
        return self._last


class Engine:
    """One backend for the module; every `cold` starts a scheduler that knows of no cell."""

    def __init__(self) -> None:
        from strata_engine.backends.cpu.backend import CpuBackend
        from strata_engine.model import load_model
        from strata_engine.progress import NoProgress
        from strata_proxy.vocab import Vocab

        self.model = load_model(str(default_model()))
        self.vocab = Vocab.load(default_model())
        self.backend = CpuBackend(self.model, context=512, slots=4, threads=1, progress=NoProgress())
        self.backend.warm_up(NoProgress())
        self._scheduler: Scheduler | None = None
        self.cold()

    def cold(self) -> Engine:
        self.close()
        ticks = count()
        self._scheduler = Scheduler(self.backend, eos=self.model.eos, clock=lambda: next(ticks) * 1e-3)
        self._scheduler.start()
        return self

    def close(self) -> None:
        if self._scheduler:
            self._scheduler.close()

    def chat(self, *turns: str) -> list[int]:
        """The prompt of a chat; user and assistant take turns."""
        from strata_proxy.template import render_chat

        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
        text = self.vocab.text_of
        return self.vocab.encode_prompt(
            render_chat(self.vocab.chat_template, messages, text(self.vocab.bos), text(self.vocab.eos))
        )

    def text(self, text: str) -> list[int]:
        return self.vocab.encode(text, special=False)

    def submit(self, prompt: list[int], max_new: int, *, cancel_at: int = 0, **params) -> Answer:
        assert self._scheduler
        answer = Answer(cancel_at)
        answer.ticket = self._scheduler.submit(Request(max_new, GenParams(**params), tuple(prompt)), answer)
        return answer

    def ask(self, prompt: list[int], max_new: int, **params) -> Answer:
        answer = self.submit(prompt, max_new, **params)
        answer.done()
        return answer


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.close()
    engine.backend.close()


@pytest.fixture(scope="module")
def quote(engine) -> list[int]:
    """A prompt whose answer copies much of it, but not all."""
    return engine.chat(f"Quote this text word for word, then sum it up:\n\n{TEXT}")


@pytest.fixture(scope="module")
def right(engine, quote) -> dict[str, list[Choice]]:
    """The answer of each kind: alone, one row a step, no cell reused."""
    return {
        kind: engine.cold().ask(quote, LENGTH, draft=0, logprobs=2, ignore_eos=True, **params).choices
        for kind, params in KINDS.items()
    }


def of_kind(engine: Engine, quote: list[int], kind: str, draft: int) -> Answer:
    return engine.submit(quote, LENGTH, draft=draft, logprobs=2, ignore_eos=True, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", DRAFTS)
def test_alone_ids_and_log_probabilities_are_those_without_drafts(engine, quote, right, draft, kind):
    answer = of_kind(engine, quote, kind, draft)
    done = answer.done()
    assert answer.choices == right[kind]
    assert done.drafts_offered >= done.drafts_accepted and (done.drafts_accepted > 0) == (draft > 0)


@pytest.mark.parametrize("draft", DRAFTS)
def test_in_company_ids_and_log_probabilities_are_those_alone(engine, quote, right, draft):
    answers = {kind: of_kind(engine.cold() if kind == "greedy" else engine, quote, kind, draft) for kind in KINDS}
    for kind, answer in answers.items():
        assert answer.done() and answer.choices == right[kind], kind


def test_neighbours_with_other_windows_change_nothing(engine, quote, right):
    answers = [of_kind(engine, quote, kind, draft) for kind, draft in zip(KINDS, cycle(DRAFTS), strict=False)]
    assert [answer.choices for answer in answers if answer.done()] == list(right.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_matrix_sees_accepted_and_rejected_drafts(engine, quote, kind):
    done = of_kind(engine, quote, kind, 7).done()
    assert 0 < done.drafts_accepted < done.drafts_offered


def test_the_matrix_compares_different_answers(right):
    assert len({tuple(choice.token for choice in choices) for choices in right.values()}) == len(KINDS)


def test_log_probabilities_of_drafted_tokens_are_real(right):
    for choices in right.values():
        assert all(choice.logprob < 0 and len(choice.top) == 2 for choice in choices)
        assert len({choice.logprob for choice in choices}) == LENGTH


@pytest.mark.parametrize("kind", KINDS)
def test_a_reused_prefix_changes_nothing(engine, quote, right, kind):
    engine.cold()
    assert of_kind(engine, quote, kind, 7).done().reused == 0
    warm = of_kind(engine, quote, kind, 7)
    assert warm.done().reused == len(quote) - 1
    assert warm.choices == right[kind]


# ---- ends inside a window ----


@pytest.fixture(scope="module")
def loop(engine) -> list[int]:
    """A prompt that the model continues with its last four tokens, over and over."""
    return engine.text("Count:" + " one two three four" * 3)


def assert_cells_are_clean(engine: Engine, prompt: list[int], answer: Answer) -> None:
    """The cells hold what was emitted, its last token aside, and a request that goes on from them is as from none."""
    following = [*prompt, *answer.ids, *engine.text(" and so on:")]
    warm = engine.ask(following, 8, logprobs=1)
    assert warm.done().reused == len(prompt) + len(answer.ids) - 1
    assert warm.choices == engine.cold().ask(following, 8, draft=0, logprobs=1).choices


def test_the_end_token_inside_a_window_ends_the_answer(engine):
    question = "What is the capital of France?"
    first = engine.ask(engine.chat(question), 40)
    again = engine.chat(question, "The capital of France is Paris.", question)
    answer = engine.ask(again, 40, draft=4)
    done = answer.done()
    assert (done.reason, done.generated, answer.ids) == ("stop", len(first.ids), first.ids)
    assert answer.ids[-1] in engine.model.eos
    assert done.drafts_offered > done.drafts_accepted > 0, "the window went on behind the end token"
    assert_cells_are_clean(engine, again, answer)


def test_a_stop_id_inside_a_window_ends_the_answer(engine, loop):
    answer = engine.ask(loop, 40, stop=(loop[-1],))
    done = answer.done()
    assert (answer.ids, done.reason) == (loop[-4:], "stop")
    assert done.drafts_offered > done.drafts_accepted > 0
    assert_cells_are_clean(engine, loop, answer)


@pytest.mark.parametrize("max_new", range(1, 10))
def test_max_new_inside_a_window_ends_the_answer(engine, loop, max_new):
    answer = engine.ask(loop, max_new)
    assert (answer.ids, answer.done().reason) == ((loop[-4:] * 3)[:max_new], "length")
    assert (answer.done().drafts_accepted > 0) == (max_new > 2)


def test_cells_are_clean_behind_max_new(engine, loop):
    assert_cells_are_clean(engine, loop, engine.ask(loop, 5))


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_cancel_inside_a_window_ends_the_answer(engine, loop, count):
    answer = engine.submit(loop, 40, cancel_at=count)
    done = answer.done()
    assert (answer.ids, done.reason, done.generated) == ((loop[-4:] * 3)[:count], "cancel", count)
    assert_cells_are_clean(engine, loop, answer)


# ---- what users reported of others ----


@pytest.mark.parametrize(
    "penalty", [{"penalty_repeat": 2.0}, {"penalty_present": 2.0}, {"penalty_freq": 2.0}], ids=lambda p: next(iter(p))
)
@pytest.mark.parametrize("draft", [0, 7])
def test_a_penalty_alone_changes_the_second_token_of_a_loop(engine, loop, penalty, draft):
    plain, penalised = engine.ask(loop, 8, draft=draft), engine.ask(loop, 8, draft=draft, **penalty)
    assert plain.ids == (loop[-4:] * 2)
    assert penalised.ids[1] != plain.ids[1]


def test_the_penalty_window_is_the_last_n(engine, loop):
    """The next token stands among the first three of the prompt, not among the last three, but among the last four."""
    assert engine.ask(loop, 1, penalty_repeat=100.0, penalty_last_n=3).ids == [loop[-4]]
    assert engine.ask(loop, 1, penalty_repeat=100.0, penalty_last_n=4).ids != [loop[-4]]


@pytest.mark.parametrize("draft", DRAFTS)
def test_the_penalty_window_moves_along_with_the_drafts(engine, loop, draft):
    """Of four words in turn the last three are forbidden: a row that looks elsewhere forbids the one that is due."""
    answer = engine.ask(loop, 24, draft=draft, penalty_repeat=100.0, penalty_last_n=3)
    assert answer.ids == loop[-4:] * 6
    assert (answer.done().drafts_accepted > 0) == (draft > 0)


@pytest.mark.parametrize(
    "narrow",
    [{"temperature": 1e-9}, {"temperature": 5e-324}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}],
    ids=str,
)
def test_the_narrowest_sampling_is_greedy(engine, quote, right, narrow):
    params = {"temperature": 1.0, "seed": 3, **narrow}
    assert engine.ask(quote, 16, ignore_eos=True, **params).ids == [choice.token for choice in right["greedy"][:16]]


def test_the_seed_of_done_gives_the_answer_again(engine, quote):
    params = {"temperature": 1.0, "top_k": 40, "ignore_eos": True}
    first, second = engine.ask(quote, 24, **params), engine.ask(quote, 24, **params)
    assert first.ids != second.ids
    seed = first.done().seed
    engine.ask(engine.chat("Name three colours."), 8, temperature=1.0, seed=seed)  # another chat comes between
    again = engine.ask(quote, 24, seed=seed, **params)
    assert again.ids == first.ids and again.done().seed == seed
    assert engine.ask(quote, 24, seed=seed ^ 1, **params).ids != first.ids


def test_a_greedy_answer_reports_no_seed_and_ignores_it(engine, loop):
    answer = engine.ask(loop, 8, seed=9)
    assert (answer.ids, answer.done().seed) == ((loop[-4:] * 2), None)
