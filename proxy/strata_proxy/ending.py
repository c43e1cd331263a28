"""The proxy's own end: no new requests, and a limit for those that run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .errors import ApiError


def shutting_down() -> ApiError:
    """503: the proxy ends; another start of it may be asked again."""
    message = "The proxy is shutting down; send the request again later."
    return ApiError(message, status=503, code="shutting_down", headers={"Retry-After": "2"})


class Ending:
    """Knows the answers that run, and ends those that take too long once the proxy ends."""

    def __init__(self) -> None:
        self.begun = False
        self._limits: set[asyncio.Timeout] = set()
        self._idle = asyncio.Event()

    @asynccontextmanager
    async def answering(self) -> AsyncIterator[None]:
        """Around one answer. Raises ApiError (503) from within when its time is up."""
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                yield
        except TimeoutError:
            if limit.expired():
                raise shutting_down() from None
            raise
        finally:
            self._limits.discard(limit)
            if not self._limits:
                self._idle.set()

    async def finish(self, grace_s: float) -> None:
        """Refuse requests from now on; return once no answer runs, after `grace_s` at most."""
        self.begun = True
        loop = asyncio.get_running_loop()
        for limit in self._limits:
            limit.reschedule(loop.time() + grace_s)
        self._idle.clear()
        if self._limits:
            await self._idle.wait()
