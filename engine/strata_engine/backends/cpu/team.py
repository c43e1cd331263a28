"""A fixed team of threads that enter one nogil function together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[int], None]

LAG = 3  # runs that a member may be behind
_NAP = 5e-5  # seconds between looks at a member that is


class _Member:
    """A thread with an inbox; `behind` runs wait or are under way in it."""

    def __init__(self, number: int) -> None:
        self.inbox: SimpleQueue[Work | None] = SimpleQueue()
        self.sent = self.left = 0
        self.thread = threading.Thread(target=self._serve, args=(number,), name=f"strata-cpu-{number}", daemon=True)
        self.thread.start()

    @property
    def behind(self) -> int:
        return self.sent - self.left

    def send(self, work: Work) -> None:
        self.sent += 1
        self.inbox.put(work)

    def _serve(self, number: int) -> None:
        while (work := self.inbox.get()) is not None:
            work(number)
            self.left += 1


class Team:
    """`size` threads, the caller's among them. `run(work)` calls work(0) .. work(size - 1), each on its own thread.

    It returns when work(0) does, which is expected to wait for what matters. A member that gets no processor may still
    be in earlier runs, but never more than LAG behind: what a run uses may be used again LAG + 1 runs later.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._members = [_Member(i + 1) for i in range(size - 1)]

    def run(self, work: Work) -> None:
        for member in self._members:
            while member.behind >= LAG:
                time.sleep(_NAP)
            member.send(work)
        work(0)

    def close(self) -> None:
        for member in self._members:
            member.inbox.put(None)
        for member in self._members:
            member.thread.join()
