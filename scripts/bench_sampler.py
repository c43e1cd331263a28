#!/usr/bin/env python3
"""Time the sampler by vocabulary, rows and what is asked for.

    python scripts/bench_sampler.py [--vocab 49152 248320] [--rows 1 8] [--runs 300] [--json FILE]
    python scripts/bench_sampler.py --device cuda [--vocab 248320] [--rows 1 4 8 32 128] [--json FILE] [--plot FILE.png]

On the CPU: microseconds a call of `choose`, Python included. On a GPU: GPU time in a replayed graph, beside torch and
FlashInfer where they can be imported; bench_sampler_cuda.py says how.

The cases of one table take turns within each round, so that a busy moment of the machine hits all of them alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from arguments import count, need_gpu, out_file, plot_file, run

from strata_engine.params import PENALTY_LAST_N_MAX, GenParams
from strata_engine.rows import Draw, Float32
from strata_engine.sampling.cpu import CpuSampler

CHAIN = GenParams(temperature=0.8, top_k=20, top_p=0.95, min_p=0.05, seed=1)
PENALISED = replace(CHAIN, penalty_repeat=1.1, penalty_freq=0.1, penalty_last_n=64)
SAMPLERS = {
    "greedy": GenParams(),
    "top_k + top_p + min_p": CHAIN,
    "the same, penalties over 64": PENALISED,
    "the same, penalties over 4,096": replace(PENALISED, penalty_last_n=PENALTY_LAST_N_MAX),
    "greedy, 20 log-probabilities": GenParams(logprobs=20),
}


@dataclass(frozen=True, slots=True)
class Timing:
    vocab: int
    rows: int
    case: str
    median_us: float
    best_us: float


def random_logits(rows: int, vocab: int) -> Float32:
    """Logits [rows, vocab] with a spread as a language model's."""
    return np.random.default_rng(0).normal(0.0, 3.0, (rows, vocab)).astype(np.float32)


def measure(vocab: int, rows: int, runs: int) -> list[Timing]:
    """The time of each case of `SAMPLERS` for `rows` rows of `vocab` logits."""
    sampler, logits = CpuSampler(vocab), random_logits(rows, vocab)
    history = np.random.default_rng(1).integers(0, vocab, PENALTY_LAST_N_MAX).astype(np.int32)
    draws = {case: [Draw(params, i, history) for i in range(rows)] for case, params in SAMPLERS.items()}
    sampler.warm_up()
    times: dict[str, list[float]] = {case: [] for case in draws}
    for _ in range(runs):
        for case, asked in draws.items():
            start = time.perf_counter()
            sampler.choose(logits, asked)
            times[case].append((time.perf_counter() - start) * 1e6)
    return [Timing(vocab, rows, case, statistics.median(t), min(t)) for case, t in times.items()]


def machine() -> str:
    """The processor's name and how many of its cores may be used."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def print_table(timings: Sequence[Timing]) -> None:
    print(f"{'vocab':>8} {'rows':>5}  {'case':<32} {'median us':>10} {'us a row':>9} {'GB/s':>6}")
    for t in timings:
        read = t.rows * t.vocab * 4 / t.median_us / 1e3
        print(f"{t.vocab:>8} {t.rows:>5}  {t.case:<32} {t.median_us:>10.1f} {t.median_us / t.rows:>9.1f} {read:>6.1f}")


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the sampler.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--vocab", type=count(), nargs="+", help="default: 49152 248320; on a GPU 248320")
    parser.add_argument("--rows", type=count(), nargs="+", help="default: 1 8; on a GPU 1 4 8 32 128")
    parser.add_argument("--runs", type=count(), default=300, help="calls a figure (default: %(default)s)")
    parser.add_argument("--json", type=out_file, metavar="FILE", help="also write the figures there")
    parser.add_argument(
        "--plot", type=plot_file, metavar="FILE", help="GPU only: also draw the figures there, as a PNG"
    )
    options = parser.parse_args(arguments)
    on_gpu = options.device == "cuda"
    if options.plot and not on_gpu:
        parser.error("--plot goes with --device cuda")
    options.vocab = options.vocab or ([248320] if on_gpu else [49152, 248320])
    options.rows = options.rows or ([1, 4, 8, 32, 128] if on_gpu else [1, 8])
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    if options.device == "cuda":
        need_gpu()
    print(f"machine: {machine()}\ncommand: {' '.join(['python', *sys.argv])}")
    if options.device == "cuda":
        import bench_sampler_cuda

        bench_sampler_cuda.run(options.vocab, options.rows, options.json, options.plot)
        return 0
    timings = [t for vocab in options.vocab for rows in options.rows for t in measure(vocab, rows, options.runs)]
    print_table(timings)
    if options.json:
        figures = {"machine": machine(), "timings": [asdict(t) for t in timings]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    run(main)
