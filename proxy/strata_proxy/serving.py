"""One run of the proxy: listen, serve, and end well at a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_log import AccessLogger

from .app import create_app
from .config import Config
from .handlers import ENDING

log = logging.getLogger("strata_proxy")

GRACE_S = 4.0  # running answers may end by themselves within this after a signal
CUT_S = 0.4  # then their last event may be written within this; aiohttp spends it twice on a client that does not read


class ServeError(Exception):
    """The proxy cannot serve; the message is one line for a person."""


class AccessLog(AccessLogger):
    """One line a request, but none for the polling of a monitor that finds all well."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        if request.path not in ("/health", "/metrics") or self.logger.isEnabledFor(logging.DEBUG):
            super().log(request, response, time)


def one_line(record: logging.LogRecord) -> bool:
    """A filter of aiohttp's log: what is malformed in a request is the client's fault and needs no traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError | web.RequestPayloadError):
        return True
    record.msg, record.args = "a malformed request: %s", (" ".join(str(error)[:200].split()),)
    record.exc_info = record.exc_text = None
    record.levelno, record.levelname = logging.INFO, "INFO"
    return log.isEnabledFor(logging.INFO)


def run(config: Config) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError, and ServeError if the address cannot be used."""
    app = create_app(config)
    logging.getLogger("aiohttp.server").addFilter(one_line)
    try:
        asyncio.run(_serve(app, config))
    except (OSError, UnicodeError) as error:  # the latter for a host that is no name
        message = f"cannot listen on {config.host}:{config.port}: {_reason(error)}; choose another --port or --host"
        raise ServeError(message) from None


async def _serve(app: web.Application, config: Config) -> None:
    signalled = _on_signals()
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves ends its request
        shutdown_timeout=CUT_S,
        access_log=logging.getLogger("strata_proxy.access"),
        access_log_class=AccessLog,
        access_log_format='%a "%r" %s %b bytes %Tf s',
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, config.host, config.port).start()
        log.info("listening on %s", " and ".join(f"http://{_address(name)}" for name in runner.addresses))
        await signalled.wait()
        await app[ENDING].finish(GRACE_S)
    finally:
        await runner.cleanup()


def _on_signals() -> asyncio.Event:
    """Set by the first SIGINT or SIGTERM; a second one ends the process at once."""
    signalled, loop = asyncio.Event(), asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)
        signalled.set()
        log.info("%s: ending", number.name)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return signalled


def _reason(error: OSError | UnicodeError) -> str:
    """Without asyncio's own words around it, which repeat the address."""
    if isinstance(error, UnicodeError):
        return str(error)
    if isinstance(error, socket.gaierror) or error.errno is None:
        return error.strerror or str(error)
    return os.strerror(error.errno)


def _address(name: tuple[str, int]) -> str:
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
