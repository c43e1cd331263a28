"""One client of the daemon: lines in, replies out, its requests one after the other.

Lines are taken from the input as far as READ_AHEAD allows. PING, STATS and STOP act when they are read; GENs and
refusals wait for their turn behind the GENs before them, which the connection's own task answers in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from .protocol import LINE_MAX, Gen, Limits, Ping, ProtocolError, Quit, Stats, Stop, is_gen, parse_line
from .replies import format_error, format_event, format_info, format_ready, format_stats
from .request import Busy, Done, Event, Failed, Request

if TYPE_CHECKING:
    from .loopside import HangUps
    from .replies import Info

log = logging.getLogger(__name__)

READ_AHEAD_LINES = 256  # lines that wait for their turn; past it the rest waits in the socket
READ_AHEAD_BYTES = LINE_MAX
LINES_A_TURN = 64  # lines handled before other connections get the loop
BIG_LINE = 64 * 1024  # bytes; a longer GEN is parsed off the loop
OUTPUT_HIGH = 64 * 1024  # bytes that the client has not taken: no further line is read, no further GEN begun
OUTPUT_MAX = 8 * 2**20  # bytes that the client has not taken: it is dropped
LINGER_SECONDS = 2.0  # how long a refused connection may go on sending, so that it gets to read why


class Ticket(Protocol):
    def cancel(self) -> None: ...


class Scheduler(Protocol):
    def submit(self, request: Request, sink: Callable[[Event], None]) -> Ticket: ...
    def stats(self) -> dict[str, int | float]: ...
    def close(self) -> None: ...


class Host(Protocol):
    """What a connection needs of the daemon."""

    info: Info | None  # None while the model is loading
    scheduler: Scheduler
    stopping: bool
    hangups: HangUps
    parser: ThreadPoolExecutor

    def opened(self, connection: Connection) -> None: ...
    def closed(self, connection: Connection) -> None: ...
    def post(self, connection: Connection, turn: Turn, event: Event) -> None: ...
    def stats(self) -> dict[str, int | float]: ...


@dataclass(slots=True, eq=False)
class Turn:
    """One line whose answer waits for its turn."""

    order: int  # which line of the connection it was
    line: bytes = b""  # a GEN that is not parsed yet
    request: Request | None = None  # a GEN that is
    refusal: ProtocolError | None = None
    last: bool = False  # the connection closes behind it
    stopped_by: int | None = None  # which line was the STOP that ended it
    ticket: Ticket | None = None
    finished: asyncio.Future[None] | None = None

    @property
    def stoppable(self) -> bool:
        """True for a GEN that has not finished and that no STOP has ended."""
        gen = bool(self.line) or self.request is not None
        return gen and self.stopped_by is None and not (self.finished and self.finished.done())


class Connection(asyncio.Protocol):
    """One client, as asyncio's protocol of its socket; see the module. Used on the event loop alone."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._input = bytearray()
        self._scanned = 0  # bytes of the input known to hold no LF
        self._eof = False
        self._deaf = False  # input is read and thrown away
        self._dismissed = False  # the last line is written
        self._lines = 0
        self._turns: deque[Turn] = deque()  # the first is being answered
        self._turn_bytes = 0
        self._output: list[str] = []  # replies of this pass of the mailbox
        self._pump_due: asyncio.Handle | None = None
        self._wake = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._task: asyncio.Task[None] | None = None

    # ---- what the transport tells

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=OUTPUT_HIGH)
        self._fd: int = transport.get_extra_info("socket").fileno()
        self._host.hangups.watch(self._fd, self._transport.abort)
        self._host.opened(self)
        if self._host.info is None:
            self._dismiss(format_error("LOADING", "the model is being loaded; connect again in a moment"))
            return
        self.info = self._host.info
        self._limits = Limits(self.info.vocab, self.info.context)
        self.write(format_info(self.info), format_ready(self.info.context))
        self._task = self._loop.create_task(self._serve())

    def connection_lost(self, exc: Exception | None) -> None:
        self._host.hangups.forget(self._fd)
        self._host.closed(self)
        if self._pump_due:
            self._pump_due.cancel()
        if self._task:
            self._task.cancel()
        for turn in self._turns:
            if turn.ticket:
                turn.ticket.cancel()

    def data_received(self, data: bytes) -> None:
        if not self._deaf:
            self._input += data
            self._pump()

    def eof_received(self) -> bool:
        self._eof = True
        if self._dismissed:
            return False
        self._pump()
        return True  # a half-close: the answers still go out

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()
        self._pump()

    # ---- input: from bytes to turns

    def _pump(self) -> None:
        """Take lines from the input, as many as may be taken now."""
        if self._pump_due:
            self._pump_due.cancel()
            self._pump_due = None
        if self._task is None:
            return
        for _ in range(LINES_A_TURN):
            line = None if self._full() else self._take_line()
            if line is None:
                break
            self._route(line)
        else:
            self._pump_due = self._loop.call_soon(self._pump)
        self._pace_reading()
        self._wake.set()

    def _full(self) -> bool:
        ahead = len(self._turns) >= READ_AHEAD_LINES or self._turn_bytes >= READ_AHEAD_BYTES
        return ahead or self._deaf or not self._writable.is_set()

    def _pace_reading(self) -> None:
        if self._eof or self._transport.is_closing():
            return
        if not self._deaf and (self._pump_due or self._full()):
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _take_line(self) -> bytes | None:
        """The next line without its LF, or None if it is not whole yet. What is no line becomes a refusal."""
        end = self._input.find(b"\n", self._scanned)
        length = end if end >= 0 else len(self._input)
        if length > LINE_MAX and not (length == LINE_MAX + 1 and self._input[LINE_MAX : LINE_MAX + 1] == b"\r"):
            self._refuse_input("TOO_LONG", f"a line has at most {LINE_MAX} bytes")
            return None
        if end < 0:
            self._scanned = length
            if self._eof and length:
                self._refuse_input("BAD_LINE", "the last line has no line ending")
            return None
        line = bytes(self._input[:end])
        del self._input[: end + 1]
        self._scanned = 0
        return line

    def _refuse_input(self, code: str, text: str) -> None:
        self._ignore_input()
        self._add(Turn(self._lines, refusal=ProtocolError(code, text), last=True))

    def _ignore_input(self) -> None:
        self._deaf = True
        self._input = bytearray()
        self._scanned = 0

    def _route(self, line: bytes) -> None:
        """Act on a line that needs no turn, or give it one."""
        self._lines += 1
        if is_gen(line) and (self._turns or len(line) > BIG_LINE):
            self._add(Turn(self._lines, line=line))
            return
        try:
            command = parse_line(line, self._limits)
        except ProtocolError as refusal:
            self._add(Turn(self._lines, refusal=refusal))
            return
        match command:
            case Gen(request):
                self._add(Turn(self._lines, request=request))
            case Stop():
                self._stop(self._lines)
            case Ping():
                self.write("PONG")
            case Stats():
                self.write(format_stats(self._host.stats()))
            case Quit():
                self._ignore_input()
                self._add(Turn(self._lines, last=True))

    def _add(self, turn: Turn) -> None:
        if turn.refusal and not turn.last and not self._turns:
            self.write(format_error(turn.refusal.code, turn.refusal.text))
            return
        self._turns.append(turn)
        self._turn_bytes += len(turn.line)

    def _stop(self, order: int) -> None:
        """End the oldest unfinished GEN before line `order`; one that a STOP has ended counts as finished."""
        for turn in self._turns:
            if turn.stoppable and turn.order < order:
                turn.stopped_by = order
                if turn.ticket:
                    turn.ticket.cancel()
                return

    # ---- output: from turns to replies

    async def _serve(self) -> None:
        try:
            await self._answer()
        except Exception:
            log.exception("a connection is closed")
            self._transport.abort()

    async def _answer(self) -> None:
        """Answer the turns in order until there can be no more, then close."""
        while (turn := await self._next_turn()) and not turn.last:
            await self._take(turn)
            self._turns.popleft()
            self._turn_bytes -= len(turn.line)
            self._pump()
            await self._writable.wait()
        if turn and turn.refusal:
            self._dismiss(format_error(turn.refusal.code, turn.refusal.text))
        else:
            self._transport.close()

    async def _next_turn(self) -> Turn | None:
        while not self._turns:
            ended = self._eof and not self._input and not self._pump_due
            if ended or self._host.stopping:
                return None
            self._wake.clear()
            await self._wake.wait()
        return self._turns[0]

    async def _take(self, turn: Turn) -> None:
        try:
            if turn.refusal:
                raise turn.refusal
            await self._generate(turn, turn.request or await self._parse(turn.line))
        except ProtocolError as refusal:
            self.write(format_error(refusal.code, refusal.text))
            if turn.stopped_by is not None and turn.ticket is None:
                self._stop(turn.stopped_by)  # what was refused was no GEN: the STOP is for the next one

    async def _parse(self, line: bytes) -> Request:
        if len(line) <= BIG_LINE:
            command = parse_line(line, self._limits)
        else:
            command = await self._loop.run_in_executor(self._host.parser, parse_line, line, self._limits)
        return cast(Gen, command).request

    async def _generate(self, turn: Turn, request: Request) -> None:
        """Submit, and wait for the end. Raises ProtocolError if the request cannot be taken."""
        if self._host.stopping:
            raise ProtocolError("SHUTDOWN", "the engine is ending")
        if turn.stopped_by is not None:
            self.write(format_event(Done(0, len(request.prompt), 0.0, 0.0, "cancel", 0, 0, 0, None)))
            return
        turn.finished = self._loop.create_future()
        try:
            turn.ticket = self._host.scheduler.submit(request, lambda event: self._host.post(self, turn, event))
        except Busy as error:
            raise ProtocolError("BUSY", str(error) or "every slot is taken and the queue is full") from error
        except Exception as error:
            log.exception("a request could not be submitted")
            raise ProtocolError("INTERNAL", f"{type(error).__name__}; the engine's log says more") from error
        await turn.finished

    def deliver(self, turn: Turn, event: Event) -> None:
        """Take one event of the request of `turn`; `flush` sends what has come together."""
        line = format_event(event)
        self._output.append(line)
        if isinstance(event, Done | Failed) and turn.finished and not turn.finished.done():
            log.debug("%s", line)
            turn.finished.set_result(None)

    def flush(self) -> None:
        if self._output:
            lines, self._output = self._output, []
            self.write(*lines)

    def write(self, *lines: str) -> None:
        if self._transport.is_closing():
            return
        self._transport.write("".join(f"{line}\n" for line in lines).encode("ascii"))
        waiting = self._transport.get_write_buffer_size()
        if waiting > OUTPUT_MAX:
            log.warning("a client is dropped: it left %d bytes of its answer unread", waiting)
            self._transport.abort()

    def _dismiss(self, line: str) -> None:
        """Say why, close our direction, and swallow what the client still sends: closed at once, it would meet a
        broken pipe before it reads the reason."""
        self._ignore_input()
        self._dismissed = True
        self.write(line)
        if not self._transport.is_closing():
            self._transport.write_eof()
        if self._eof:
            self._transport.close()
            return
        self._pace_reading()
        self._loop.call_later(LINGER_SECONDS, self._transport.abort)

    # ---- what the daemon tells

    def shut_down(self) -> None:
        """Close once the turns are answered; none of them starts anything any more."""
        self._wake.set()
        if self._task is None or self._dismissed:
            self._transport.abort()

    def abort(self) -> None:
        self._transport.abort()
