"""The same request gives the same tokens: in any chunking, any company, with any drafts, on any slot."""

from __future__ import annotations

import itertools

import pytest
from scheduler_fake import FakeBackend, ask, plain, random_prompt, request

KINDS = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 5},
    "penalised": {"penalty_repeat": 1.2, "penalty_last_n": 9},
    "both": {"temperature": 0.8, "seed": 2**64 - 1, "penalty_freq": 0.5, "penalty_last_n": 4096},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", [0, 1, 4, 7])
@pytest.mark.parametrize("chunk", [1, 7, 32, 512])
def test_tokens_depend_on_the_request_alone(start, chunk, draft, kind):
    prompt = random_prompt(1, 70)
    asked = request(prompt, draft=draft, **KINDS[kind])
    right = plain(asked)
    for company, reused in itertools.product((False, True), (False, True)):
        scheduler = start(FakeBackend(), chunk=chunk)
        if reused:
            ask(scheduler, request(prompt[:50] + (0, 1), max_new=9, draft=7)).done()
        others = [ask(scheduler, request(random_prompt(n, 40 + n), 30, seed=n)) for n in (2, 3, 4) if company]
        answer = ask(scheduler, asked)
        assert (answer.done().reused >= 50) == reused
        assert answer.ids == right, (company, reused)
        assert [plain(request(random_prompt(n, 40 + n), 30)) for n in (2, 3, 4) if company] == [
            other.ids for other in others if other.done()
        ]


def test_windows_are_accepted_and_rejected_on_the_way(start):
    """The matrix above proves something about drafts only if both happen there."""
    done = ask(start(FakeBackend()), request(random_prompt(1, 70), 900)).done()
    assert 20 < done.drafts_accepted < done.drafts_offered - 20


def test_a_cancelled_neighbour_changes_nothing(start):
    scheduler = start(FakeBackend(), run=False)
    neighbour = ask(scheduler, request(random_prompt(2, 30), 500), lambda event: count(neighbour.ids))
    count = lambda ids: neighbour.ticket.cancel() if len(ids) == 9 else None  # noqa: E731
    answer = ask(scheduler, request(random_prompt(1, 70), 100))
    scheduler.start()
    assert answer.done() and answer.ids == plain(request(random_prompt(1, 70), 100))
    assert neighbour.done().generated == 9


def test_cells_after_a_window_that_ended_early_are_not_reused(start):
    """An end token in a window leaves rejected drafts in the cells behind it."""
    backend = FakeBackend()
    scheduler = start(backend)
    first = request(random_prompt(1, 70), 200, draft=7, stop=(3,))
    for _ in range(30):
        answer = ask(scheduler, first)
        answer.done()
        following = request((*first.prompt, *answer.ids, 2, 1), 40, draft=7, stop=(3,))
        again = ask(scheduler, following)
        done = again.done()
        assert done.reused == len(first.prompt) + len(answer.ids) - 1
        assert again.ids == plain(following)
        first = request(random_prompt(len(again.ids), 50), 60, draft=7, stop=(3,))


@pytest.mark.parametrize("max_rows", [4, 5, 9])
def test_a_backend_with_room_for_few_rows_answers_the_same(start, max_rows):
    scheduler = start(FakeBackend(max_rows=max_rows))
    asked = [request(random_prompt(n, 30 + n), 40) for n in range(6)]
    answers = [ask(scheduler, one) for one in asked]
    assert [answer.ids for answer in answers if answer.done()] == [plain(one) for one in asked]


def test_a_request_without_a_seed_reports_the_one_it_drew_with(start):
    scheduler = start(FakeBackend())
    asked = request(random_prompt(1, 20), 40, temperature=1.0)
    first, second = ask(scheduler, asked), ask(scheduler, asked)
    assert first.done().seed != second.done().seed
    assert first.ids == plain(request(asked.prompt, 40, temperature=1.0, seed=first.done().seed))


@pytest.mark.parametrize(
    ("max_new", "params", "seed"),
    [(5, {"seed": 3}, None), (5, {"seed": 3, "temperature": 1.0}, 3), (0, {"seed": 3, "temperature": 1.0}, None)],
)
def test_a_seed_is_reported_only_where_a_draw_was_used(start, max_new, params, seed):
    assert ask(start(FakeBackend()), request((1, 2), max_new, **params)).done().seed == seed
