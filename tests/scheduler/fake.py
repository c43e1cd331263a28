"""A backend whose tokens are a hash of every cell before a row, and the tools that the scheduler's tests share.

A wrong, stale or leaked cell, a wrong position, draw index or penalty history changes the output. `plain` says
what a request has to answer, one token at a time, without a scheduler.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from strata_engine.params import GenParams
from strata_engine.request import Done, Event, Failed, Request, Token
from strata_engine.rows import Choice, Draw, Rows
from strata_engine.scheduler import Scheduler, Ticket

CONTEXT = 1024
_POWERS = np.cumprod(np.full(CONTEXT, 0x9E3779B97F4A7C15, np.uint64))
_MASK = 2**64 - 1
_SECONDS = 120.0  # no test waits longer; a busy machine may need it


def mix(*values: int) -> int:
    """64 bits that depend on every value and on their order."""
    h = 0x243F6A8885A308D3
    for value in values:
        h = (h ^ (value & _MASK)) * 0xD6E8FEB86659FD93 & _MASK
        h ^= h >> 32
    return h


def digest(tokens: Sequence[int] | np.ndarray) -> int:
    """A hash of a token sequence."""
    cells = np.asarray(tokens).astype(np.uint64) + np.uint64(1)
    return int((cells * _POWERS[: len(cells)]).sum())


def pick(state: int, draw: Draw, vocab: int) -> int:
    """The token for a row whose cells hash to `state`."""
    values = [state]
    if draw.params.sampled:
        values += [draw.params.seed or 0, draw.index]
    if draw.params.penalised:
        values += [digest(draw.history), len(draw.history)]
    return mix(*values) % vocab


class Clock:
    """Seconds that pass only when a step says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeBackend:
    """See the module. `rule(cells)` replaces the hash of a row; a step takes `cost(rows)` seconds of `clock`."""

    device, feeds = "cpu", False

    def __init__(
        self,
        *,
        vocab: int = 4,
        slots: int = 4,
        max_rows: int = 512,
        rule: Callable[[np.ndarray], int] | None = None,
        cost: Callable[[int], float] = lambda rows: 0.01,
    ) -> None:
        self.vocab, self.context, self.slots, self.max_rows = vocab, CONTEXT, slots, max_rows
        self.clock = Clock()
        self.steps: list[Rows] = []
        self.before: Callable[[Rows], None] = lambda rows: None  # a test's hook, called in the step loop's thread
        self._cells = np.random.default_rng(7).integers(0, vocab, (slots, CONTEXT))
        self._written = [0] * slots
        self._rule, self._cost = rule, cost
        self._states: list[int | np.ndarray] = []

    def forward(self, rows: Rows) -> None:
        self.before(rows)
        self.steps.append(rows)
        assert 0 < len(rows) <= self.max_rows
        assert len({*zip(rows.slot.tolist(), rows.position.tolist(), strict=True)}) == len(rows)
        for slot, position, token in zip(*(a.tolist() for a in (rows.slot, rows.position, rows.token)), strict=True):
            assert position <= self._written[slot], "a gap: the cells before the row were never written"
            self._written[slot] = max(self._written[slot], position + 1)
            self._cells[slot, position] = token
        ends = [(int(rows.slot[i]), int(rows.position[i]) + 1) for i in rows.wanted]
        self._states = [self._cells[slot, :end].copy() for slot, end in ends]
        self.clock.now += self._cost(len(rows))

    def choose(self, draws: Sequence[Draw]) -> list[Choice]:
        assert len(draws) == len(self._states)
        pairs = zip(self._states, draws, strict=True)
        if self._rule:
            return [Choice(self._rule(cells)) for cells, _ in pairs]
        return [Choice(pick(digest(cells), draw, self.vocab)) for cells, draw in pairs]

    def logits(self) -> np.ndarray:
        raise NotImplementedError

    def close(self) -> None:
        pass


