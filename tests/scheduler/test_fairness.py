"""Nobody waits for somebody else's prompt."""

from __future__ import annotations

import pytest
from scheduler_fake import FakeBackend, ask, random_prompt, request

from strata_engine.request import PromptProgress
from strata_engine.steps import share_out


def test_a_long_prompt_does_not_hold_up_a_decoding_request(start):
    backend = FakeBackend(max_rows=64)
    scheduler = start(backend, chunk=32, run=False)
    talker = ask(scheduler, request(random_prompt(1, 4), 60, draft=0))
    reader = ask(scheduler, request(random_prompt(2, 900), 1))
    scheduler.start()
    assert talker.done() and reader.done()
    sizes = [len(rows) for rows in backend.steps]
    assert max(sizes) <= 33
    talking = [rows for rows in backend.steps[1:60] if 0 in rows.slot]
    assert len(talking) == 59, "a token of the decoding request in every step"


def test_a_short_prompt_does_not_wait_for_a_long_one(start):
    backend = FakeBackend()
    scheduler = start(backend, chunk=32, run=False)
    long, short = (ask(scheduler, request(random_prompt(n, n), 1)) for n in (900, 30))
    scheduler.start()
    assert long.done().prompt_ms > 8 * short.done().prompt_ms


def test_drafts_leave_room_for_prompts(start):
    backend = FakeBackend(vocab=10, rule=lambda cells: int(cells[-1] + 1) % 10, max_rows=8)
    scheduler = start(backend, chunk=4, run=False)
    for _ in range(3):
        ask(scheduler, request(tuple(range(10)) * 2, 300, draft=7))
    reader = ask(scheduler, request(random_prompt(1, 40), 1))
    scheduler.start()
    reader.done()
    progress = [event.position for event in reader.events if isinstance(event, PromptProgress)]
    assert len(progress) <= 25


@pytest.mark.parametrize(
    ("budget", "wants", "right"),
    [
        (64, [1000], [64]),
        (64, [10, 1000], [10, 54]),
        (64, [1000, 1000], [32, 32]),
        (64, [1000, 5, 1000, 1000], [19, 5, 20, 20]),
        (3, [9, 9, 9], [1, 1, 1]),
        (10, [2, 3], [2, 3]),
    ],
)
def test_shares_are_even_and_what_is_left_goes_round(budget, wants, right):
    assert share_out(budget, wants, 0) == right


def test_too_few_rows_for_all_go_round_in_turn():
    totals = [sum(column) for column in zip(*(share_out(2, [99] * 5, turn) for turn in range(5)), strict=True)]
    assert totals == [2, 2, 2, 2, 2]
