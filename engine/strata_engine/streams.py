"""Standard streams that may be closed or broken: a program must not end because nobody reads what it says of itself."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO, cast


class Forgiving:
    """A text stream that loses what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, work: Callable[[], object]) -> None:
        with contextlib.suppress(OSError, ValueError):  # a full disk; a closed stream
            try:
                work()
            except BrokenPipeError:  # for good: without this, the exit would fail on what is left in the buffer
                _to_devnull(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def secure_streams() -> None:
    """Call first. Closed standard streams become /dev/null, and a stderr that breaks is no error.

    A closed one would also lend its number to the next file opened, a client's socket, say, and what a library
    prints would go there.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            _to_devnull(number)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - open until the end
    sys.stderr = cast(TextIO, Forgiving(sys.stderr or open(2, "w", closefd=False)))  # noqa: SIM115


def _to_devnull(number: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != number:
        os.dup2(null, number)
        os.close(null)