class Fed:
    """A backend that feeds, made of one that does not: it computes at once, and its clock runs as a GPU's steps would.

    A step begins when it is queued or when the one ahead is done, and `take` waits for its end. A row is fed with what
    was chosen for its own slot, or something is wrong.
    """

    feeds = True

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._free = 0.0  # when the last step that was queued is done
        self._chosen: list[tuple[int, int]] = []  # of that step: slot and token of each wanted row
        self.ahead = 0  # steps that were queued while another was under way
        self._under_way: deque[tuple[list[Choice], float]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def queue(self, rows: Rows, draws: Sequence[Draw]) -> None:
        assert len(self._under_way) < 2
        wanted = rows.slot[rows.wanted]
        assert all((draw.history[:-1] >= 0).all() for draw in draws)
        draws = [
            Draw(draw.params, draw.index, self._resolved(draw.history, np.full(len(draw.history), slot)))
            for draw, slot in zip(draws, wanted, strict=True)
        ]
        tokens = self._resolved(rows.token, rows.slot)
        clock, begun = self._backend.clock, self._backend.clock.now
        self._backend.forward(Rows(rows.slot.copy(), rows.position.copy(), tokens, rows.wanted.copy()))
        choices = self._backend.choose(draws) if draws else []
        self._free = max(begun, self._free) + clock.now - begun
        clock.now = begun
        self._chosen = [(slot, choice.token) for slot, choice in zip(wanted.tolist(), choices, strict=True)]
        self.ahead += len(self._under_way)
        self._under_way.append((choices, self._free))

    def _resolved(self, tokens: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """`tokens` with what was chosen where they say so."""
        found = tokens.copy()
        for i in np.flatnonzero(tokens < 0):
            slot, found[i] = self._chosen[-1 - tokens[i]]
            assert slot == slots[i], "fed with somebody else's token"
        return found

    def take(self) -> list[Choice]:
        choices, done = self._under_way.popleft()
        self._backend.clock.now = max(self._backend.clock.now, done)
        return choices


def plain(request: Request, vocab: int = 4, eos: Iterable[int] = ()) -> list[int]:
    """The answer to `request`, one token at a time from scratch."""
    params = request.params
    ends = {*params.stop, *(() if params.ignore_eos else eos)}
    tokens = list(request.prompt)
    for index in range(request.max_new):
        keep = params.penalty_last_n if params.penalised else 0
        draw = Draw(params, index, np.array(tokens[max(0, len(tokens) - keep) :] if keep else [], np.int32))
        tokens.append(pick(digest(tokens), draw, vocab))
        if tokens[-1] in ends:
            break
    return tokens[len(request.prompt) :]


class Answer:
    """A sink that keeps what comes."""

    def __init__(self, on_event: Callable[[Event], None] = lambda event: None) -> None:
        self.events: list[Event] = []
        self.ticket: Ticket | None = None
        self.on_event = on_event
        self._ended = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)
        if isinstance(event, Done | Failed):
            self._ended.set()

    @property
    def ids(self) -> list[int]:
        return [event.choice.token for event in self.events if isinstance(event, Token)]

    @property
    def last(self) -> Done | Failed:
        """The last event, once it is there."""
        assert self._ended.wait(_SECONDS), "the request did not end"
        event = self.events[-1]
        assert isinstance(event, Done | Failed)
        return event

    def done(self) -> Done:
        last = self.last
        assert isinstance(last, Done), last
        return last


def ask(scheduler: Scheduler, request: Request, on_event: Callable[[Event], None] = lambda event: None) -> Answer:
    answer = Answer(on_event)
    answer.ticket = scheduler.submit(request, answer)
    return answer


def request(prompt: Sequence[int], max_new: int = 24, **params: object) -> Request:
    return Request(max_new, GenParams(**params), tuple(prompt))  # type: ignore[arg-type]


def random_prompt(seed: int, length: int, vocab: int = 4) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, vocab, length).tolist())
