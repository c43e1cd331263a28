"""Steps: whose rows they are, how they pass through the backend, what was chosen, how long they took."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from .backends.base import Backend, Feeding
from .generation import Generation, Sink
from .request import Event, Request
from .rows import Choice, Draw, Int32, Rows

log = logging.getLogger(__name__)


class Ticket:
    """A submitted request, as its sender holds it."""

    __slots__ = ("_notice", "cancelled", "request", "sink")

    def __init__(self, request: Request, sink: Sink, notice: threading.Event) -> None:
        self.request = request
        self.sink = sink
        self.cancelled = False
        self._notice = notice

    def cancel(self) -> None:
        """End this request alone, with Done(reason="cancel"), within one step. Any thread, any number of times."""
        self.cancelled = True
        self._notice.set()

    def send(self, event: Event) -> None:
        """Give `event` to the sink; a sink that fails cancels its own request and harms nobody else."""
        try:
            self.sink(event)
        except Exception:
            log.exception("the receiver of a request's events failed; the request is cancelled")
            self.cancel()


@dataclass(slots=True, eq=False)
class Run:
    """A running request."""

    ticket: Ticket
    generation: Generation
    ended: bool = False  # rows of it may still be under way; what comes of them is nobody's
    last: Share | None = None  # its part of the newest step


@dataclass(slots=True, eq=False)
class Share:
    """A request's part of a step."""

    run: Run
    rows: int
    draws: list[Draw] = field(default_factory=list)  # for the last len(draws) rows


@dataclass(slots=True)
class Step:
    """A step that was queued."""

    shares: Sequence[Share]
    rows: int
    draws: list[Draw]
    begun: float  # seconds by the clock


@dataclass(slots=True)
class Outcome:
    """A step that is done."""

    step: Step
    choices: list[Choice]  # one for each of step.draws
    now: float  # when it was done
    seconds: float  # what it took, without waiting for the one before


class Pipeline:
    """The steps under way, in order: one, or two on a backend that feeds what it chooses to the next step."""

    def __init__(self, backend: Backend, clock: Callable[[], float]) -> None:
        self._backend, self._clock = backend, clock
        self._feeding: Feeding | None = backend if backend.feeds else None  # type: ignore[assignment]
        self.depth = 2 if backend.feeds else 1
        self._steps: deque[Step] = deque()
        self._done = -np.inf  # when the last step was

    def __len__(self) -> int:
        """How many steps are under way."""
        return len(self._steps)

    def queue(self, rows: Rows, shares: Sequence[Share] = (), draws: list[Draw] | None = None) -> None:
        """Begin a step. `draws`: those of all shares, unless given."""
        draws = [draw for share in shares for draw in share.draws] if draws is None else draws
        begun = self._clock()
        if self._feeding:
            self._feeding.queue(rows, draws)
        else:
            self._backend.forward(rows)
        self._steps.append(Step(shares, len(rows), draws, begun))

    def take(self) -> Outcome:
        """Wait for the oldest step. RuntimeError if the backend did not choose for every draw."""
        step = self._steps[0]
        choices = self._choices(step.draws)
        if len(choices) != len(step.draws):
            raise RuntimeError(f"the backend made {len(choices)} choices for {len(step.draws)} draws")
        self._steps.popleft()
        begun, self._done = max(step.begun, self._done), self._clock()
        return Outcome(step, choices, self._done, self._done - begun)

    def _choices(self, draws: list[Draw]) -> list[Choice]:
        if self._feeding:
            return self._feeding.take()
        return self._backend.choose(draws) if draws else []

    def abandon(self) -> list[Run]:
        """After a fault: let go of what is under way. Gives back whose rows it was."""
        runs = [share.run for step in self._steps for share in step.shares]
        for _ in self._steps:
            if self._feeding:
                with suppress(Exception):  # the fault itself was reported
                    self._feeding.take()
        self._steps.clear()
        return runs


def share_out(budget: int, wants: Sequence[int], turn: int) -> list[int]:
    """Split `budget` rows fairly: equal shares, and what a short want leaves goes to the others.

    With fewer rows than wants, one each, beginning with another want every `turn`.
    """
    count = len(wants)
    shares = [0] * count
    if budget < count:
        for i in range(budget):
            shares[(turn * budget + i) % count] = 1
        return shares
    for done, i in enumerate(sorted(range(count), key=wants.__getitem__)):
        shares[i] = min(wants[i], budget // (count - done))
        budget -= shares[i]
    return shares


def gather(shares: Sequence[Share], positions: Int32) -> Rows:
    """The rows of a step, share after share; positions: 0, 1, 2, ..."""
    total = sum([share.rows for share in shares])
    slot, position, token = np.empty(total, np.int32), np.empty(total, np.int32), np.empty(total, np.int32)
    wanted: list[int] = []
    at = 0
    for share in shares:
        generation, end = share.run.generation, at + share.rows
        first = generation.next_cell
        slot[at:end] = generation.slot.index
        position[at:end] = positions[first : first + share.rows]
        token[at:end] = generation.tokens[first : first + share.rows]
        if share.draws:
            wanted.extend(range(end - len(share.draws), end))
        at = end
    return Rows(slot, position, token, np.array(wanted, np.int32))
