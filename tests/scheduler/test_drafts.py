"""Prompt lookup against a plain twin, and a policy that drafts where it pays."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_fake import FakeBackend, ask, random_prompt, request

from strata_engine.drafts import LENGTHS, PromptLookup, StepTimes


def twin(tokens: list[int], most: int) -> tuple[int, list[int]]:
    """What `PromptLookup.draft` has to say, by scanning everything."""
    for length in LENGTHS:
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                found = list(tokens)
                for i in range(most):
                    found.append(found[end + i])
                return length, found[len(tokens) :]
    return 0, []


@pytest.mark.parametrize("vocab", [1, 2, 3, 20, 49152])
def test_lookup_equals_its_twin(vocab):
    rng = np.random.default_rng(vocab)
    text = rng.integers(0, vocab, 60).tolist()
    text = [*text, *text[10:40], *rng.integers(0, vocab, 20).tolist(), *text[5:25]]
    lookup = PromptLookup(vocab)
    for size in range(1, len(text) + 1):
        lookup.extend(text[size - 1 : size])
        for most in (1, 7):
            assert lookup.draft(most) == twin(text[:size], most), size


def test_reading_in_pieces_changes_nothing():
    text = random_prompt(4, 300, 6)
    whole, pieces = PromptLookup(6), PromptLookup(6)
    whole.extend(text)
    for begin in range(0, 300, 37):
        pieces.extend(text[begin : begin + 37])
    assert whole.draft(7) == pieces.draft(7) and len(pieces) == 300


def loop(period: int):
    return lambda cells: int(cells[-1] + 1) % period


def steps(start, asked, rule, cost=lambda rows: 0.01) -> tuple[int, float, int]:
    """Steps, seconds and drafts offered for `asked`."""
    backend = FakeBackend(vocab=1000, rule=rule, cost=cost)
    done = ask(start(backend), asked).done()
    return len(backend.steps), backend.clock.now, done.drafts_offered


def cpu(rows: int) -> float:
    """A step like a small machine's: a window of 4 takes twice as long as one row."""
    return 0.0067 + 0.0033 * rows


def test_text_that_repeats_takes_far_fewer_steps(start):
    count, _, _ = steps(start, request(range(20), 200), loop(20))
    assert count < 45


def test_drafting_pays_where_rows_are_dear(start):
    _, drafted, _ = steps(start, request(range(20), 200), loop(20), cpu)
    _, undrafted, _ = steps(start, request(range(20), 200, draft=0), loop(20), cpu)
    assert undrafted / drafted > 1.5


def test_drafting_stops_where_it_does_not_pay(start):
    asked = request(random_prompt(1, 100, 8), 600)
    rule = lambda cells: int(np.random.default_rng(len(cells)).integers(0, 8))  # noqa: E731
    _, drafted, offered = steps(start, asked, rule, cpu)
    _, undrafted, _ = steps(start, request(asked.prompt, 600, draft=0), rule, cpu)
    assert drafted / undrafted < 1.02
    assert offered < 40


def test_drafting_starts_again_where_text_repeats_again(start):
    def rule(cells: np.ndarray) -> int:
        place = len(cells)
        return place % 20 if place > 400 else int(np.random.default_rng(place).integers(0, 8))

    backend = FakeBackend(vocab=1000, rule=rule, cost=cpu)
    ask(start(backend), request((1, 2, 3), 800)).done()
    early = sum(rows.position[-1] < 400 for rows in backend.steps)
    late = len(backend.steps) - early
    assert early > 350 and late < 120


@pytest.mark.parametrize(("default", "key", "widest"), [(7, None, 8), (7, 3, 4), (2, None, 3), (0, None, 1), (0, 4, 5)])
def test_draft_bounds_the_window(start, default, key, widest):
    backend = FakeBackend(vocab=1000, rule=loop(20))
    ask(start(backend, draft=default), request(range(20), 200, draft=key)).done()
    assert max(len(rows) for rows in backend.steps[1:]) == widest


def test_done_counts_offered_and_accepted(start):
    backend = FakeBackend(vocab=1000, rule=loop(20))
    done = ask(start(backend), request(range(20), 200)).done()
    rows = sum(len(step) for step in backend.steps[1:])
    assert done.drafts_offered == rows - (len(backend.steps) - 1)
    assert done.drafts_accepted == done.generated - len(backend.steps)


def test_times_are_interpolated_and_never_fall_with_more_rows():
    times = StepTimes(64)
    for rows, seconds in [(1, 1.0), (64, 7.3), (4, 9.0), (8, 1.7)]:
        times.record(rows, seconds)
    assert times.cost[8] == pytest.approx(1.7) and times.cost[4] == pytest.approx(1.7)
    assert times.cost[36] == pytest.approx(4.5)
    assert times.cost == sorted(times.cost)


def test_one_slow_step_does_not_count_for_ever():
    times = StepTimes(8)
    times.record(1, 1.0)
    times.record(2, 90.0)
    for _ in range(1100):
        times.record(1, 1.0)
    assert times.cost[2] < 1.2


def test_windows_timed_before_the_start_price_the_first_drafts(start):
    scheduler = start(FakeBackend(cost=lambda rows: 1.0 + (rows > 4)), run=False)
    scheduler.time_windows()
    cost = scheduler._times.cost
    assert cost[1:5] == pytest.approx([1.0] * 4) and cost[8] == pytest.approx(2.0)


def test_every_step_is_priced_at_what_it_takes(start):
    """Also where it was queued behind another one."""
    scheduler = start(FakeBackend(cost=lambda rows: 1.0 + 0.1 * rows), chunk=64)
    ask(scheduler, request(random_prompt(1, 640), 20, draft=0)).done()
    assert scheduler._times.cost[1] == pytest.approx(1.1)
    assert scheduler._times.cost[64] == pytest.approx(7.4)


def test_timing_windows_leaves_no_trace(start):
    prompt = random_prompt(1, 40, 50)
    answers = []
    for timed in (False, True):
        scheduler = start(FakeBackend(), run=False)
        if timed:
            scheduler.time_windows()
        scheduler.start()
        answer = ask(scheduler, request(prompt, 20))
        assert answer.done().generated == 20
        answers.append(answer.ids)
        assert scheduler.stats()["reused_tokens"] == 0
    assert answers[0] == answers[1]
