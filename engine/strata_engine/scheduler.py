"""The step loop: requests -> rows -> tokens.

Every step gathers rows from every running request, runs one forward over them and chooses one token for each row
that wants one. A request that decodes has a window of its last token and drafts in every step; prompts share what
is left of the step, at most `chunk` rows, so nobody waits for somebody else's prompt.

A backend that feeds is kept one step ahead: while a step is computed the next one is queued, and what it lacks, the
tokens that are being chosen, never passes through the host. A request that turns out to have ended has rows in that
step all the same, which harm nobody: they write cells behind its record, before anybody else's rows do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .backends.base import Backend
from .drafts import StepTimes
from .generation import Generation, Model, Sink
from .params import DRAFT_MAX, GenParams
from .request import Busy, Done, Failed, Reason, Request, Reused, Token
from .rows import Choice, Draw, Int32, Rows
from .slots import Slots
from .steps import Pipeline, Run, Share, Ticket, gather, share_out

__all__ = ["Busy", "Scheduler", "Ticket"]

log = logging.getLogger(__name__)
_TIMED_ROWS = (1, 2, 4, 8)
_PAUSE = 0.3  # of a step: a device that feeds is idle for 0.2 where its tokens are awaited; more, as a gain is a guess


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
        self._pipeline = Pipeline(backend, clock)
        self._runs: list[Run] = []
        self._step_runs: list[Run] = []  # those that a fault would hit, besides the ones with rows under way
        self._taken = (0.0, 0)  # when the last step was done and the tokens it gave; none once the next is queued
        self._turn = 0  # of the prompts, when there are fewer rows than prompts
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
            positions = self._positions[:rows]
            self._pipeline.queue(Rows(zeros[:rows], positions, zeros[:rows], positions), draws=[draw] * rows)
            self._times.record(rows, self._pipeline.take().seconds)

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
                if self._runs or self._pipeline:
                    self._step()
            except Exception as error:
                log.exception("a step failed")
                self._fail(f"{type(error).__name__}: {error}")
        self._cancel_all()
        self._pipeline.abandon()

    def _wait(self) -> bool:
        """Sleep while there is nothing to do; False once the scheduler closes."""
        with self._wake:
            while not (self._runs or self._pipeline or self._waiting or self._closing):
                self._taken = (0.0, 0)
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
        self._runs.append(Run(ticket, generation))
        if generation.reused:
            self._counters.reused_tokens += generation.reused
            ticket.send(Reused(generation.reused))

    def _step(self) -> None:
        """Queue a step, and take the oldest one as soon as enough are under way."""
        if self._pipeline and not self._may_go_ahead():
            self._take()
            return  # what is known now may end requests, and gives drafts
        shares = self._plan()
        if shares:
            self._step_runs = [share.run for share in shares]
            self._time_host()
            self._pipeline.queue(gather(shares, self._positions), shares)
            self._note(shares)
        if not shares or len(self._pipeline) == self._pipeline.depth:
            self._take()

    def _may_go_ahead(self) -> bool:
        """True if the next step can be laid out before the tokens of the one under way are known, and had better be.

        With drafts under way it cannot: what comes next depends on how many are accepted.
        """
        return not (any(run.generation.drafts for run in self._runs) or self._pause_pays())

    def _pause_pays(self) -> bool:
        """True if drafts are foreseen that are worth awaiting the tokens under way.

        All of them together have to bring more tokens, in parts of the step's, than time: their rows', the pause's and
        what the host needs for the tokens of such a step, in parts of the step's.
        """
        windows = [run.generation for run in self._windows()]
        count, reading = len(windows), sum([run.generation.to_read for run in self._runs])
        rows = total = min(count + min(self._chunk, reading), self._backend.max_rows)  # of the next step without drafts
        cost = self._times.cost
        gain = price = 0.0
        for generation in windows:
            generation.index()
            room = self._backend.max_rows - total
            drafts, tokens, seconds = generation.foresee(room, count + gain, cost, total)
            total, gain, price = total + drafts, gain + tokens, price + seconds
        price += _PAUSE * cost[rows] + self._times.host * (count + gain)
        return gain * cost[rows] > price * count

    @staticmethod
    def _note(shares: Sequence[Share]) -> None:
        """Tell each request what is under way: its rows, and which wanted row of the step gives its next token."""
        wanted = 0
        for share in shares:
            share.run.last = share
            share.run.generation.sent(share.rows, wanted if len(share.draws) == 1 else None)
            wanted += len(share.draws)

    def _take(self) -> None:
        """Wait for the oldest step and hand out what came of it."""
        self._step_runs = []  # a fault hits whose rows are under way, as the pipeline knows, not who has just come
        done = self._pipeline.take()
        step = done.step
        self._step_runs = [share.run for share in step.shares]
        self._count(step.rows, len(step.draws), done.seconds)
        at, before = 0, self._counters.generated_tokens
        for share in step.shares:
            run, wanted = share.run, len(share.draws)
            if not run.ended:
                if run.last is share:
                    run.generation.landed()
                self._accept(share, done.choices[at : at + wanted], done.now)
            at += wanted
        self._taken = done.now, self._counters.generated_tokens - before

    def _time_host(self) -> None:
        """A step is about to be queued: learn what the tokens of the one that was taken last kept the host busy."""
        at, tokens = self._taken
        if tokens:
            self._times.record_host(tokens, self._clock() - at)
        self._taken = (0.0, 0)

    def _count(self, rows: int, wanted: int, seconds: float) -> None:
        counters = self._counters
        counters.steps += 1
        counters.rows += rows
        counters.busy_s += seconds
        small = rows <= 16 and wanted < rows  # a few prompt rows without logits would make small windows look cheap
        if wanted and not small:
            self._times.record(rows, seconds)

    def _plan(self) -> list[Share]:
        """Every request's rows and draws in the next step, windows first."""
        windows = self._windows()
        prompts = [run for run in self._runs if run.generation.to_read]
        room = self._backend.max_rows - len(windows)
        shares: list[Share] = []
        if prompts:
            self._turn += 1
            wants = [run.generation.to_read for run in prompts]
            rows = share_out(min(self._chunk, room), wants, self._turn)
            shares = [self._plan_prompt(run, count) for run, count in zip(prompts, rows, strict=True) if count]
            room -= sum(rows)
        return self._plan_windows(windows, room) + shares

    def _windows(self) -> list[Run]:
        """The requests that decode in the next step."""
        return [run for run in self._runs if not run.generation.to_read and not run.generation.complete]

    @staticmethod
    def _plan_prompt(run: Run, rows: int) -> Share:
        generation = run.generation
        last = rows == generation.to_read and run.ticket.request.max_new > 0
        generation.index()
        return Share(run, rows, generation.draws() if last else [])

    def _plan_windows(self, windows: Sequence[Run], room: int) -> list[Share]:
        cost = self._times.cost
        total = self._backend.max_rows - room  # rows of the step without drafts
        tokens = float(len(windows))
        shares = []
        for run in windows:
            generation = run.generation
            if not self._pipeline:  # else the last token is not known, and nothing can be looked up
                generation.index()
                tokens += generation.offer(room, tokens, cost, total)
                room -= generation.drafts
                total += generation.drafts
            shares.append(Share(run, 1 + generation.drafts, generation.draws()))
        return shares

    def _accept(self, share: Share, choices: Sequence[Choice], now: float) -> None:
        """Take one run's share of a step: the chunk that was read, then the target's tokens while drafts agree."""
        run, ticket, generation = share.run, share.run.ticket, share.run.generation
        if generation.reading:
            self._counters.prompt_tokens += share.rows
            ticket.send(generation.read(share.rows, now))
            if not generation.reading and not ticket.request.max_new:
                self._end(run, "length")
                return
        if choices:
            self._emit(run, choices)

    def _emit(self, run: Run, choices: Sequence[Choice]) -> None:
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

    def _end(self, run: Run, reason: Reason) -> None:
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

    def _leave(self, run: Run) -> None:
        run.ended = True
        self._runs = [other for other in self._runs if other is not run]

    def _fail(self, text: str) -> None:
        """The step broke: its requests end, and what their cells hold is not trusted any more."""
        hit = [*self._step_runs, *self._pipeline.abandon()]
        for run in [run for run in self._runs if run in hit]:
            self._leave(run)
            self._slots.drop(run.generation.slot)
            self._last(run.ticket, Failed("INTERNAL", text))

    def _cancel_all(self) -> None:
        for run in self._runs:
            self._end(run, "cancel")
        while self._waiting:
            self._end_waiting(self._waiting.popleft())
