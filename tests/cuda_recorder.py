"""A CudaBackend without a GPU: `from cuda_recorder import Recorder, queueing`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from strata_engine.backends.cuda.backend import CudaBackend
from strata_engine.backends.cuda.inputs import MOST_WORDS, Layout
from strata_engine.rows import Choice, Draw

ROWS = 8  # most rows a step
BUCKETS = (1, 2, 4, 8)


class Recorder:
    """Stands for the device and the sampler: what was asked of them, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.packed: list[tuple[int, int, int]] = []  # draws, rows and turn of each `pack`

    def use(self) -> None:
        self.calls.append("use")

    def copy_in(self, buffer: Any, source: np.ndarray, offset: int = 0) -> None:
        self.calls.append("copy")

    def wait_for(self, flag: str) -> None:
        self.calls.append(f"wait {flag}")

    def raise_flag(self, flag: str) -> None:
        self.calls.append(f"raise {flag}")

    def event(self) -> str:
        return "event"

    def elapsed_ms(self, start: str, end: str) -> float:
        return 6.0

    def pack(self, draws: Sequence[Draw], rows: int, out: np.ndarray, turn: int) -> int:
        self.packed.append((len(draws), rows, turn))
        return 4

    def read(self, draws: Sequence[Draw], turn: int) -> list[Choice]:
        return [Choice(100 * (turn + 1) + i) for i in range(len(draws))]

    def graph(self, name: str, bucket: int) -> SimpleNamespace:
        return SimpleNamespace(launch=lambda: self.calls.append(f"{name} {bucket}"))


def queueing(recorder: Recorder) -> CudaBackend:
    """A backend that queues its steps on `recorder`; arg-maxima are 0, 1, ... and in the other turn 10, 11, ..."""
    made: Any = CudaBackend.__new__(CudaBackend)
    made.vocab, made.max_rows, made.slots, made.context = 1000, ROWS, 8, 64
    made._thread = threading.get_ident()
    made._device = made._sampler = recorder
    made._layouts = {bucket: Layout(bucket, 16, slots=8) for bucket in BUCKETS}
    made._pages = np.arange(8, dtype=np.int32).reshape(8, 1)
    names = ("layers", "head", "chain", "greedy", "chained")
    made._graphs = {(name, bucket): recorder.graph(name, bucket) for name in names for bucket in BUCKETS}
    made._forward = SimpleNamespace(inputs=None)
    made._inputs = [np.zeros(MOST_WORDS + 64, np.int32) for _ in range(2)]
    made._choices = np.array([np.arange(ROWS), 10 + np.arange(ROWS)], np.int32)
    made._done = ["even", "odd"]
    made._steps, made._under_way = 0, deque()
    return made
