"""For parity checks: the first logits of every request, appended to a file."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..rows import Choice, Draw, Float32, Rows
from .base import Backend

VARIABLE = "STRATA_DUMP_FIRST_LOGITS"


class FirstLogitsDump:
    """A backend that appends the raw logits of each request's first token to `path`: float32 [requests, vocab].

    It waits for every step, so that the logits are still there.
    """

    feeds = False

    def __init__(self, backend: Backend, path: str) -> None:
        self._backend = backend
        with open(path, "ab"):  # fail now rather than at the first request
            self._path = path
        self.device, self.vocab, self.context = backend.device, backend.vocab, backend.context
        self.slots, self.max_rows, self.chunk = backend.slots, backend.max_rows, backend.chunk

    def forward(self, rows: Rows) -> None:
        self._backend.forward(rows)

    def choose(self, draws: Sequence[Draw]) -> list[Choice]:
        first = [i for i, draw in enumerate(draws) if draw.index == 0]
        if first:
            with open(self._path, "ab") as file:
                file.write(self._backend.logits()[first].tobytes())
        return self._backend.choose(draws)

    def logits(self) -> Float32:
        return self._backend.logits()

    def close(self) -> None:
        self._backend.close()


def dumping(backend: Backend) -> Backend:
    """The backend, dumping if the environment variable names a file. OSError if that cannot be written."""
    path = os.environ.get(VARIABLE)
    return FirstLogitsDump(backend, path) if path else backend
