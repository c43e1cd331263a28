"""A daemon in a thread in front of a scripted scheduler, and a client that speaks to any engine's socket."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from strata_engine.daemon import Daemon, Engine
from strata_engine.listener import listen
from strata_engine.protocol import STATS_KEYS
from strata_engine.replies import Info
from strata_engine.request import Busy, Choice, Done, Event, PromptProgress, Request, Token

VOCAB = 49152
CONTEXT = 8192
EOS = 2
TIMEOUT = 10.0


class FakeTicket:
    def __init__(self, request: Request, sink: Callable[[Event], None]) -> None:
        self.request, self.sink = request, sink
        self.cancelled = False
        self.position = 0
        self.generated = 0
        seed = request.params.seed
        self.seed = None if not request.params.sampled else random.getrandbits(64) if seed is None else seed

    def cancel(self) -> None:
        self.cancelled = True


class FakeScheduler:
    """Answers with last prompt id + 1, + 2, ...; or with the scripted answer of a prompt. One token a step."""

    def __init__(self, slots: int = 4, queue: int = 64, step: float = 0.002, chunk: int = 64) -> None:
        self.slots, self.queue, self.step, self.chunk = slots, queue, step, chunk
        self.script: dict[tuple[int, ...], list[int]] = {}
        self.submitted: list[FakeTicket] = []
        self.ended: list[tuple[Request, Done]] = []
        self._lock = threading.Lock()
        self._waiting: deque[FakeTicket] = deque()
        self._running: list[FakeTicket] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Callable[[Event], None]) -> FakeTicket:
        with self._lock:
            if len(self._waiting) >= self.queue + self.slots - len(self._running):
                raise Busy(f"all {self.slots} slots are taken and {self.queue} requests wait")
            ticket = FakeTicket(request, sink)
            self._waiting.append(ticket)
            self.submitted.append(ticket)
        return ticket

    def stats(self) -> dict[str, int | float]:
        now = {"slots": self.slots, "running": len(self._running), "waiting": len(self._waiting)}
        return {name: now.get(name, 0) for name in STATS_KEYS if name not in ("uptime_s", "connections")}

    def close(self) -> None:
        self._closed.set()
        self._thread.join(TIMEOUT)

    def active(self) -> int:
        with self._lock:
            return len(self._running) + len(self._waiting)

    def _loop(self) -> None:
        while not self._closed.wait(self.step):
            self._advance()
        for ticket in [*self._running, *self._waiting]:
            self._end(ticket, "cancel")

    def _advance(self) -> None:
        with self._lock:
            for ticket in [t for t in self._waiting if t.cancelled]:
                self._waiting.remove(ticket)
                self._end(ticket, "cancel")
            while self._waiting and len(self._running) < self.slots:
                self._running.append(self._waiting.popleft())
            self._running = [ticket for ticket in self._running if not self._step(ticket)]

    def _step(self, ticket: FakeTicket) -> bool:
        """True if the request ends with this step."""
        request = ticket.request
        if ticket.cancelled:
            return self._end(ticket, "cancel")
        if ticket.position < len(request.prompt):
            ticket.position = min(ticket.position + self.chunk, len(request.prompt))
            ticket.sink(PromptProgress(ticket.position, len(request.prompt), 1.0, 1000.0))
            return False
        if ticket.generated == request.max_new:
            return self._end(ticket, "length")
        token = self._next(ticket)
        ticket.generated += 1
        logprobs = request.params.logprobs
        top = tuple((token + i, -0.5 - i) for i in range(logprobs or 0))
        ticket.sink(Token(Choice(token, None if logprobs is None else -0.5, top)))
        ends = set(request.params.stop) | (set() if request.params.ignore_eos else {EOS})
        if token in ends:
            return self._end(ticket, "stop")
        return ticket.generated == request.max_new and self._end(ticket, "length")

    def _next(self, ticket: FakeTicket) -> int:
        answer = self.script.get(ticket.request.prompt)
        if answer and ticket.seed is None and ticket.generated < len(answer):
            return answer[ticket.generated]
        if ticket.seed is None:
            return (ticket.request.prompt[-1] + ticket.generated + 1) % VOCAB
        return random.Random(f"{ticket.seed} {ticket.generated}").randrange(3, VOCAB)

    def _end(self, ticket: FakeTicket, reason: str) -> bool:
        seed = ticket.seed if ticket.generated else None
        done = Done(ticket.generated, len(ticket.request.prompt), 1.0, 2.0, reason, 0, 0, 0, seed)  # type: ignore[arg-type]
        self.ended.append((ticket.request, done))
        ticket.sink(done)
        return True


class RunningDaemon:
    """A Daemon on a thread of its own."""

    def __init__(self, path: str, scheduler: FakeScheduler, load: Callable[[], Engine] | None = None) -> None:
        self.path, self.scheduler = path, scheduler
        info = Info("strata/0.1.0", "/models/model.gguf", "llama", VOCAB, CONTEXT, 1, (EOS,), "cpu", scheduler.slots)
        self.daemon = Daemon(listen(path), load or (lambda: Engine(info, scheduler)))
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self.daemon.serve(self._stop))
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        except BaseException as error:
            self.error = error
        finally:
            self._loop.close()

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()


class Client:
    """Lines over a socket."""

    def __init__(self, path: str, greet: bool = True) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(TIMEOUT)
        self.socket.connect(path)
        self._file = self.socket.makefile("rb")
        self.greeting = [self.line(), self.line()] if greet else []

    def send(self, *lines: str) -> None:
        self.socket.sendall("".join(f"{line}\n" for line in lines).encode())

    def line(self) -> str:
        """The next line without its LF; empty at the end."""
        return self._file.readline().decode().removesuffix("\n")

    def answer(self) -> list[str]:
        """The lines up to DONE or ERR."""
        lines = [self.line()]
        while lines[-1].split(" ")[0] not in ("DONE", "ERR", ""):
            lines.append(self.line())
        return lines

    def tokens(self) -> list[int]:
        return [int(line.split()[1]) for line in self.answer() if line.startswith("T ")]

    def rest(self) -> list[str]:
        return self._file.read().decode().splitlines()

    def half_close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._file.close()
        self.socket.close()


def wait_until(condition: Callable[[], bool], seconds: float = TIMEOUT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


@pytest.fixture
def until() -> Callable[..., None]:
    return wait_until


@pytest.fixture
def socket_path(tmp_path: Path) -> str:
    return str(tmp_path / "s")


@pytest.fixture
def start(socket_path: str) -> Iterator[Callable[..., RunningDaemon]]:
    """start(load=None, **FakeScheduler's arguments) -> a daemon, stopped after the test."""
    running: list[RunningDaemon] = []

    def begin(load: Callable[[], Engine] | None = None, **arguments: float) -> RunningDaemon:
        running.append(RunningDaemon(socket_path, FakeScheduler(**arguments), load))  # type: ignore[arg-type]
        if load is None:
            wait_until(lambda: running[-1].daemon.info is not None)
        return running[-1]

    yield begin
    for daemon in running:
        daemon.stop()
        daemon.scheduler.close()


@pytest.fixture
def connect(socket_path: str) -> Iterator[Callable[..., Client]]:
    clients: list[Client] = []

    def begin(greet: bool = True) -> Client:
        clients.append(Client(socket_path, greet))
        return clients[-1]

    yield begin
    for client in clients:
        client.close()


@pytest.fixture(scope="session")
def fake_scheduler() -> type[FakeScheduler]:
    return FakeScheduler


@pytest.fixture(scope="session")
def running_daemon() -> type[RunningDaemon]:
    return RunningDaemon
