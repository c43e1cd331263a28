"""What the device does for threads and processes around it, without a GPU."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the cuda extra")
pytest.importorskip("numba.cuda", reason="needs the cuda extra")

from cuda_recorder import Recorder, queueing

from strata_engine.gpu import compiled, device
from strata_engine.gpu.compiled import KernelSpec
from strata_engine.rows import Rows

DIE_WITH_A_WORKER = """
import multiprocessing, os
from concurrent.futures import ProcessPoolExecutor
from strata_engine.gpu.compiled import end_with_parent

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
    recorder = Recorder()
    backend, zero = queueing(recorder), np.zeros(1, np.int32)
    steps = threading.Thread(target=lambda: [backend.forward(Rows(zero, zero, zero, zero)) for _ in range(2)])
    steps.start()
    steps.join(60)
    assert recorder.calls.count("use") == 1 and recorder.calls[0] == "use"


def test_kernels_are_compiled_anew_when_any_source_of_theirs_changes() -> None:
    from strata_engine.backends.cuda import attention, slice, states
    from strata_engine.gpu import emit
    from strata_engine.gpu.compiled import KERNEL_FOLDERS
    from strata_engine.sampling import candidates, merge, ptx

    for module in (attention, emit, slice, states, candidates, merge, ptx):
        assert pathlib.Path(module.__file__).parent in KERNEL_FOLDERS


def test_what_is_written_is_there_before_what_is_queued_next(monkeypatch) -> None:
    calls = []

    def record(name):
        return lambda *arguments: calls.append((name, arguments[-1])) or (device.driver.CUresult.CUDA_SUCCESS,)

    for name in ("cuMemcpyHtoDAsync", "cuStreamSynchronize"):
        monkeypatch.setattr(device.driver, name, record(name))
    opened = object.__new__(device.Device)
    opened.stream = "the stream"
    opened.write(device.Buffer(0, 256), np.zeros(64, np.float32))
    assert calls == [("cuMemcpyHtoDAsync", "the stream"), ("cuStreamSynchronize", "the stream")]


def test_a_damaged_kernel_is_compiled_anew(monkeypatch, tmp_path, caplog) -> None:
    monkeypatch.setenv("STRATA_CUDA_CACHE", str(tmp_path))
    spec, built = KernelSpec("kernel", lambda: (print, None), 32), []
    path = compiled.cubin_path(spec, (9, 0))
    path.parent.mkdir()
    path.write_bytes(b"pi")  # no code: the file was cut short

    def build(spec: KernelSpec, cc: tuple[int, int]) -> str:
        path.write_bytes(b"pi\ncode")
        built.append(spec.name)
        return spec.name

    driver = SimpleNamespace(
        cuModuleLoadData=lambda code: code, cuModuleEnumerateFunctions=lambda count, module: [module]
    )
    monkeypatch.setattr(device, "driver", driver)
    monkeypatch.setattr(device, "check", lambda result: result)
    monkeypatch.setattr(device, "build_to_disk", build)
    gpu = device.Device.__new__(device.Device)
    gpu.cc, gpu._loaded = (9, 0), {}
    kernel = gpu.load(spec)
    assert (kernel.function, len(kernel.kinds), built) == (b"code", 2, ["kernel"])
    assert "compiled anew" in caplog.text


def test_a_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("STRATA_CUDA_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(compiled, "link", lambda ptx, cc: b"code")
    monkeypatch.setattr(compiled, "compile_spec", lambda spec, cc: "ptx")
    spec = KernelSpec("kernel", lambda: (print, SimpleNamespace(args=())), 32)
    with pytest.raises(
        compiled.CacheError, match=r"^compiled kernels cannot be kept in .*/file/sm_90: Not a directory$"
    ):
        compiled.build_to_disk(spec, (9, 0))
