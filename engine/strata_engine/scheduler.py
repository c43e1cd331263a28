"""The step loop: requests -> rows -> tokens.

Every step gathers rows from every running request, runs one forward over them and chooses one token for each row
that wants one. A request that decodes has a window of its last token and drafts in every step; prompts share what
is left of the step, at most `chunk` rows, so nobody waits for somebody else's prompt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .backends.base import Backend
from .drafts import StepTimes
from .generation import Generation, Model, Sink
from .params import DRAFT_MAX, GenParams
from .request import Busy, Done, Event, Failed, Reason, Request, Reused, Token
from .rows import Choice, Draw, Int32, Rows
from .slots import Slots

log = logging.getLogger(__name__)
_TIMED_ROWS = (1, 2, 4, 8)


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
class _Run:
    """A running request and its share of the step."""

    ticket: Ticket
    generation: Generation
    rows: int = 0  # rows in this step
    draws: list[Draw] = field(default_factory=list)  # of this step, for the last len(draws) rows


@dataclass(slots=True)
class _Counters:
    """What STATS counts since the start."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    steps: int = 0
    rows: int = 0
    busy_s: float = 0.0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    drafts_offered: int = 0
    drafts_accepted: int = 0


class Scheduler:
    """Runs requests on a backend in a thread of its own.

    `submit`, `Ticket.cancel` and `stats` may be called from any thread. Sinks are called in the step loop's thread
    and must not block; nothing comes after a request's Done or Failed.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos: frozenset[int],
        queue: int = 64,
        chunk: int = 64,
        draft: int = DRAFT_MAX,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`queue`: most waiting requests; `chunk`: most prompt rows a step; `draft`: most drafts a window, 0..7;
        `clock`: seconds, for the times in events and for the drafting policy.

        Raises ValueError if a value is out of range or a step of the backend cannot hold a row of every slot.
        """
        if not (queue >= 0 and chunk >= 1 and 0 <= draft <= DRAFT_MAX):
            raise ValueError(f"queue={queue} (>= 0), chunk={chunk} (>= 1) or draft={draft} (0..{DRAFT_MAX}) is off")
        if backend.max_rows < backend.slots:
            raise ValueError(f"the backend takes {backend.max_rows} rows a step, fewer than its {backend.slots} slots")
        self._backend, self._clock = backend, clock
        self._model = Model(backend.vocab, eos, draft)
        self._chunk = chunk
        self._queue = queue
        self._slots = Slots(backend.slots)
        self._positions: Int32 = np.arange(backend.context + DRAFT_MAX + 1, dtype=np.int32)
        self._times = StepTimes(backend.max_rows)
        self._settled = True  # nothing of the step before is still being computed
        self._runs: list[_Run] = []
        self._step_runs: list[_Run] = []  # the runs with rows in this step
        self._waiting: deque[Ticket] = deque()
        self._unfinished = 0  # waiting and running; guarded by _wake like _waiting and _closing
        self._wake = threading.Condition()
        self._cancels = threading.Event()  # some ticket was cancelled
        self._closing = False
        self._thread: threading.Thread | None = None
        self._counters = _Counters()

    def start(self) -> None:
        """Start the step loop's thread. Raises RuntimeError if it was started before."""
        if self._thread is not None:
            raise RuntimeError("the scheduler was started before")
        self._thread = threading.Thread(target=self._loop, name="strata-steps", daemon=True)
        self._thread.start()

    def time_windows(self) -> None:
        """Measure what steps of one window take, so that the first request's drafts need not find out. Before start."""
        most = min(self._backend.max_rows, self._backend.context)
        zeros, draw = np.zeros(DRAFT_MAX + 1, np.int32), Draw(GenParams(), 1, np.empty(0, np.int32))
        for rows in [rows for rows in (*_TIMED_ROWS, *_TIMED_ROWS) if rows <= most]:  # the first round warms up
            begin = self._clock()
            self._backend.forward(Rows(zeros[:rows], self._positions[:rows], zeros[:rows], self._positions[:rows]))
            self._backend.choose([draw] * rows)
            self._times.record(rows, self._clock() - begin)

    def close(self) -> None:
        """End running and waiting requests with Done(reason="cancel") and join the thread; the backend stays open."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is None:
            self._cancel_all()
        else:
            self._thread.join()

    def submit(self, request: Request, sink: Sink) -> Ticket:
        """Queue a checked request; its events go to `sink`, in order, exactly one Done or Failed last.

        Raises Busy if every slot is taken and `queue` requests wait, ValueError if the prompt is empty or too long.
        After `close` the only event is Failed("SHUTDOWN"), sent before this returns.
        """
        if not 0 < len(request.prompt) <= self._backend.context - request.max_new:
            raise ValueError("a prompt has at least one token, and prompt + max_new fit the context")
        ticket = Ticket(request, sink, self._cancels)
        with self._wake:
            closing = self._closing
            if not closing:
                if self._unfinished >= self._queue + self._backend.slots:
                    raise Busy(self._full())
                self._unfinished += 1
                self._counters.requests += 1
                self._waiting.append(ticket)
                self._wake.notify()
        if closing:
            ticket.send(Failed("SHUTDOWN", "the engine is shutting down"))
        return ticket

    def _full(self) -> str:
        if self._queue == 0:
            return "every slot is taken, and no request may wait (--queue 0)"
        return f"{self._queue} {'request is' if self._queue == 1 else 'requests are'} waiting already (--queue)"

    def stats(self) -> dict[str, int | float]:
        """Counts since the start, and what runs and waits now."""
        counters = self._counters
        running = len(self._runs)
        return {
            "slots": self._backend.slots,
            "running": running,
            "waiting": len(self._waiting),
            **{name: getattr(counters, name) for name in counters.__slots__},
        }

    # ---- the step loop's thread ----

    def _loop(self) -> None:
        while self._wait():
            self._step_runs = self._runs
            try:
                self._admit()
                if self._runs:
                    self._step()
            except Exception as error:
                log.exception("a step failed")
                self._fail(f"{type(error).__name__}: {error}")
        self._cancel_all()

    def _wait(self) -> bool:
        """Sleep while there is nothing to do; False once the scheduler closes."""
        with self._wake:
            while not (self._runs or self._waiting or self._closing):
                self._wake.wait()
            return not self._closing

    def _admit(self) -> None:
        """End what was cancelled, then give free slots to those who have waited longest."""
        if self._cancels.is_set():
            self._cancels.clear()
            self._sweep()
        while self._waiting and len(self._slots):
            with self._wake:
                ticket = self._waiting.popleft()
            if ticket.cancelled:
                self._end_waiting(ticket)
            else:
                self._begin(ticket)

    def _sweep(self) -> None:
        for run in [run for run in self._runs if run.ticket.cancelled]:
            self._end(run, "cancel")
        with self._wake:
            cancelled = [ticket for ticket in self._waiting if ticket.cancelled]
            for ticket in cancelled:
                self._waiting.remove(ticket)
        for ticket in cancelled:
            self._end_waiting(ticket)

    def _begin(self, ticket: Ticket) -> None:
        try:
            generation = Generation(ticket.request, self._model, self._clock())
        except Exception as error:  # no memory for its tokens
            log.exception("a request could not begin")
            self._last(ticket, Failed("INTERNAL", f"{type(error).__name__}: {error}"))
            return
        generation.take(self._slots)
        self._runs.append(_Run(ticket, generation))
        if generation.reused:
            self._counters.reused_tokens += generation.reused
            ticket.send(Reused(generation.reused))

    def _step(self) -> None:
        runs = self._step_runs = self._plan()
        rows = self._gather(runs)
        draws = [draw for run in runs for draw in run.draws]
        begin = self._clock()
        self._backend.forward(rows)
        choices = self._backend.choose(draws) if draws else []
        now = self._clock()
        if len(choices) != len(draws):
            raise RuntimeError(f"the backend made {len(choices)} choices for {len(draws)} draws")
        self._count(len(rows), len(draws), now - begin)
        at = 0
        for run in runs:
            wanted = len(run.draws)
            self._accept(run, choices[at : at + wanted], now)
            at += wanted

    def _count(self, rows: int, wanted: int, seconds: float) -> None:
        counters = self._counters
        counters.steps += 1
        counters.rows += rows
        counters.busy_s += seconds
        # A device may come back from a step that wants no logits before it is done; the next one then waits for both.
        alone, self._settled = self._settled, wanted > 0
        small = rows <= 16 and wanted < rows  # a few prompt rows without logits would make small windows look cheap
        if alone and wanted and not small:
            self._times.record(rows, seconds)

    def _plan(self) -> list[_Run]:
        """Decide on every run's rows and draws; returns the runs that have rows, windows first."""
        windows = [run for run in self._runs if not run.generation.reading]
        prompts = [run for run in self._runs if run.generation.reading]
        room = self._backend.max_rows - len(windows)
        if prompts:
            wants = [run.generation.pending for run in prompts]
            for run, rows in zip(prompts, share(min(self._chunk, room), wants, self._counters.steps), strict=True):
                self._plan_prompt(run, rows)
                room -= rows
        self._plan_windows(windows, room)
        return windows + [run for run in prompts if run.rows]

    @staticmethod
    def _plan_prompt(run: _Run, rows: int) -> None:
        generation = run.generation
        run.rows = rows
        last = rows == generation.pending and run.ticket.request.max_new > 0
        run.draws = generation.draws() if last else []
        generation.index()

    def _plan_windows(self, windows: Sequence[_Run], room: int) -> None:
        cost = self._times.cost
        total = self._backend.max_rows - room  # rows of the step without drafts
        tokens = float(len(windows))
        for run in windows:
            generation = run.generation
            generation.index()
            tokens += generation.offer(room, tokens, cost, total)
            room -= generation.drafts
            total += generation.drafts
            run.rows = 1 + generation.drafts
            run.draws = generation.draws()

    def _gather(self, runs: Sequence[_Run]) -> Rows:
        total = sum([run.rows for run in runs])
        slot, position, token = np.empty(total, np.int32), np.empty(total, np.int32), np.empty(total, np.int32)
        wanted: list[int] = []
        at = 0
        for run in runs:
            generation, end = run.generation, at + run.rows
            first = generation.cells
            slot[at:end] = generation.slot.index
            position[at:end] = self._positions[first : first + run.rows]
            token[at:end] = generation.tokens[first : first + run.rows]
            if run.draws:
                wanted.extend(range(end - len(run.draws), end))
            at = end
        return Rows(slot, position, token, np.array(wanted, np.int32))

    def _accept(self, run: _Run, choices: Sequence[Choice], now: float) -> None:
        """Take one run's share of a step: the chunk that was read, then the target's tokens while drafts agree."""
        ticket, generation = run.ticket, run.generation
        if generation.reading:
            self._counters.prompt_tokens += run.rows
            ticket.send(generation.read(run.rows, now))
            if not generation.reading and not ticket.request.max_new:
                self._end(run, "length")
                return
        if choices:
            self._emit(run, choices)

    def _emit(self, run: _Run, choices: Sequence[Choice]) -> None:
        ticket, generation, send = run.ticket, run.generation, run.ticket.send
        reason: Reason | None = None
        begin, drafts = generation.size, len(choices) - 1
        guesses = generation.tokens[begin : begin + drafts].tolist()
        came: list[int] = []
        agreed = 0
        for choice, guess in zip(choices, [*guesses, -1], strict=True):
            if ticket.cancelled:
                break
            reason = generation.accept(choice)
            came.append(choice.token)
            send(Token(choice))
            agreed += choice.token == guess
            if reason or choice.token != guess:
                break
        self._counters.generated_tokens += len(came)
        self._counters.drafts_offered += drafts
        self._counters.drafts_accepted += agreed
        generation.learn(came, agreed)
        if reason or ticket.cancelled:
            self._end(run, reason or "cancel")

    def _end(self, run: _Run, reason: Reason) -> None:
        self._leave(run)
        self._slots.give_back(run.generation.slot, run.generation.record)
        self._last(run.ticket, run.generation.done(reason, self._clock()))

    def _end_waiting(self, ticket: Ticket) -> None:
        """End a cancelled request that never got a slot."""
        self._last(ticket, Done(0, len(ticket.request.prompt), 0.0, 0.0, "cancel", 0, 0, 0, None))

    def _last(self, ticket: Ticket, event: Done | Failed) -> None:
        counters = self._counters
        if isinstance(event, Failed):
            counters.failed += 1
        elif event.reason == "cancel":
            counters.cancelled += 1
        else:
            counters.finished += 1
        with self._wake:
            self._unfinished -= 1
        ticket.send(event)

    def _leave(self, run: _Run) -> None:
        self._runs = [other for other in self._runs if other is not run]

    def _fail(self, text: str) -> None:
        """The step broke: its requests end, and what their cells hold is not trusted any more."""
        for run in [run for run in self._step_runs if run in self._runs]:
            self._leave(run)
            self._slots.drop(run.generation.slot)
            self._last(run.ticket, Failed("INTERNAL", text))

    def _cancel_all(self) -> None:
        for run in self._runs:
            self._end(run, "cancel")
        while self._waiting:
            self._end_waiting(self._waiting.popleft())


def share(budget: int, wants: Sequence[int], turn: int) -> list[int]:
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
