"""What the device does for threads and processes around it, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the cuda extra")
pytest.importorskip("numba.cuda", reason="needs the cuda extra")

from strata_engine.backends.cuda.backend import RING, CudaBackend
from strata_engine.backends.cuda.inputs import Layout
from strata_engine.rows import Rows

DIE_WITH_A_WORKER = """
import multiprocessing, os
from concurrent.futures import ProcessPoolExecutor
from strata_engine.backends.cuda.device import end_with_parent

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    os._exit(0)
"""


def alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_compiling_worker_does_not_outlive_the_engine(tmp_path) -> None:
    script = tmp_path / "die.py"
    script.write_text(DIE_WITH_A_WORKER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen([sys.executable, script], env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        worker = int(process.stdout.readline())
        process.wait(20)
    deadline = time.monotonic() + 10
    while alive(worker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(worker)


def test_the_device_is_made_current_on_the_thread_of_the_steps() -> None:
    calls: list[str] = []
    queued = SimpleNamespace(launch=lambda: calls.append("launch"))
    layout = Layout(1, 16, slots=1)
    backend = CudaBackend.__new__(CudaBackend)
    backend._thread = threading.get_ident()
    backend._device = SimpleNamespace(  # type: ignore[assignment]
        use=lambda: calls.append("use"), copy_in=lambda *_: None, synchronize=lambda: None
    )
    backend._graphs = {("layers", 1): queued, ("logits", 1): queued}  # type: ignore[dict-item]
    backend._layouts, backend._pages = {1: layout}, np.zeros((1, 1), np.int32)
    backend._ring = [np.zeros(layout.words, np.int32) for _ in range(RING)]
    backend._forward, backend._step = SimpleNamespace(inputs=None), 0  # type: ignore[assignment]
    zero = np.zeros(1, np.int32)
    steps = threading.Thread(target=lambda: [backend.forward(Rows(zero, zero, zero, zero)) for _ in range(2)])
    steps.start()
    steps.join(60)
    assert calls == ["use", "launch", "launch", "launch", "launch"]
