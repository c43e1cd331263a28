#!/usr/bin/env python3
"""Time the CPU backend: tokens/s, GB/s and the share of the machine's memory bandwidth, for decode and prompt.

    python scripts/bench_cpu.py [--threads 2] [--llama --llama-python VENV/bin/python] [--start] [--json FILE]

With --llama, llama.cpp runs on the same file beside it: rounds alternate, so that a busy moment hits both alike, and
the figures are medians. With --start, a first start (nothing compiled) and a second are timed to READY, and the
resident size is read before and after one context was filled.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from arguments import count, out_file, run
from bench_sampler import machine

from strata_engine.backends import BackendError
from strata_engine.backends.cpu.backend import CpuBackend
from strata_engine.cores import usable_cores
from strata_engine.jit import njit
from strata_engine.model import ModelError, load_model
from strata_engine.params import GenParams
from strata_engine.paths import default_model
from strata_engine.progress import open_progress
from strata_engine.rows import Draw, Rows

log = logging.getLogger("bench_cpu")

START_SECONDS = 300.0
FILL = 8192  # context of the --start measurement
Worker = Callable[..., float]


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table; rates are medians over the rounds."""

    engine: str
    what: str  # "decode" or "prompt"
    requests: int
    tokens_per_s: float
    gb_per_s: float | None = None
    share: float | None = None  # of the measured memory bandwidth
    ratio: float | None = None  # tokens/s over llama.cpp's


@njit(nogil=True, cache=True)
def _read_all(words):
    total = np.int64(0)
    for word in words:
        total ^= word
    return total


def memory_bandwidth(threads: int, megabytes: int = 256, rounds: int = 7) -> float:
    """Bytes a second that `threads` threads read together; the best of some rounds."""
    parts = np.array_split(np.ones(megabytes << 17, np.int64), threads)
    _read_all(parts[0][:8])
    best = 0.0
    for _ in range(rounds):
        team = [threading.Thread(target=_read_all, args=(part,)) for part in parts]
        begun = time.perf_counter()
        for thread in team:
            thread.start()
        for thread in team:
            thread.join()
        best = max(best, (megabytes << 20) / (time.perf_counter() - begun))
    return best


class Strata:
    """The backend as the scheduler drives it, greedy and without drafts."""

    def __init__(self, options: argparse.Namespace) -> None:
        model, progress = load_model(options.model), open_progress()
        self.geometry, self.chunk = model.geometry, options.chunk
        self.backend = CpuBackend(
            model,
            context=max(options.prompt, options.behind + options.new),
            slots=max(options.requests),
            threads=options.threads,
            kv=options.kv,
            progress=progress,
        )
        self.backend.warm_up(progress)

    def step(self, slots: Sequence[int], positions: range, last: bool = True) -> None:
        """Rows of `positions` for every slot; a token is chosen for the last of each."""
        count = len(positions)
        position = np.tile(np.arange(positions.start, positions.stop, dtype=np.int32), len(slots))
        wanted = np.arange(count - 1, len(position), count, dtype=np.int32) if last else np.zeros(0, np.int32)
        self.backend.forward(
            Rows(np.repeat(np.asarray(slots, np.int32), count), position, 100 + position % 997, wanted)
        )
        if last:
            self.backend.choose([Draw(GenParams(), 0, np.zeros(0, np.int32))] * len(slots))

    def read(self, slot: int, count: int) -> None:
        for start in range(0, count, self.chunk):
            end = min(start + self.chunk, count)
            self.step([slot], range(start, end), last=end == count)

    def prompt(self, count: int) -> float:
        begun = time.perf_counter()
        self.read(0, count)
        return time.perf_counter() - begun

    def decode(self, requests: int, prompt: int, new: int) -> float:
        for slot in range(requests):
            self.read(slot, prompt)
        begun = time.perf_counter()
        for position in range(prompt, prompt + new):
            self.step(range(requests), range(position, position + 1))
        return time.perf_counter() - begun

    def decode_bytes(self, requests: int, cells: float) -> float:
        """What a decode step has to read: every packed weight once, and the cells of each request."""
        buffers, g = self.backend._buffers, self.geometry
        cell = g.layers * g.kv_width * (buffers.keys.itemsize + buffers.values.itemsize)
        return buffers.u8.nbytes + requests * cells * cell


