"""Stop strings, also where they span tokens: text that may still become one is held back."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feeds text through; `push` returns what is certainly before any stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None  # the stop string that ended the text

    @property
    def held(self) -> int:
        """Characters held back at the moment."""
        return len(self._held)

    def push(self, text: str) -> str:
        """The part of the text so far that can be shown now. After a hit nothing more comes out."""
        if self.hit is not None:
            return ""
        self._held += text
        found = [(at, -len(stop), stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, _, self.hit = min(found)  # the earliest one; of several there, the longest
            return self._release(at, drop_rest=True)
        return self._release(len(self._held) - self._undecided())

    def flush(self) -> str:
        """What is still held back: the text ended before it became a stop string."""
        return self._release(len(self._held))

    def _undecided(self) -> int:
        """Length of the longest tail of the held text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def _release(self, count: int, drop_rest: bool = False) -> str:
        text, rest = self._held[:count], self._held[count:]
        self._held = "" if drop_rest else rest
        return text
