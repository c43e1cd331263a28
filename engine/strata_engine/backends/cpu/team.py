"""A fixed team of threads that enter one nogil function together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[int], None]


class Team:
    """`size` threads, the caller's among them. `run(work)` calls work(0) .. work(size - 1), each on its own thread.

    The work is expected to hold a barrier of its own at its end, so run() does not wait for the others to return.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._inboxes: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in range(size - 1)]
        self._threads = [
            threading.Thread(target=self._serve, args=(i + 1, inbox), name=f"strata-cpu-{i + 1}", daemon=True)
            for i, inbox in enumerate(self._inboxes)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _serve(number: int, inbox: SimpleQueue[Work | None]) -> None:
        while (work := inbox.get()) is not None:
            work(number)

    def run(self, work: Work) -> None:
        for inbox in self._inboxes:
            inbox.put(work)
        work(0)

    def close(self) -> None:
        for inbox in self._inboxes:
            inbox.put(None)
        for thread in self._threads:
            thread.join()
