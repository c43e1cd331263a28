"""The proxy's view of the engine: a watcher that knows whether it is up, and one connection a generation."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from strata_engine.protocol import LINE_MAX
from strata_engine.replies import Info, Pong, Ready, Reply, VersionError, parse_reply
from strata_engine.request import Failed

from .errors import ApiError, reason, unavailable
from .metadata import ModelFileError
from .vocab import Vocab

log = logging.getLogger(__name__)

GREETING_S = 5.0  # the engine answers within 50 ms at any load; past this it hangs
PING_S = 5.0
RETRY_S = 0.5

_STATUS = {"BUSY": 429, "LOADING": 503, "SHUTDOWN": 503, "TOO_LONG": 413, "BAD_LINE": 500, "INTERNAL": 500}
_CODE = {"BUSY": "engine_busy", "CONTEXT_FULL": "context_length_exceeded"}


def refusal(failed: Failed) -> ApiError:
    """The HTTP error for an ERR line; its text names the key and the value."""
    if failed.code in ("LOADING", "SHUTDOWN"):
        return unavailable(f"The engine is not available: {failed.text}")
    status = _STATUS.get(failed.code, 400)
    return ApiError(
        f"The engine refused the request: {failed.text}",
        status=status,
        code=_CODE.get(failed.code, failed.code.lower()),
        kind="rate_limit_error" if status == 429 else None,
        headers={"Retry-After": "1"} if status == 429 else None,
    )


class Link:
    """One connection to the engine, past its greeting."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.info: Info

    async def greet(self) -> None:
        """Read INFO and READY. Raises ApiError (503) where the engine says something else."""
        reply = await self.read()
        while not isinstance(reply, Ready):
            if isinstance(reply, Failed):
                raise refusal(reply)
            if isinstance(reply, Info):
                self.info = reply
            reply = await self.read()
        if not hasattr(self, "info"):
            raise unavailable("The engine did not introduce itself (no INFO line).")

    async def send(self, line: bytes) -> None:
        try:
            self._writer.write(line)
            await self._writer.drain()
        except OSError as error:
            raise unavailable(f"The engine went away: {reason(error)}") from None

    async def read(self) -> Reply:
        """The next reply.

        Raises ApiError (503) when the engine is gone or speaks another version, (500) when it cannot be understood.
        """
        try:
            line = await self._reader.readline()
            if not line.endswith(b"\n"):
                raise unavailable("The engine went away.")
            return parse_reply(line)
        except OSError as error:
            raise unavailable(f"The engine went away: {reason(error)}") from None
        except VersionError as error:
            raise ApiError(f"The engine cannot be used: {error}", status=503, code="engine_protocol") from None
        except ValueError as error:  # ReplyError, or a line past the limit
            raise ApiError(f"The engine cannot be understood: {error}", status=500, code="engine_error") from None

    def close(self) -> None:
        """Close both directions at once, which cancels what is still running on this connection."""
        self._writer.transport.abort()


@asynccontextmanager
async def connected(path: str) -> AsyncIterator[Link]:
    """A greeted connection to the engine's socket. Raises ApiError (503) where there is none."""
    link = await _open(path)
    try:
        yield link
    finally:
        link.close()


async def _open(path: str) -> Link:
    link: Link | None = None
    try:
        async with asyncio.timeout(GREETING_S):
            link = Link(*await asyncio.open_unix_connection(path, limit=LINE_MAX))
            await link.greet()
        return link
    except BaseException as error:
        if link is not None:
            link.close()
        if isinstance(error, TimeoutError):
            raise unavailable(f"The engine at {path} does not answer.") from None
        if isinstance(error, OSError):
            raise unavailable(f"The engine cannot be reached at {path}: {reason(error)}") from None
        raise


@dataclass(frozen=True, slots=True)
class Served:
    """An engine that is up, and the vocabulary of its model."""

    info: Info
    vocab: Vocab


class Engine:
    """Keeps one idle connection open to know at once when the engine goes and comes."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.served: Served | None = None  # None: down
        self.problem = "The engine has not been reached yet."
        self._vocabs: tuple[tuple[str, int, int], Vocab] | None = None
        self._loading = asyncio.Lock()

    @property
    def up(self) -> bool:
        return self.served is not None

    async def watch(self) -> None:
        """Run until cancelled: connect, ping, and after a loss connect again."""
        while True:
            try:
                async with connected(self.path) as link:
                    self.served = Served(link.info, await self._vocab(link.info.model))
                    log.info("engine up: %s, context %d", link.info.model, link.info.context)
                    await self._ping(link)
            except ApiError as error:
                self._down(error)
            except Exception as error:  # the watcher must outlive whatever happens
                log.exception("engine watcher")
                self._down(unavailable(f"The proxy's engine watcher failed: {error}"))
            await asyncio.sleep(RETRY_S)

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[tuple[Link, Vocab]]:
        """A connection for one generation, with the vocabulary of the model that answers on it."""
        async with connected(self.path) as link:
            served = self.served
            yield link, served.vocab if served and served.info == link.info else await self._vocab(link.info.model)

    async def _ping(self, link: Link) -> None:
        while True:
            await link.send(b"PING\n")
            try:
                async with asyncio.timeout(PING_S):
                    while not isinstance(await link.read(), Pong):
                        pass
            except TimeoutError:
                raise unavailable(f"The engine at {self.path} does not answer.") from None
            try:
                async with asyncio.timeout(PING_S):
                    await link.read()  # silence until the next ping; the end of the stream is noticed at once
            except TimeoutError:
                pass

    def _down(self, error: ApiError) -> None:
        """Say so once: a loss and what waiting will not mend are warnings, an engine that is yet to come is not."""
        if self.up or (error.message != self.problem and error.code != "engine_unavailable"):
            log.warning("engine down: %s", error.message)
        elif error.message != self.problem:
            log.info("waiting for the engine: %s", error.message)
        self.served, self.problem = None, error.message

    async def _vocab(self, model: str) -> Vocab:
        """The vocabulary of the file, read again only if the file changed. Raises ApiError (503)."""
        async with self._loading:
            try:
                stat = Path(model).stat()
                key = (model, stat.st_mtime_ns, stat.st_size)
                if self._vocabs is None or self._vocabs[0] != key:
                    self._vocabs = (key, await asyncio.to_thread(Vocab.load, Path(model)))
                return self._vocabs[1]
            except OSError as error:
                message = f"cannot read the model file {model}: {reason(error)}"
                raise ApiError(message, status=503, code="model_unusable") from None
            except ModelFileError as error:
                raise ApiError(str(error), status=503, code="model_unusable") from None
