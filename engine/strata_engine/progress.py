"""Progress on stderr while the engine loads, compiles and warms up: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TextIO

LINE_SECONDS = 2.0  # plain lines: at most one in this time, besides a stage's first and last


class Stage(Protocol):
    def advance(self, count: int = 1, note: str = "") -> None:
        """`count` more units are done; `note` names the one at hand."""


class Progress(Protocol):
    def stage(self, text: str, total: int | None = None) -> AbstractContextManager[Stage]:
        """``with progress.stage("compiling kernels", total=12) as stage: stage.advance(1, "matmul")``

        `total` is in the caller's units, None where it is not known.
        """
        ...


class _Silent:
    def advance(self, count: int = 1, note: str = "") -> None:
        pass


class NoProgress:
    """For tests and tools."""

    @contextmanager
    def stage(self, text: str, total: int | None = None) -> Iterator[Stage]:
        yield _Silent()


class _LineStage:
    def __init__(self, stream: TextIO, text: str, total: int | None) -> None:
        self._stream, self._text, self._total = stream, text, total
        self._count = 0
        self._begun = self._printed = time.monotonic()

    def advance(self, count: int = 1, note: str = "") -> None:
        self._count += count
        now = time.monotonic()
        if now - self._printed >= LINE_SECONDS:
            self._printed = now
            share = f"{self._count}/{self._total}" if self._total else f"{self._count}"
            self.say(f"{share} {note}".rstrip())

    def say(self, text: str) -> None:
        print(f"{self._text}: {text}", file=self._stream, flush=True)

    def finish(self) -> None:
        self.say(f"done in {time.monotonic() - self._begun:.1f} s")


class LineProgress:
    """Plain lines, for logs."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextmanager
    def stage(self, text: str, total: int | None = None) -> Iterator[Stage]:
        stage = _LineStage(self._stream, text, total)
        stage.say("started")
        yield stage
        stage.finish()


class BarProgress:
    """A rich bar with the time it took, for terminals."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    @contextmanager
    def stage(self, text: str, total: int | None = None) -> Iterator[Stage]:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = [
            TextColumn("{task.description:<24}"),
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        ]
        with Bar(*columns, console=Console(file=self._stream)) as bar:
            task = bar.add_task(text, total=total, note="")

            class Advance:
                def advance(self, count: int = 1, note: str = "") -> None:
                    bar.update(task, advance=count, note=note)

            yield Advance()
            bar.update(task, total=total or 1, completed=total or 1, note="")


def open_progress(stream: TextIO | None = None) -> Progress:
    """The progress that fits `stream` (stderr by default; none where that is closed)."""
    stream = sys.stderr if stream is None else stream
    if stream is None or stream.closed:
        return NoProgress()
    return BarProgress(stream) if stream.isatty() else LineProgress(stream)


def show_cursor() -> None:
    """Undo what a bar that was cut off did to the terminal: show the cursor, below the bar."""
    stream = sys.__stderr__  # the bar has put its own in place of sys.stderr, which would swallow the escape
    with contextlib.suppress(OSError, ValueError):  # the terminal is gone
        if stream is not None and stream.isatty():
            print("\x1b[?25h", file=stream, flush=True)


class StderrHandler(logging.StreamHandler[TextIO]):
    """Logs to sys.stderr as it is at the time, so that lines go above a running bar and not into it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)
