"""strata-engine as a process with the default model: an answer, its memory, and what a second start compiles."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strata_engine.jit import kernel_cache

pytestmark = pytest.mark.xdist_group("real")
START_SECONDS = 240  # of a first start beside other tests; scripts/bench_cpu.py --start measures starts
CONTEXT = 8192
RESIDENT_LIMIT = 700e6


@pytest.fixture(scope="module")
def engine(tmp_path_factory, model_path):
    """A running engine: its process and its socket's path."""
    path = str(tmp_path_factory.mktemp("s") / "s")
    command = [sys.executable, "-m", "strata_engine.cli", "--socket", path, "--device", "cpu", "--threads", "2"]
    command += ["--max-context", str(CONTEXT), "--model", str(model_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until_ready(path, process)
            yield process, path
        finally:
            process.terminate()
            process.communicate(timeout=30)


def wait_until_ready(path, process):
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        if greeting(path).startswith("INFO "):
            return
        time.sleep(0.1)
    pytest.fail("the engine did not get ready")


def greeting(path):
    """The first line that the engine says; nothing where it does not listen."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        try:
            client.connect(path)
            return client.makefile().readline()
        except (FileNotFoundError, ConnectionError):
            return ""


def talk(path, *lines):
    """Everything that the engine says to these lines."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(120)
        client.connect(path)
        client.sendall("".join(f"{line}\n" for line in lines).encode())
        client.shutdown(socket.SHUT_WR)
        return client.makefile().read().splitlines()


def resident(process):
    """Bytes of memory that the process holds."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_memory_with_a_context_filled(engine, model):
    """Resident size after a prompt of 1,024 tokens, plus the cells of one context that were not touched yet."""
    process, path = engine
    prompt = ",".join(str(100 + i % 997) for i in range(1024))
    assert talk(path, f"GEN 1 {prompt}")[-1].startswith("DONE 1 1024 ")
    cell = 2 * model.geometry.layers * model.geometry.kv_width * 4
    assert resident(process) + (CONTEXT - 1024) * cell < RESIDENT_LIMIT


def test_a_greedy_answer(engine, case):
    prompt = ",".join(map(str, case["prompt_ids"]))
    count = 8
    lines = talk(engine[1], f"GEN {count} {prompt}")
    ids = [int(line.split()[1]) for line in lines if line.startswith("T ")]
    decided = sum(1 for _ in iter_decided(case["exact_greedy_margins"][:count]))
    assert ids[:decided] == case["exact_greedy_ids"][:decided]
    assert lines[-1].startswith("DONE ")


def iter_decided(margins):
    """The margins before the first undecided step."""
    for margin in margins:
        if margin < 0.01:
            return
        yield margin


def test_a_second_start_compiles_nothing(engine, tmp_path, model_path):
    """It finds every kernel in the cache that the first one left."""

    def compiled():
        return {path: path.stat().st_mtime_ns for path in kernel_cache().rglob("*.nbc")}

    before = compiled()
    code = (
        "import sys; from strata_engine.backends import open_backend; from strata_engine.model import load_model;"
        "from strata_engine.progress import NoProgress;"
        "open_backend(load_model(sys.argv[1]), device='cpu', context=64, slots=1, threads=1, progress=NoProgress())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, str(model_path)]
    subprocess.run(command, env=environment, check=True, timeout=START_SECONDS)
    assert before and compiled() == before
