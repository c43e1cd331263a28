"""Time block top-k on the GPU: graph replays, L2 flushed before each, medians.

    python scripts/bench_topk.py [--out FOLDER] [--reps 30] [--kinds normal,cluster,equal] [--queries 256,8,1] [--alone]

Prints a table and writes topk.json and topk.png to FOLDER. The floor is one read of the scores at the bandwidth that
the same run measures. torch.topk and FlashInfer's top_k stand beside it where they can be imported; both return
blocks in no order, and neither cuts ties.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from arguments import count, counts, need_gpu, run
from cuda.core import Device

from strata_engine.selection import cpu, launch, scores
from strata_engine.selection.ptx import cuda, load4
from strata_engine.selection.reference import step_records

CONTEXTS = (8192, 16384, 20000, 32768, 65536, 131072, 262144, 409600, 524288)  # cells
FLUSH_BYTES = 512 << 20


@cuda.jit
def read_all(source, sink):
    """Read `source` float32 [n], n a multiple of 16 times the threads; `sink` float32 [1] is a pretext."""
    step = cuda.gridsize(1)
    total = np.float32(0)
    for v in range(cuda.grid(1), len(source) // 4, 4 * step):
        a, b = load4(source, 4 * v), load4(source, 4 * (v + step))
        c, d = load4(source, 4 * (v + 2 * step)), load4(source, 4 * (v + 3 * step))
        total += a[0] + a[3] + b[1] + b[2] + c[0] + c[3] + d[1] + d[2]
    if total == np.float32(1.5):
        sink[0] = total


@cuda.jit
def nothing(sink):
    """An empty kernel: what a graph replay of one node costs."""


class Bench:
    """A stream, the buffer that flushes L2, and the clock."""

    def __init__(self, reps: int) -> None:
        device = Device()
        device.set_current()
        self.stream = device.create_stream()
        self.reps = reps
        self.sink = cuda.to_device(np.zeros(1, dtype=np.float32))
        drawn = np.random.default_rng(0).standard_normal(FLUSH_BYTES // 4 // 16, dtype=np.float32)
        self.big = cuda.to_device(np.tile(drawn, 16))
        self.blocks = 512  # whole rounds of 16 scores a thread
        read_all[self.blocks, 512](self.big, self.sink)
        nothing[1, 32](self.sink)
        self.flush = launch.capture(self.stream, lambda s: read_all[self.blocks, 512, s](self.big, self.sink))

    def time_us(self, graph: Any) -> float:
        """Median time of a replay of `graph`, in us, with a flushed L2."""
        return launch.replay_us(self.stream, graph, self.reps, self.flush)

    def time_launches(self, launches: Callable[[Any], None]) -> float:
        """Median time of a graph of `launches(stream)`, in us."""
        cuda.synchronize()  # what was copied is there
        launches(self.stream)
        self.stream.sync()
        return self.time_us(launch.capture(self.stream, launches))


def score_table(kind: str, queries: int, cells: int) -> np.ndarray:
    """Scores of `queries` queries of one context, float32 [queries, max_blocks]: 8 rows drawn, then rolled."""
    blocks = -(-cells // 4)
    drawn = [scores.make(kind, blocks, seed) for seed in range(min(queries, 8))]
    if kind in ("ascending", "descending"):
        return np.stack([drawn[q % 8] for q in range(queries)])
    return np.stack([np.roll(drawn[q % 8], 977 * q) for q in range(queries)])


def time_case(bench: Bench, kind: str, queries: int, cells: int, rivals: bool) -> dict[str, Any]:
    """Times of every kernel that can run the case, in us, and how many queries fell back."""
    table = score_table(kind, queries, cells)
    records = step_records([cells - 1] * queries)
    topk = launch.BlockTopK(queries, table.shape[1])
    device_scores, device_records = cuda.to_device(table), cuda.to_device(records)
    expected = np.full((queries, 2051), -7, dtype=np.int32)
    cpu.select_rows(table, records, expected)
    case: dict[str, Any] = {"kind": kind, "queries": queries, "cells": cells, "bytes": table.nbytes}
    for kernel in ("wide", "sample", "window") if queries <= 8 else ("wide", "sample"):
        ids = cuda.to_device(np.full((queries, 2051), -7, dtype=np.int32))

        def run(stream: Any, kernel: str = kernel, ids: Any = ids) -> None:
            topk.launch(device_scores, device_records, ids, kernel=kernel, stream=stream)

        case[kernel] = bench.time_launches(run)
        case[f"{kernel}_wrong"] = int((ids.copy_to_host() != expected).any(axis=1).sum())
        case[f"{kernel}_flagged"] = int(topk.flags.copy_to_host().sum()) if kernel != "wide" else 0
    if rivals:
        case |= time_rivals(bench, device_scores)
    return case


def time_rivals(bench: Bench, device_scores: Any) -> dict[str, float]:
    """Times of torch.topk and FlashInfer's top_k of 512 blocks, where they are installed."""
    times: dict[str, float] = {}
    try:
        import torch
    except ImportError:
        return times
    table = torch.as_tensor(device_scores, device="cuda")
    times["torch"] = time_torch(bench, lambda: torch.topk(table, 512, sorted=False))
    try:
        import flashinfer
    except ImportError:
        return times
    times["flashinfer"] = time_torch(bench, lambda: flashinfer.top_k(table, 512))
    return times


