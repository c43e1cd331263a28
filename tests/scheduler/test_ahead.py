"""A backend that feeds is kept one step ahead of what the host knows, and nobody can tell from the answers."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_fake import Answer, FakeBackend, ask, digest, plain, random_prompt, request

from strata_engine.request import Failed, PromptProgress, Token

pytestmark = pytest.mark.parametrize("start", ["feeds"], indirect=True)


def count_up(cells: np.ndarray) -> int:
    return int(cells[-1] + 1) % 10


def fresh(cells: np.ndarray) -> int:
    """Text that never repeats."""
    return int(cells[-1] * 31 + len(cells) * 17 + 5) % 997


def wavering(cells: np.ndarray) -> int:
    """Counts up to 7, most of the time: drafts are right and wrong, and steps without any lie between."""
    jump = digest(cells) % 40
    return jump % 10 if jump < 6 else int(cells[-1] + 1) % 8


def cancelling(count: int) -> Answer:
    """An answer that cancels itself behind its `count`-th token."""
    answer = Answer()

    def look(event) -> None:
        if isinstance(event, Token) and len(answer.ids) == count and answer.ticket:
            answer.ticket.cancel()

    answer.on_event = look
    return answer


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0, "seed": 4, "penalty_freq": 0.5, "penalty_last_n": 9}])
def test_decoding_goes_on_before_a_token_is_known(start, params):
    scheduler = start(FakeBackend(), chunk=16)
    asked = request(random_prompt(1, 40), 50, draft=0, **params)
    answer = ask(scheduler, asked)
    assert answer.done() and answer.ids == plain(asked)
    assert scheduler._backend.ahead == len(scheduler._backend.steps) - 1 == 51


def test_text_without_repeats_is_decoded_ahead_with_drafts_allowed(start):
    scheduler = start(FakeBackend(vocab=1000, rule=fresh))
    done = ask(scheduler, request((1, 2, 3), 200, draft=7)).done()
    assert done.drafts_offered == 0
    assert scheduler._backend.ahead == len(scheduler._backend.steps) - 1


def test_where_text_repeats_tokens_are_awaited_for_drafts(start):
    backend = FakeBackend(vocab=10, rule=count_up)
    scheduler = start(backend)
    done = ask(scheduler, request(tuple(range(10)) * 2, 200, draft=7)).done()
    assert done.drafts_accepted > 150 and len(backend.steps) < 40
    assert scheduler._backend.ahead < 5


@pytest.mark.parametrize("chunk", [7, 512])
def test_steps_ahead_and_windows_of_drafts_take_turns(start, chunk):
    backend = FakeBackend(vocab=10, rule=wavering, cost=lambda rows: 0.01 * (1 + 0.2 * rows))  # drafts are dear
    scheduler = start(backend, chunk=chunk, run=False)
    asked = [request(random_prompt(n, 20 + 9 * n), 250, draft=7) for n in range(4)]
    answers = [ask(scheduler, one) for one in asked]
    scheduler.start()
    for one, answer in zip(asked, answers, strict=True):
        assert answer.done()
        tokens = list(one.prompt)
        for _ in range(one.max_new):
            tokens.append(wavering(np.array(tokens)))
        assert answer.ids == tokens[len(one.prompt) :]
    accepted = sum(answer.done().drafts_accepted for answer in answers)
    rejected = sum(answer.done().drafts_offered for answer in answers) - accepted
    assert accepted > 100 and rejected > 100 and scheduler._backend.ahead > 10


def test_max_new_leaves_no_row_too_many(start):
    backend = FakeBackend()
    scheduler = start(backend)
    assert ask(scheduler, request(random_prompt(1, 30), 12, draft=0)).done().generated == 12
    assert [len(rows) for rows in backend.steps] == [30] + [1] * 11


def test_the_end_of_the_context_is_not_passed(start):
    backend = FakeBackend()
    scheduler = start(backend)
    answer = ask(scheduler, request(random_prompt(1, 1000), backend.context - 1000, draft=0))
    assert answer.done().generated == 24
    assert max(rows.position.max() for rows in backend.steps) == backend.context - 2


def test_a_request_that_ended_has_one_row_too_many_and_its_slot_is_fit_for_use(start):
    backend = FakeBackend(slots=1)
    scheduler = start(backend, eos={3})
    first = request(random_prompt(2, 30), 200, draft=0)
    right = plain(first, eos={3})
    answer = ask(scheduler, first)
    assert answer.done().reason == "stop" and answer.ids == right
    following = request((*first.prompt, *right, 1, 2), 40, draft=0)
    again = ask(scheduler, following)
    assert again.done().reused == 30 + len(right) - 1
    assert again.ids == plain(following, eos={3})
    row = backend.steps[1 + len(right) - 1]
    assert (row.position.tolist(), row.token.tolist()) == ([30 + len(right) - 1], [3]), "fed with the end token"


def test_a_slot_is_taken_over_while_rows_of_its_last_request_are_under_way(start):
    backend = FakeBackend(slots=1)
    scheduler = start(backend, run=False, eos={3})
    asked = [request(random_prompt(n, 20 + n), 60, draft=0) for n in range(8)]
    answers = [ask(scheduler, one) for one in asked]
    scheduler.start()
    assert [answer.ids for answer in answers if answer.done()] == [plain(one, eos={3}) for one in asked]


@pytest.mark.parametrize("count", [1, 2, 7])
def test_cancel_while_the_next_token_is_under_way(start, count):
    backend = FakeBackend(slots=1)
    scheduler = start(backend, run=False)
    answer, asked = cancelling(count), request(random_prompt(1, 30), 100, draft=0)
    answer.ticket = scheduler.submit(asked, answer)
    following = ask(scheduler, request(asked.prompt, 30, draft=0))
    scheduler.start()
    assert (answer.done().reason, answer.ids) == ("cancel", plain(asked)[:count])
    assert following.done().reused == 29 and following.ids == plain(request(asked.prompt, 30))


def test_cancel_while_the_next_chunk_is_under_way(start):
    backend = FakeBackend(slots=1)
    scheduler = start(backend, chunk=8, run=False)
    answer = Answer()
    answer.on_event = lambda event: answer.ticket.cancel() if isinstance(event, PromptProgress) else None
    prompt = random_prompt(1, 60)
    answer.ticket = scheduler.submit(request(prompt, 20), answer)
    following = ask(scheduler, request(prompt, 20, draft=0))
    scheduler.start()
    assert answer.done().reason == "cancel"
    assert following.done().reused == 8, "the chunk under way is not counted on"
    assert following.ids == plain(request(prompt, 20))


def test_a_prompt_is_read_beside_a_request_that_is_decoded_ahead(start):
    backend = FakeBackend()
    scheduler = start(backend, chunk=32, run=False)
    talker = ask(scheduler, request(random_prompt(1, 4), 60, draft=0))
    reader = ask(scheduler, request(random_prompt(2, 900), 5, draft=0))
    scheduler.start()
    assert talker.done() and reader.done()
    assert talker.ids == plain(talker.ticket.request) and reader.ids == plain(reader.ticket.request)
    assert scheduler._backend.ahead == len(backend.steps) - 1
    assert all(0 in rows.slot for rows in backend.steps[1:60])


def test_progress_is_told_when_a_chunk_is_read_not_when_it_is_queued(start):
    scheduler = start(FakeBackend(cost=lambda rows: 0.25), chunk=10)
    answer = ask(scheduler, request(random_prompt(1, 40), 5, draft=0))
    done = answer.done()
    assert [e.ms for e in answer.events if isinstance(e, PromptProgress)] == [250.0, 500.0, 750.0, 1000.0]
    assert (done.prompt_ms, done.decode_ms) == (1000.0, 1000.0)


def test_close_with_a_step_under_way_ends_its_requests(start):
    backend = FakeBackend(cost=lambda rows: 0.0)
    scheduler = start(backend)
    answer = ask(scheduler, request(random_prompt(1, 20), 1000, draft=0))
    scheduler.close()
    assert answer.done().reason == "cancel"
    assert not scheduler._pipeline


@pytest.mark.parametrize("method", ["queue", "take"])
def test_a_fault_ends_what_is_under_way_and_the_loop_goes_on(start, caplog, method):
    scheduler = start(FakeBackend(), run=False)
    device, calls = scheduler._backend, []
    working = getattr(device, method)

    def break_fourth(*arguments):
        calls.append(0)
        if len(calls) == 4:
            raise RuntimeError("the device is on fire")
        return working(*arguments)

    setattr(device, method, break_fourth)
    answers = [ask(scheduler, request(random_prompt(n, 30), 50, draft=0)) for n in range(2)]
    scheduler.start()
    for answer in answers:
        assert answer.last == Failed("INTERNAL", "RuntimeError: the device is on fire")
    again = request(random_prompt(1, 30), 20, draft=0)
    answer = ask(scheduler, again)
    assert answer.done().reused == 0 and answer.ids == plain(again)


def test_drafts_of_a_request_that_has_ended_hold_nobody_up(start):
    backend = FakeBackend(vocab=10, rule=count_up)
    scheduler = start(backend, run=False)
    drafting = ask(scheduler, request(tuple(range(10)) * 2, 500, draft=7))
    other = ask(scheduler, request((1, 2, 3), 60, draft=0))
    ahead: list[int] = []

    def look(rows) -> None:
        ahead.append(scheduler._backend.ahead)
        if len(rows) > 5 and len(ahead) > 3:
            drafting.ticket.cancel()

    backend.before = look
    scheduler.start()
    assert drafting.done().reason == "cancel" and other.done().generated == 60
    first = next(i for i, rows in enumerate(backend.steps) if i >= 3 and len(rows) > 5)
    assert ahead[first + 2] == ahead[first] + 1, "the step behind its last one was queued ahead"


def test_a_request_that_comes_has_rows_in_the_next_step_that_is_queued(start):
    backend = FakeBackend()
    scheduler = start(backend, run=False)
    asked = request(random_prompt(2, 20), 4, draft=0)
    answers = [ask(scheduler, request(random_prompt(1, 30), 40, draft=0))]

    def come(rows) -> None:
        if len(backend.steps) == 10:
            answers.append(ask(scheduler, asked))

    backend.before = come
    scheduler.start()
    assert answers[0].done() and answers[1].done() and answers[1].ids == plain(asked)
    assert [1 in rows.slot for rows in backend.steps[10:13]] == [False, True, True]


def test_a_fault_does_not_hit_a_request_that_came_while_the_step_ran(start, caplog):
    backend = FakeBackend(vocab=10, rule=count_up)
    scheduler = start(backend, run=False)
    device, taking, newcomers = scheduler._backend, scheduler._backend.take, []
    drafting = ask(scheduler, request(tuple(range(10)) * 2, 500, draft=7))

    def come(rows) -> None:
        if len(rows) > 5 and len(backend.steps) > 3 and not newcomers:
            newcomers.append(ask(scheduler, request((1, 2, 3), 4)))
            device.take = break_once

    def break_once() -> None:
        taking()
        device.take = taking
        raise RuntimeError("the device is on fire")

    backend.before = come
    scheduler.start()
    assert drafting.last == Failed("INTERNAL", "RuntimeError: the device is on fire")
    assert newcomers[0].done() and newcomers[0].ids == [4, 5, 6, 7]


@pytest.mark.parametrize("count", [1, 4, 16])
def test_the_drafts_of_many_requests_pay_for_a_pause_together(start, count):
    seconds = []
    for draft in (0, 7):
        backend = FakeBackend(vocab=10, rule=count_up, slots=count, cost=lambda rows: 1.0 + 0.02 * (rows - 1))
        scheduler = start(backend, run=False)
        answers = [ask(scheduler, request(range(n, 20 + n), 300, draft=draft)) for n in range(count)]
        scheduler.start()
        assert all(answer.done() for answer in answers)
        seconds.append(backend.clock.now)
    undrafted, drafted = seconds
    assert undrafted / drafted > 1.5


def test_no_pause_for_drafts_where_the_host_is_as_busy_as_the_device(start):
    seconds = []
    for draft in (0, 7):
        backend = FakeBackend(vocab=10, rule=count_up, slots=16, cost=lambda rows: 1.0 + 0.02 * (rows - 1))
        scheduler = start(backend, run=False)

        def handle(event, clock=backend.clock) -> None:
            clock.now += 0.07 * isinstance(event, Token)

        answers = [ask(scheduler, request(range(n, 20 + n), 300, draft=draft), handle) for n in range(16)]
        scheduler.start()
        assert all(answer.done() for answer in answers)
        seconds.append(backend.clock.now)
    undrafted, drafted = seconds
    assert undrafted / drafted > 0.97
