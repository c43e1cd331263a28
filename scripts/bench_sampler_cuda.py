"""The GPU half of bench_sampler.py, which runs it: GPU time in replayed graphs, with the L2 cache flushed before each.

A graph holds ROUNDS times (flush, sampler); its time less that of the flushes alone, divided by ROUNDS, is the cost of
asking for the sampler: launch gaps count. The flush reads more than the L2 holds. It lets the next kernel start early,
as the matmul that makes the logits does. Ours and the rivals take turns in one process, on the same logits.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cuda.bindings import driver
from numba import cuda, types

from strata_engine.backends.cuda.layout import TILE
from strata_engine.backends.cuda.plan import argmax_spec
from strata_engine.gpu.compiled import KernelSpec
from strata_engine.gpu.device import Device
from strata_engine.gpu.emit import U32Ptr, let_next_start, wait_for_previous
from strata_engine.params import PENALTY_LAST_N_MAX, GenParams
from strata_engine.rows import Draw, Int32
from strata_engine.sampling.cuda import CudaSampler

ROUNDS = 10  # samplers a graph
REPLAYS = 40
FLUSH_WORDS = 40 * 2**20  # 160 MiB
FLUSH_GRID, FLUSH_THREADS = 1056, 256

CHAIN = GenParams(temperature=0.8, top_k=20, top_p=0.95, min_p=0.05, seed=1)
PENALISED = dataclasses.replace(CHAIN, penalty_repeat=1.1, penalty_freq=0.1, penalty_last_n=64)
LONG = dataclasses.replace(PENALISED, penalty_last_n=PENALTY_LAST_N_MAX)
ARG_MAX = "arg-max"  # of what the head's matmul leaves of each tile of tokens
SKEWED = "chain, 4,096, ids as in text"
CASES = {
    "chain": CHAIN,
    "chain, penalties over 64": PENALISED,
    "chain, penalties over 4,096": LONG,
    SKEWED: LONG,
    "chain, 20 log-probabilities": dataclasses.replace(CHAIN, logprobs=20),
}
OURS = (ARG_MAX, *CASES)


@dataclasses.dataclass(frozen=True, slots=True)
class GpuTiming:
    vocab: int
    rows: int
    case: str
    median_us: float
    spread_us: float  # between the quartiles


def flush_kernel() -> tuple[Callable[..., None], Any]:
    def kernel(values, count, out):
        let_next_start()
        wait_for_previous()
        total = types.uint32(0)
        for i in range(cuda.grid(1), count, FLUSH_GRID * FLUSH_THREADS):  # type: ignore[call-arg]
            total ^= values[i]
        if total == 12345:
            out[0] = total

    return kernel, types.void(U32Ptr, types.int32, U32Ptr)


class Bench:
    """Times what is queued on a device's stream."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._flush = device.load(KernelSpec("bench_flush", flush_kernel, FLUSH_THREADS))
        self._words, self._out = device.allocate(4 * FLUSH_WORDS), device.allocate(4)

    def flush(self) -> None:
        self.device.launch(self._flush, (FLUSH_GRID,), self._words, FLUSH_WORDS, self._out, dependent=False)

    def graph(self, work: Callable[[], object]) -> Callable[[], None]:
        """A graph of ROUNDS times (flush, work); what replays it."""
        with self.device.capture() as graph:
            for _ in range(ROUNDS):
                self.flush()
                work()
        return graph.launch

    def torch_graph(self, work: Callable[[], object]) -> Callable[[], None]:
        """The same for work of torch, which has a stream of its own."""
        import torch

        work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), self._on(torch.cuda.current_stream().cuda_stream):
            for _ in range(ROUNDS):
                self.flush()
                work()
        return partial(self._replay, graph)

    def _replay(self, graph: Any) -> None:
        import torch

        with torch.cuda.stream(torch.cuda.ExternalStream(int(self.device.stream))):
            graph.replay()

    @contextmanager
    def _on(self, stream: int) -> Iterator[None]:
        own, self.device.stream = self.device.stream, driver.CUstream(stream)
        try:
            yield
        finally:
            self.device.stream = own

    def times(self, graphs: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
        """Microseconds of each graph, REPLAYS times, in turns."""
        found: dict[str, list[float]] = {name: [] for name in graphs}
        for turn in range(REPLAYS + 2):
            for name, replay in graphs.items():
                start = self.device.event()
                replay()
                end = self.device.event()
                if turn >= 2:
                    found[name].append(self.device.elapsed_ms(start, end) * 1e3)
                for event in (start, end):
                    driver.cuEventDestroy(event)
        return found


def rivals(vocab: int, rows: int, address: int) -> dict[str, Callable[[], object]]:
    """torch's and, where it can be imported, FlashInfer's ways to sample from the same logits."""
    if importlib.util.find_spec("torch") is None:
        return {}
    import torch

    holder = type("Logits", (), {})()
    holder.__cuda_array_interface__ = {"shape": (rows, vocab), "typestr": "<f4", "data": (address, False), "version": 3}
    logits = torch.as_tensor(holder, device="cuda")
    works: dict[str, Callable[[], object]] = {
        "torch.topk(20)": lambda: torch.topk(logits, 20, dim=-1),
        "torch softmax + sort": lambda: torch.sort(torch.softmax(logits, -1), dim=-1, descending=True),
    }
    if importlib.util.find_spec("flashinfer") is not None:
        from flashinfer import sampling

        works["FlashInfer top_k + top_p"] = lambda: sampling.top_k_top_p_sampling_from_logits(
            logits, 20, 0.95, seed=1, offset=0
        )
    return works


def arg_max(device: Device, vocab: int, rows: int) -> Callable[[], None]:
    """The backend's own: the head's matmul leaves the largest logit of each tile and its id."""
    kernel, tiles = device.load(argmax_spec()), -(-vocab // TILE)
    top = device.upload(np.random.default_rng(0).normal(10.0, 1.0, (rows, tiles)).astype(np.float32))
    best = device.upload(np.tile(np.arange(0, vocab, TILE, dtype=np.int32), (rows, 1)))
    header, chosen, choices = device.allocate(8), device.allocate(4 * rows), device.pinned(rows).ctypes.data
    return lambda: device.launch(kernel, (rows,), top, best, tiles, header, chosen, choices)


def history(vocab: int, skewed: bool) -> Int32:
    """A window's tokens, of the whole vocabulary; `skewed`: some often, mostly low ids, as a tokenizer numbers."""
    rng = np.random.default_rng(1)
    ids = rng.zipf(1.2, PENALTY_LAST_N_MAX) - 1 if skewed else rng.integers(0, vocab, PENALTY_LAST_N_MAX)
    return np.minimum(ids, vocab - 1).astype(np.int32)


def measure(bench: Bench, vocab: int, rows: Sequence[int], cases: Sequence[str] = tuple(CASES)) -> list[GpuTiming]:
    """The time of each case and rival for each number of rows of `vocab` logits."""
    most = max(rows)
    values = np.random.default_rng(0).normal(0.0, 3.0, (most, vocab)).astype(np.float32)
    logits = bench.device.upload(values)
    timings = []
    for n in rows:
        graphs = {"flush": bench.graph(lambda: None), ARG_MAX: bench.graph(arg_max(bench.device, vocab, n))}
        keep = []  # the samplers own what their graphs read
        for case in cases:
            sampler = CudaSampler(vocab, n, bench.device)
            sampler.stage([Draw(CASES[case], i, history(vocab, case == SKEWED)) for i in range(n)], n)
            bench.device.synchronize()
            graphs[case] = bench.graph(partial(sampler.capture, logits, n, sampler.requests, sampler.chosen))
            keep.append(sampler)
        for name, work in rivals(vocab, n, logits.address).items():
            try:
                graphs[name] = bench.torch_graph(work)
            except Exception as error:  # a rival that cannot be captured must not end the run
                print(f"{name}: not captured: {error}", file=sys.stderr)
        timings += _timings(vocab, n, bench.times(graphs))
        for sampler in keep:
            sampler.close()
    bench.device.free(logits)
    return timings


def _timings(vocab: int, rows: int, times: dict[str, list[float]]) -> list[GpuTiming]:
    flush = statistics.median(times.pop("flush"))
    found = []
    for case, values in times.items():
        low, middle, high = statistics.quantiles(((v - flush) / ROUNDS for v in values), n=4)
        found.append(GpuTiming(vocab, rows, case, middle, high - low))
    return found


def print_table(timings: Sequence[GpuTiming]) -> None:
    rows = sorted({t.rows for t in timings})
    print(f"{'GPU us by rows':<32}" + "".join(f"{n:>9}" for n in rows))
    for case in dict.fromkeys(t.case for t in timings):
        cells = {t.rows: t.median_us for t in timings if t.case == case}
        print(f"{case:<32}" + "".join(f"{cells[n]:>9.1f}" if n in cells else f"{'':>9}" for n in rows))


def plot(timings: Sequence[GpuTiming], path: Path) -> None:
    """Time against rows, a line a case, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for case in dict.fromkeys(t.case for t in timings):
        points = [(t.rows, t.median_us) for t in timings if t.case == case]
        style = "o-" if case in OURS else "s--"
        axes.plot(*zip(*points, strict=True), style, label=case)
    axes.set(xscale="log", yscale="log", xlabel="rows", ylabel="GPU time, us", title=f"vocabulary {timings[0].vocab:,}")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def run(vocabs: Sequence[int], rows: Sequence[int], json_path: Path | None, plot_path: Path | None) -> None:
    """Measure, print, and write what is asked for; the plot shows the last vocabulary."""
    device = Device()
    timings = []
    for vocab in vocabs:
        found = measure(Bench(device), vocab, rows)
        print(f"{device.name}, vocabulary {vocab:,}")
        print_table(found)
        timings += found
    if json_path:
        figures = {"device": device.name, "timings": [dataclasses.asdict(t) for t in timings]}
        json_path.write_text(json.dumps(figures, indent=1) + "\n")
    if plot_path:
        plot([t for t in timings if t.vocab == vocabs[-1]], plot_path)
