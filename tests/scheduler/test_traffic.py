"""Random traffic, the same for a backend that waits and one that feeds: what happens around a request cannot change it.

Everything happens on the step loop's thread, so a seed is the same traffic every time: clients ask for one thing after
another, and cancels and faults come at any point of a request.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from scheduler_fake import Answer, FakeBackend, plain, request

from strata_engine.request import Done, Event, Failed, PromptProgress, Request, Token
from strata_engine.scheduler import Scheduler

EOS = 1
FAULT = "the device is on fire"
PENALTIES: list[dict[str, Any]] = [
    {},
    {"penalty_freq": 0.5, "penalty_last_n": 1},
    {"penalty_repeat": 1.2, "penalty_last_n": 9},
    {"penalty_present": 0.5, "penalty_last_n": 4096},
]
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 5}]


@dataclass
class Asked:
    """A request, what it has to answer and when its client loses interest: at the `patience`-th event of a kind."""

    request: Request
    right: list[int]
    kind: type | None  # None: never
    patience: int
    answer: Answer = field(default_factory=Answer)

    @property
    def is_right(self) -> bool:
        """All of the right tokens, or the first of them where something else ended it; and one end."""
        last, ids = self.answer.last, self.answer.ids
        whole = isinstance(last, Done) and last.reason != "cancel"
        ends = [event for event in self.answer.events if isinstance(event, Done | Failed)]
        if isinstance(last, Failed) and last != Failed("INTERNAL", f"RuntimeError: {FAULT}"):
            return False
        return len(ends) == 1 and ids == (self.right if whole else self.right[: len(ids)])


def random_request(rng: random.Random, vocab: int, before: list[int]) -> Request:
    """Often goes on where the tokens `before` end, or begins like them."""
    known = before[: rng.choice([0, len(before), rng.randint(0, len(before))])][-400:]
    prompt = known + [rng.randrange(vocab) for _ in range(rng.choice([1, rng.randint(1, 70)]))]
    params = rng.choice(PENALTIES) | rng.choice(SAMPLINGS)
    draft, ends = rng.choice([None, 0, 0, 2, 7]), rng.choice([(), (), (0,)])
    return request(
        prompt, rng.choice([0, 1, 2, 9, 40]), draft=draft, stop=ends, ignore_eos=rng.random() < 0.7, **params
    )


def random_client(rng: random.Random, vocab: int, count: int) -> list[Asked]:
    """What one client asks for, one after another."""
    asked: list[Asked] = []
    tokens: list[int] = []
    for _ in range(count):
        one = random_request(rng, vocab, tokens)
        right = plain(one, vocab, {EOS})
        tokens = [*one.prompt, *right]
        asked.append(Asked(one, right, rng.choice([None, None, None, Token, PromptProgress]), rng.randint(1, 9)))
    return asked


class Traffic:
    """Clients in front of a scheduler, whose calls all come from the step loop's thread once it runs."""

    def __init__(
        self, rng: random.Random, backend: FakeBackend, scheduler: Scheduler, clients: list[list[Asked]]
    ) -> None:
        self._rng, self._backend, self._scheduler = rng, backend, scheduler
        self._to_come = [list(asked) for asked in clients]
        self._now: dict[int, Asked] = {}  # what each client waits for
        backend.before = self.look
        for client in range(len(clients)):
            self.ask_next(client)

    def ask_next(self, client: int) -> None:
        self._now.pop(client, None)
        if self._to_come[client]:
            self._now[client] = asked = self._to_come[client].pop(0)
            asked.answer.on_event = lambda event: self.hear(client, asked, event)
            asked.answer.ticket = self._scheduler.submit(asked.request, asked.answer)
            if self._rng.random() < 0.05:
                asked.answer.ticket.cancel()

    def hear(self, client: int, asked: Asked, event: Event) -> None:
        if isinstance(event, Done | Failed):
            self.ask_next(client)
        elif asked.kind is type(event) and sum(type(e) is asked.kind for e in asked.answer.events) == asked.patience:
            if self._rng.random() < 0.2:
                raise ConnectionError("gone")
            assert asked.answer.ticket
            asked.answer.ticket.cancel()

    def look(self, rows: Any) -> None:
        """Before a step is computed, all that were queued are: free slots hold what is said of them."""
        for slot in self._scheduler._slots._free:
            assert np.array_equal(self._backend._cells[slot.index, : len(slot.record)], slot.record)
        if self._now and self._rng.random() < 0.04:
            ticket = self._rng.choice(list(self._now.values())).answer.ticket
            if ticket:
                ticket.cancel()


def broken_now_and_then(rng: random.Random, device: Any) -> None:
    """Have one call in fifty raise: before a step is queued, or once it is done."""

    def breaking(method: Callable[..., Any], first: bool) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            broken = rng.random() < 0.02
            result = None if broken and first else method(*arguments)
            if broken:
                raise RuntimeError(FAULT)
            return result

        return call

    before, after = ("queue", "take") if device.feeds else ("forward", "choose")
    for name in (before, after):
        setattr(device, name, breaking(getattr(device, name), name == before))


def run(start: Callable[..., Scheduler], seed: int, faults: bool) -> Counter[str]:
    """One seed's traffic; how often it met what."""
    rng = random.Random(seed)
    vocab, slots = rng.choice([2, 3, 4]), rng.randint(1, 4)
    clients = [random_client(rng, vocab, 5) for _ in range(2 * slots)]
    backend = FakeBackend(vocab=vocab, slots=slots, max_rows=rng.choice([slots, 9, 64]))
    scheduler = start(backend, run=False, eos={EOS}, chunk=rng.choice([1, 7, 32, 512]))
    if faults:
        broken_now_and_then(rng, scheduler._backend)
    Traffic(rng, backend, scheduler, clients)
    scheduler.start()
    ends = [asked.answer.last for client in clients for asked in client]
    wrong = [asked for client in clients for asked in client if not asked.is_right]
    assert not wrong, (seed, wrong[0], wrong[0].answer.events)
    stats = scheduler.stats()
    assert (stats["running"], stats["waiting"], len(scheduler._slots)) == (0, 0, slots)
    assert stats["requests"] == stats["finished"] + stats["cancelled"] + stats["failed"] == 10 * slots
    seen = Counter(end.reason if isinstance(end, Done) else end.code for end in ends)
    seen["accepted"] = int(stats["drafts_accepted"])
    seen["rejected"] = int(stats["drafts_offered"]) - seen["accepted"]
    seen["reused"] = int(stats["reused_tokens"])
    seen["ahead"] = getattr(scheduler._backend, "ahead", 0)
    return seen


@pytest.mark.parametrize("faults", [False, True])
def test_an_answer_is_its_own_in_any_traffic(start, faults, caplog):
    caplog.set_level("CRITICAL")
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += run(start, seed, faults)
    met = {what for what, count in seen.items() if count > 30}
    assert met - {"ahead"} == {"stop", "length", "cancel", "accepted", "rejected", "reused"} | (
        {"INTERNAL"} if faults else set()
    )
