"""The daemon: one event loop that owns the socket, the connections and their requests' way to the scheduler.

The loop never computes: loading runs in a thread of its own, tokens come from the scheduler's step thread through a
mailbox, long lines are parsed by a thread of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from .connection import Connection, Scheduler, Turn
from .listener import Listener
from .loopside import HangUps, Mailbox
from .replies import Info
from .request import Event

log = logging.getLogger(__name__)

GOODBYE_SECONDS = 2.0  # how long clients may take to read their last lines when the engine ends


@dataclass(slots=True)
class Engine:
    """What loading gives: a started scheduler, and what INFO says of it."""

    info: Info
    scheduler: Scheduler
    close: Callable[[], None] = lambda: None  # called after the scheduler is closed


class Daemon:
    """Serves `listener` from the first moment on; until `load` has returned, clients are told LOADING."""

    info: Info | None = None
    scheduler: Scheduler
    hangups: HangUps

    def __init__(self, listener: Listener, load: Callable[[], Engine]) -> None:
        self._listener = listener
        self._load = load
        self._connections: set[Connection] = set()
        self._started = time.monotonic()
        self.stopping = False
        self.parser = ThreadPoolExecutor(1, thread_name_prefix="parse")

    async def serve(self, stop: asyncio.Event) -> None:
        """Load and serve until `stop` is set. Raises what `load` raises; the socket file is gone in any case."""
        loop = asyncio.get_running_loop()
        self.hangups = HangUps(loop)
        self._mailbox = Mailbox(loop, self._deliver)
        server = await loop.create_unix_server(lambda: Connection(self), sock=self._listener.socket)
        log.debug("listening on %s", self._listener.path)
        try:
            engine = await _until(stop, _in_thread(loop, self._load))
            if engine:
                self.scheduler, self.info = engine.scheduler, engine.info
                log.info("ready on %s: %s, %s", self._listener.path, self.info.model, self.info.device)
                await stop.wait()
        finally:
            self.stopping = True
            server.close()
            self._listener.remove()
            await self._end(engine if self.info else None)

    async def _end(self, engine: Engine | None) -> None:
        """Running requests end with DONE cancel, later ones are refused, and every client gets its last lines."""
        if engine:
            await asyncio.to_thread(engine.scheduler.close)
        await asyncio.sleep(0)  # the mailbox delivers what closing posted
        for connection in list(self._connections):
            connection.shut_down()
        deadline = time.monotonic() + GOODBYE_SECONDS
        while self._connections and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.abort()
        await asyncio.sleep(0)
        self.hangups.close()
        self.parser.shutdown(wait=False, cancel_futures=True)
        if engine:
            engine.close()
        log.debug("ended")

    # ---- what a connection needs

    def opened(self, connection: Connection) -> None:
        self._connections.add(connection)

    def closed(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def post(self, connection: Connection, turn: Turn, event: Event) -> None:
        """Called on the step thread."""
        self._mailbox.post((connection, turn, event))

    def stats(self) -> dict[str, int | float]:
        uptime = time.monotonic() - self._started
        return {"uptime_s": uptime, "connections": len(self._connections), **self.scheduler.stats()}

    def _deliver(self, events: list[tuple[Connection, Turn, Event]]) -> None:
        for connection, turn, event in events:
            try:
                connection.deliver(turn, event)
            except Exception:  # one client's fault must not cost the others their events
                log.exception("an event could not be delivered")
                connection.abort()
        for connection in {connection for connection, _, _ in events}:
            connection.flush()


def _in_thread(loop: asyncio.AbstractEventLoop, work: Callable[[], Engine]) -> asyncio.Future[Engine]:
    """Run `work` on a thread that does not keep the process alive: a compiler cannot be interrupted."""
    future: asyncio.Future[Engine] = loop.create_future()

    def settle(engine: Engine | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error:
            future.set_exception(error)
        elif engine:
            future.set_result(engine)

    def run() -> None:
        engine, error = None, None
        try:
            engine = work()
        except BaseException as raised:  # handed to the loop, which raises it
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, engine, error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return future


async def _until(stop: asyncio.Event, loading: asyncio.Future[Engine]) -> Engine | None:
    """The loaded engine, or None if `stop` is set first."""
    stopped = asyncio.ensure_future(stop.wait())
    waited: set[asyncio.Future[Any]] = {loading, stopped}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if loading.done():
        return loading.result()
    loading.cancel()
    return None


async def serve_until_signal(listener: Listener, load: Callable[[], Engine]) -> bool:
    """Serve until SIGTERM or SIGINT; a second signal ends the process at once. False if loading never finished."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        stop.set()
        log.info("%s: ending", number.name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    daemon = Daemon(listener, load)
    await daemon.serve(stop)
    return daemon.info is not None