@contextmanager
def llama_worker(options: argparse.Namespace) -> Iterator[Worker]:
    """ask("decode", 1, 128, 64) -> seconds, answered by llama.cpp in a process of its own."""
    script = Path(__file__).with_name("llama_worker.py")
    context = max(options.prompt, options.behind + options.new)
    command = [options.llama_python, str(script), str(options.model), str(options.threads), str(context)]
    with subprocess.Popen(
        [*command, str(max(options.requests))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        if process.stdout.readline().strip() != "ready":
            raise SystemExit(
                f"bench_cpu: {options.llama_python} cannot run llama_worker.py (pip install llama-cpp-python)"
            )

        def ask(*words: object) -> float:
            assert process.stdin and process.stdout
            print(*words, file=process.stdin, flush=True)
            return float(process.stdout.readline())

        yield ask
        process.stdin.close()


def alternate(workers: dict[str, Worker], rounds: int, *words: object) -> dict[str, float]:
    """Median seconds of each engine for one piece of work, after a round to warm up."""
    times: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(rounds + 1):
        for name, ask in workers.items():
            times[name].append(ask(*words))
    return {name: statistics.median(seconds[1:]) for name, seconds in times.items()}


def measure(strata: Strata, workers: dict[str, Worker], options: argparse.Namespace, peak: float) -> Iterator[Figure]:
    for requests in options.requests:
        seconds = alternate(workers, options.rounds, "decode", requests, options.behind, options.new)
        step = strata.decode_bytes(requests, options.behind + options.new / 2)
        for name, took in seconds.items():
            rate = step * options.new / took if name == "strata" else None
            yield Figure(
                name, "decode", requests, requests * options.new / took,
                None if rate is None else rate / 1e9, None if rate is None else rate / peak,
                seconds["llama.cpp"] / took if "llama.cpp" in seconds else None,
            )  # fmt: skip
    seconds = alternate(workers, options.rounds, "prompt", options.prompt)
    read = strata.decode_bytes(0, 0) * -(-options.prompt // options.chunk)
    for name, took in seconds.items():
        rate = read / took if name == "strata" else None
        yield Figure(
            name, "prompt", 1, options.prompt / took,
            None if rate is None else rate / 1e9, None if rate is None else rate / peak,
            seconds["llama.cpp"] / took if "llama.cpp" in seconds else None,
        )  # fmt: skip


def print_table(figures: Sequence[Figure]) -> None:
    print(f"{'engine':<10} {'what':<7} {'requests':>8} {'tokens/s':>9} {'GB/s':>6} {'share':>6} {'ratio':>6}")
    for f in figures:
        cells = [f"{f.gb_per_s:.1f}" if f.gb_per_s else "", f"{f.share:.0%}" if f.share else ""]
        cells.append(f"{f.ratio:.2f}" if f.ratio else "")
        line = f"{f.engine:<10} {f.what:<7} {f.requests:>8} {f.tokens_per_s:>9.1f} "
        print((line + " ".join(f"{cell:>6}" for cell in cells)).rstrip())


@dataclass(frozen=True, slots=True)
class Starts:
    """Seconds to READY and megabytes (10^6 bytes) of resident memory."""

    first_s: float
    second_s: float
    ready_mb: float
    filled_mb: float
    peak_mb: float


def measure_starts(options: argparse.Namespace) -> Starts:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
        with engine(options, folder, environment) as (_, _, first):
            pass
        with engine(options, folder, environment) as (process, client, second):
            ready = status(process, "VmRSS")
            ids = ",".join(str(100 + i % 997) for i in range(FILL - 1))
            client.sendall(f"GEN 1 {ids}\n".encode())
            wait_for_done(client)
            return Starts(first, second, ready, status(process, "VmRSS"), status(process, "VmHWM"))


def wait_for_done(client: socket.socket) -> None:
    client.settimeout(START_SECONDS)
    with client.makefile() as lines:
        for line in lines:
            if line.startswith("DONE"):
                return
            if line.startswith("ERR"):
                raise SystemExit(f"bench_cpu: the engine says {line!r}")
    raise SystemExit("bench_cpu: the engine went away")


@contextmanager
def engine(
    options: argparse.Namespace, folder: str, environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket, float]]:
    """A started engine, a connection to it, the seconds to READY."""
    path = os.path.join(folder, "s")
    command = [sys.executable, "-m", "strata_engine.cli", "--device", "cpu", "--socket", path, "--log-level", "error"]
    command += ["--model", str(options.model), "--threads", str(options.threads), "--kv", options.kv]
    begun = time.perf_counter()
    with subprocess.Popen([*command, "--max-context", str(FILL)], env=environment) as process:
        try:
            client = connect(path, process, begun + START_SECONDS)
            yield process, client, time.perf_counter() - begun
            client.close()
        finally:
            process.terminate()


def connect(path: str, process: subprocess.Popen[bytes], deadline: float) -> socket.socket:
    while time.perf_counter() < deadline and process.poll() is None:
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(path)
            if client.recv(5) == b"INFO ":
                return client
        except OSError:
            pass
        client.close()
        time.sleep(0.05)
    raise SystemExit("bench_cpu: the engine did not get ready")


def status(process: subprocess.Popen[bytes], key: str) -> float:
    """A field of /proc/PID/status in megabytes."""
    match = re.search(rf"{key}:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    return int(match[1]) * 1024 / 1e6 if match else float("nan")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the CPU backend.")
    add = parser.add_argument
    add("--model", type=Path, default=default_model(), metavar="FILE.gguf")
    add("--threads", type=count(), default=usable_cores())
    add("--requests", type=count(), nargs="+", default=[1, 4], help="decoding at once (default: 1 4)")
    add("--behind", type=count(), default=128, help="prompt tokens before the decoding (default: %(default)s)")
    add("--new", type=count(), default=64, help="tokens decoded by each request (default: %(default)s)")
    add("--prompt", type=count(), default=512, help="tokens of the prompt measurement (default: %(default)s)")
    add("--chunk", type=count(), default=64, help="prompt tokens a step (default: the engine's, %(default)s)")
    add("--kv", choices=("f32", "f16"), default="f32")
    add("--rounds", type=count(), default=5, help="rounds that the medians are of (default: %(default)s)")
    add("--llama", action="store_true", help="run llama.cpp beside it")
    add("--llama-python", default=sys.executable, metavar="PYTHON", help="a Python with llama-cpp-python")
    add("--start", action="store_true", help="also time starts and read the resident size")
    add("--json", type=out_file, metavar="FILE", help="also write the figures there")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    busy = os.getloadavg()[0]
    print(f"machine: {machine()}, load {busy:.1f}\ncommand: {' '.join(['python', *sys.argv])}", flush=True)
    if busy > options.threads / 2:
        log.warning("the machine is busy: threads that wait for each other suffer, and the figures say little")
    starts = measure_starts(options) if options.start else None
    peak = memory_bandwidth(options.threads)
    print(f"memory: {peak / 1e9:.1f} GB/s read by {options.threads} threads; model: {options.model.name}", flush=True)
    strata = Strata(options)
    workers: dict[str, Worker] = {"strata": lambda what, *numbers: getattr(strata, what)(*numbers)}
    if options.llama:
        with llama_worker(options) as ask:
            figures = list(measure(strata, workers | {"llama.cpp": ask}, options, peak))
    else:
        figures = list(measure(strata, workers, options, peak))
    strata.backend.close()
    print_table(figures)
    if starts:
        print(f"start: first {starts.first_s:.1f} s, second {starts.second_s:.1f} s")
        print(
            f"resident: {starts.ready_mb:.0f} MB when ready, {starts.filled_mb:.0f} MB with {FILL} cells filled,"
            f" at most {starts.peak_mb:.0f} MB"
        )
    if options.json:
        figures_json = {"machine": machine(), "command": sys.argv, "memory_gb_per_s": peak / 1e9}
        figures_json |= {"figures": [asdict(f) for f in figures], "starts": asdict(starts) if starts else None}
        options.json.write_text(json.dumps(figures_json, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run(main, ModelError, BackendError)
