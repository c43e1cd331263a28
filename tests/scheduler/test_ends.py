"""How requests end: stop, length, cancel, failure; and that they do so once."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
from scheduler_fake import Answer, FakeBackend, ask, plain, random_prompt, request

from strata_engine.request import Done, Failed, PromptProgress, Reused, Token
from strata_engine.scheduler import Busy


def count_up(cells: np.ndarray) -> int:
    """0, 1, ... 9, 0, 1, ...: drafts are right as soon as it repeats."""
    return int(cells[-1] + 1) % 10


def counting(**options) -> FakeBackend:
    return FakeBackend(vocab=10, rule=count_up, **options)


TWICE = tuple(range(10)) * 2


@pytest.mark.parametrize("ends", [{"eos": {4}}, {"stop": (4,)}])
def test_an_end_token_inside_a_window_is_the_last_one(start, ends):
    backend = counting()
    scheduler = start(backend, eos=ends.get("eos", ()))
    answer = ask(scheduler, request(TWICE, 100, draft=7, stop=ends.get("stop", ())))
    done = answer.done()
    assert answer.ids == [0, 1, 2, 3, 4]
    assert (done.reason, done.generated) == ("stop", 5)
    assert done.drafts_offered > done.drafts_accepted > 0, "the window went on behind the end token"


def test_max_new_bounds_the_window(start):
    backend = counting()
    answer = ask(start(backend), request(TWICE, 5, draft=7))
    done = answer.done()
    assert (answer.ids, done.reason, done.generated) == ([0, 1, 2, 3, 4], "length", 5)
    assert max(rows.position.max() for rows in backend.steps) == len(TWICE) + 5 - 2


def test_a_request_may_fill_the_context(start):
    backend = counting()
    answer = ask(start(backend), request(TWICE, backend.context - len(TWICE), draft=7))
    assert answer.done().generated == backend.context - len(TWICE)


def test_ignore_eos_goes_on_but_stop_ids_still_end(start):
    scheduler = start(counting(), eos={3})
    assert ask(scheduler, request(TWICE, 30, ignore_eos=True)).done().reason == "length"
    both = ask(scheduler, request(TWICE, 30, ignore_eos=True, stop=(5,)))
    assert (both.done().reason, both.ids) == ("stop", [0, 1, 2, 3, 4, 5])


def test_max_new_0_reads_the_prompt_and_ends(start):
    backend = counting()
    answer = ask(start(backend), request(TWICE, 0))
    done = answer.done()
    assert (done.generated, done.prompt, done.reason, answer.ids) == (0, 20, "length", [])
    assert [len(rows.wanted) for rows in backend.steps] == [0]
    assert ask(start(counting()), request(TWICE, 1)).done().reused == 0


def test_a_prompt_wants_the_logits_of_its_last_row_only(start):
    backend = counting()
    ask(start(backend, chunk=8), request(TWICE, 1)).done()
    assert [(len(rows), rows.wanted.tolist()) for rows in backend.steps] == [(8, []), (8, []), (4, [3])]


def test_events_come_in_order(start):
    scheduler = start(counting(), chunk=8)
    ask(scheduler, request(TWICE[:4], 1)).done()
    answer = ask(scheduler, request(TWICE, 2))
    answer.done()
    kinds = [type(event) for event in answer.events]
    assert kinds == [Reused, PromptProgress, PromptProgress, Token, Token, Done]
    assert answer.events[0] == Reused(4)
    assert [e.position for e in answer.events if isinstance(e, PromptProgress)] == [12, 20]


def test_times_are_those_of_prompt_and_decoding(start):
    backend = counting(cost=lambda rows: 0.25)
    answer = ask(start(backend, chunk=10), request(TWICE, 5, draft=0))
    done = answer.done()
    assert (done.prompt_ms, done.decode_ms) == (500.0, 1000.0)
    first = answer.events[0]
    assert isinstance(first, PromptProgress) and (first.ms, first.rate) == (250.0, 40.0)


def cancel_when(kind: type, count: int, **options) -> tuple[FakeBackend, Answer]:
    """An answer that cancels itself from its own sink at the `count`-th event of `kind`."""
    answer = Answer()

    def look(event) -> None:
        if sum(isinstance(e, kind) for e in answer.events) == count and answer.ticket:
            answer.ticket.cancel()

    answer.on_event = look
    return counting(**options), answer


@pytest.mark.parametrize(("kind", "count", "generated"), [(PromptProgress, 2, 0), (Token, 1, 1), (Token, 5, 5)])
def test_cancel_in_prompt_decode_and_window_takes_effect_at_once(start, kind, count, generated):
    backend, answer = cancel_when(kind, count)
    scheduler = start(backend, chunk=5, run=False)
    answer.ticket = scheduler.submit(request(TWICE, 100), answer)
    scheduler.start()
    done = answer.done()
    assert (done.reason, done.generated, len(answer.ids)) == ("cancel", generated, generated)
    following = ask(scheduler, request((*TWICE, *answer.ids, 9, 9), 20))
    assert following.done() and following.ids[:2] == [0, 1]


def test_cancel_during_a_step_ends_with_that_step(start):
    backend = counting()
    scheduler = start(backend, run=False)
    answer = ask(scheduler, request(TWICE, 500))
    backend.before = lambda rows: answer.ticket.cancel() if len(backend.steps) == 3 else None
    scheduler.start()
    assert answer.done().reason == "cancel"
    assert len(backend.steps) == 4


def test_cancel_in_the_queue_touches_its_own_request_only(start):
    scheduler = start(counting(slots=1), run=False)
    answers = [ask(scheduler, request(TWICE, 30)) for _ in range(3)]
    for _ in range(3):
        answers[1].ticket.cancel()
    scheduler.start()
    assert [answer.done().reason for answer in answers] == ["length", "cancel", "length"]
    assert answers[1].events == [Done(0, 20, 0.0, 0.0, "cancel", 0, 0, 0, None)]


def test_a_queued_cancel_does_not_wait_for_a_slot(start):
    backend = counting(slots=1)
    gate = threading.Event()
    backend.before = lambda rows: gate.wait(10) and None
    scheduler = start(backend)
    running = ask(scheduler, request(TWICE, 900, draft=0))
    queued = ask(scheduler, request(TWICE, 30))
    queued.ticket.cancel()
    gate.set()
    assert queued.done().reason == "cancel"
    running.ticket.cancel()
    assert running.done().generated < 900


def test_cancel_after_the_end_does_nothing(start):
    scheduler = start(counting())
    answer = ask(scheduler, request(TWICE, 3))
    answer.done()
    answer.ticket.cancel()
    assert ask(scheduler, request(TWICE, 3)).done().reason == "length"
    assert len([e for e in answer.events if isinstance(e, Done)]) == 1


def test_busy_once_the_queue_is_full(start):
    scheduler = start(counting(slots=2), queue=3, run=False)
    answers = [ask(scheduler, request(TWICE, 3)) for _ in range(5)]
    with pytest.raises(Busy, match="3 requests"):
        ask(scheduler, request(TWICE, 3))
    scheduler.start()
    assert all(answer.done() for answer in answers)
    assert ask(scheduler, request(TWICE, 3)).done()


@pytest.mark.parametrize(
    ("queue", "words"), [(0, "no request may wait"), (1, "1 request is waiting"), (2, "2 requests are")]
)
def test_a_full_queue_is_said_in_good_english(start, queue, words):
    scheduler = start(counting(slots=1), queue=queue, run=False)
    for _ in range(1 + queue):
        ask(scheduler, request(TWICE, 3))
    with pytest.raises(Busy, match=words):
        ask(scheduler, request(TWICE, 3))


def test_requests_start_in_the_order_of_their_coming(start):
    order: list[int] = []
    scheduler = start(counting(slots=1), run=False)
    answers = [
        ask(scheduler, request(TWICE, 2), lambda e, n=n: order.append(n) if isinstance(e, Done) else None)
        for n in range(5)
    ]
    scheduler.start()
    assert all(answer.done() for answer in answers) and order == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("prompt", [(), (1,) * 1024])
def test_prompts_that_cannot_run_are_refused(start, prompt):
    with pytest.raises(ValueError, match="prompt"):
        ask(start(counting()), request(prompt, 1))


@pytest.mark.parametrize("run", [True, False])
def test_close_cancels_what_runs_and_waits(start, run):
    scheduler = start(counting(slots=1, cost=lambda rows: 0.0), run=run)
    answers = [ask(scheduler, request(TWICE, 1000, draft=0)) for _ in range(3)]
    scheduler.close()
    assert answers[2].done().reason == "cancel"
    assert all(isinstance(answer.events[-1], Done) for answer in answers)
    late = ask(scheduler, request(TWICE, 1))
    assert isinstance(late.last, Failed) and late.last.code == "SHUTDOWN"


def test_a_broken_step_fails_its_requests_and_the_loop_goes_on(start, caplog):
    backend = counting()
    scheduler = start(backend, run=False)
    answers = [ask(scheduler, request(TWICE, 50)) for _ in range(2)]

    def break_third(rows) -> None:
        if len(backend.steps) == 2:
            backend.before = lambda rows: None
            raise RuntimeError("the device is on fire")

    backend.before = break_third
    scheduler.start()
    for answer in answers:
        assert answer.last == Failed("INTERNAL", "RuntimeError: the device is on fire")
    assert "on fire" in caplog.text and "Traceback" in caplog.text
    again = ask(scheduler, request(TWICE, 5))
    assert again.done().reused == 0, "the cells of a broken step are not trusted"
    assert again.ids == [0, 1, 2, 3, 4]


def test_a_backend_that_answers_too_little_is_a_failure(start, caplog):
    backend = counting()
    backend.choose = lambda draws: []
    assert ask(start(backend), request(TWICE, 5)).last.code == "INTERNAL"


def test_a_sink_that_raises_cancels_its_own_request_only(start, caplog):
    scheduler = start(counting())

    def hang_up(event) -> None:
        if isinstance(event, Token):
            raise ConnectionError("gone")

    broken, fine = ask(scheduler, request(TWICE, 50), hang_up), ask(scheduler, request(TWICE, 50))
    assert (broken.done().reason, fine.done().reason) == ("cancel", "length")
    assert len(broken.ids) == 1 and "gone" in caplog.text


def test_500_requests_with_random_cancels_all_end_once(start):
    backend = FakeBackend(slots=4)
    scheduler = start(backend, queue=1000, chunk=16, eos={3})
    rng = random.Random(3)
    asked = [
        request(
            random_prompt(rng.randrange(9), rng.randint(1, 60)),
            rng.randint(0, 30),
            draft=rng.choice([None, 0, 3, 7]),
            ignore_eos=rng.random() < 0.7,
            penalty_freq=rng.choice([0.0, 0.5]),
        )
        for _ in range(500)
    ]
    answers = []
    for one in asked:
        answers.append(ask(scheduler, one))
        if rng.random() < 0.4:
            rng.choice(answers[-8:]).ticket.cancel()
    for one, answer in zip(asked, answers, strict=True):
        done = answer.done()
        right = plain(one, eos={3})
        assert answer.ids == (right if done.reason != "cancel" else right[: len(answer.ids)])
        assert done.generated == len(answer.ids)
        assert sum(isinstance(event, Done | Failed) for event in answer.events) == 1
    stats = scheduler.stats()
    assert (stats["running"], stats["waiting"], stats["failed"]) == (0, 0, 0)
    assert stats["finished"] + stats["cancelled"] == 500
    assert 50 < stats["cancelled"] < 450
    assert len(scheduler._slots) == 4


def test_stats_count_what_was_done(start):
    scheduler = start(counting())
    for _ in range(2):
        ask(scheduler, request(TWICE, 20)).done()
    stats = scheduler.stats()
    assert (stats["requests"], stats["finished"], stats["generated_tokens"]) == (2, 2, 40)
    assert (stats["prompt_tokens"], stats["reused_tokens"]) == (21, 19)
    assert stats["rows"] == 21 + 40 - 2 + stats["drafts_offered"] - stats["drafts_accepted"]
    assert all(isinstance(value, int | float) for value in stats.values())