def time_torch(bench: Bench, call: Callable[[], Any]) -> float:
    """Median time of a torch graph of `call`, in us, L2 flushed before each."""
    import torch

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    handle = torch.cuda.ExternalStream(int(bench.stream.handle))
    pairs = []
    with torch.cuda.stream(handle):
        for _ in range(bench.reps):
            bench.flush.launch(bench.stream)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            pairs.append((start, end))
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in pairs)


def row_text(case: dict[str, Any], bandwidth: float) -> str:
    """One line of the table."""
    floor = case["bytes"] / bandwidth / 1e6
    cells = [f"{case['kind']:<11}{case['queries']:>4}{case['cells']:>9}{floor:>8.1f}"]
    for name in ("wide", "sample", "window", "torch", "flashinfer"):
        text = f"{case[name]:.1f}" if name in case else "-"
        wrong = case.get(f"{name}_wrong", 0)
        flagged = case.get(f"{name}_flagged", 0)
        cells.append(f"{text + ('!' if wrong else '') + (f' f{flagged}' if flagged else ''):>12}")
    return "".join(cells)


def draw(cases: list[dict[str, Any]], bandwidth: float, path: Path) -> None:
    """Times over contexts of the prompt call, against the floor."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [c for c in cases if c["kind"] == "normal" and c["queries"] == max(c["queries"] for c in cases)]
    fig, axes = plt.subplots(figsize=(7, 4.5))
    for name in ("wide", "sample", "torch", "flashinfer"):
        points = [(c["cells"], c[name]) for c in rows if name in c]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.plot([c["cells"] for c in rows], [c["bytes"] / bandwidth / 1e6 for c in rows], "k--", label="one read")
    axes.set(xscale="log", yscale="log", xlabel="cells", ylabel="us a call", title="block top-k, one prompt call")
    axes.legend()
    fig.savefig(path, dpi=120)


def kinds(text: str) -> list[str]:
    """An argparse type: kinds of scores with commas between them."""
    if unknown := set(text.split(",")) - {*scores.KINDS}:
        raise argparse.ArgumentTypeError(
            f"no such kind: {', '.join(sorted(unknown))}; there are {', '.join(scores.KINDS)}"
        )
    return text.split(",")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("bench"), help="folder for topk.json and topk.png (default: %(default)s)"
    )
    parser.add_argument("--reps", type=count(), default=30, help="replays a figure (default: %(default)s)")
    parser.add_argument("--kinds", type=kinds, default="normal,cluster,equal", help="of scores (default: %(default)s)")
    parser.add_argument("--queries", type=counts(1, 65535), default="256,8,1", help="of a call (default: %(default)s)")
    parser.add_argument("--alone", action="store_true", help="leave torch and FlashInfer out")
    parser.add_argument(
        "--contexts",
        type=counts(1, (1 << 29) - 1),
        default=",".join(map(str, CONTEXTS)),
        help="in cells (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    need_gpu("topk_parity.py times the CPU kernel")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out}: {error.strerror}")
    bench = Bench(args.reps)
    read_us = bench.time_us(bench.flush)
    empty_us = bench.time_launches(lambda s: nothing[1, 32, s](bench.sink))
    bandwidth = FLUSH_BYTES / read_us / 1e6  # TB/s
    print(f"read bandwidth {bandwidth:.2f} TB/s; an empty graph takes {empty_us:.1f} us; times in us")
    print(f"{'scores':<11}{'q':>4}{'cells':>9}{'floor':>8}", end="")
    print("".join(f"{name:>12}" for name in ("wide", "sample", "window", "torch", "flashinfer")))
    cases = []
    for kind in args.kinds:
        for queries in args.queries:
            for cells in args.contexts:
                cases.append(time_case(bench, kind, queries, cells, kind == "normal" and not args.alone))
                print(row_text(cases[-1], bandwidth), flush=True)
    result = {"read_tb_s": bandwidth, "empty_graph_us": empty_us, "cases": cases}
    (args.out / "topk.json").write_text(json.dumps(result, indent=1))
    try:
        draw(cases, bandwidth, args.out / "topk.png")
    except ImportError:
        print("no matplotlib: no topk.png")


if __name__ == "__main__":
    run(main)
