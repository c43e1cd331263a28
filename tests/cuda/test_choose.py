"""How a step's draws are divided between the arg-max and the sampling chain, without a GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the cuda extra")
pytest.importorskip("numba.cuda", reason="needs the cuda extra")

from strata_engine.backends.cuda.backend import CudaBackend
from strata_engine.backends.cuda.device import DeviceError
from strata_engine.params import GenParams
from strata_engine.rows import Choice, Draw

GREEDY = Draw(GenParams(), 0, np.empty(0, np.int32))
SAMPLED = Draw(GenParams(temperature=1.0, seed=1), 0, np.empty(0, np.int32))
SCORED = Draw(GenParams(logprobs=0), 0, np.empty(0, np.int32))


class Recorder:
    """Stands for the device, the sampler and a graph: what was asked of them, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("wait")

    def stage(self, draws: list[Draw], rows: int) -> None:
        self.calls.append("stage")

    def launch(self) -> None:
        self.calls.append("launch")

    def read(self, draws: list[Draw]) -> list[Choice]:
        return [Choice(100 + i) for i in range(3)]


def backend(recorder: Recorder) -> CudaBackend:
    made = CudaBackend.__new__(CudaBackend)
    made._device = made._sampler = recorder  # type: ignore[assignment]
    made._graphs = {("chain", 4): recorder}  # type: ignore[dict-item]
    made._choice, made._wanted = np.arange(8, dtype=np.int32), 3
    return made


def test_greedy_rows_run_no_chain() -> None:
    recorder = Recorder()
    assert backend(recorder).choose([GREEDY] * 3) == [Choice(0), Choice(1), Choice(2)]
    assert recorder.calls == ["wait"]


def test_one_row_that_is_not_plain_takes_the_step_through_the_chain() -> None:
    recorder = Recorder()
    assert backend(recorder).choose([SAMPLED, GREEDY, SCORED]) == [Choice(100), Choice(101), Choice(102)]
    assert recorder.calls == ["stage", "launch", "wait"]


def test_a_fault_ends_the_process_whichever_call_meets_it(monkeypatch, capfd) -> None:
    def fail(draws: list[Draw], rows: int) -> None:
        raise DeviceError("CUDA: CUDA_ERROR_ILLEGAL_ADDRESS")

    def leave(code: int) -> None:
        raise SystemExit(code)

    recorder = Recorder()
    recorder.stage = fail  # type: ignore[method-assign]
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit, match="70"):
        backend(recorder).choose([SAMPLED] * 3)
    assert capfd.readouterr().err == "strata-engine: the GPU failed: CUDA: CUDA_ERROR_ILLEGAL_ADDRESS\n"
