"""Two bridges into the event loop: events from the step thread, hang-ups from the kernel."""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Items posted by any thread reach `deliver` on the loop, in order, many of them for one wake."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[list[Item]], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._items: deque[Item] = deque()
        self._woken = False

    def post(self, item: Item) -> None:
        """Thread-safe, does not block. After the loop is closed, items are dropped."""
        self._items.append(item)
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
                self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        # Cleared before the items are taken: one posted after the last is taken sees it and wakes the loop again.
        self._woken = False
        self._deliver([self._items.popleft() for _ in range(len(self._items))])


class HangUps:
    """Tells when the other end of a socket is closed, not merely half-closed, even while nobody reads from it.

    An epoll set that asks for no event still reports EPOLLHUP, and on a Unix socket that means both directions are
    shut. The loop itself watches for reading, where a half-close and a full one look the same.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}
        loop.add_reader(self._epoll.fileno(), self._report)

    def watch(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` once, on the loop, when `fd` hangs up; `forget` it before it is closed."""
        self._epoll.register(fd, 0)
        self._callbacks[fd] = callback

    def forget(self, fd: int) -> None:
        if self._callbacks.pop(fd, None):
            self._epoll.unregister(fd)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _report(self) -> None:
        for fd, _ in self._epoll.poll(0):
            callback = self._callbacks[fd]
            self.forget(fd)
            callback()
