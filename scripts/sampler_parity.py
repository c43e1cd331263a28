#!/usr/bin/env python3
"""Check a device's sampler: fixtures for each feature of the chain, stored cases with the right token, random rows.

    python scripts/sampler_parity.py [--device cpu|cuda] [--cases FILE] [--selftest] [--trials N] [--vocab V ...]

`--trials N` compares N random rows with random parameters at each vocabulary with the reference (a GPU's bar: 1000).

Every fixture first proves that it notices a sampler broken in its feature. Exit status: 0 all match, 1 a mismatch,
2 bad arguments or no such device.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from arguments import UsageError, count, need_gpu, run

from strata_engine.rows import Choice, Draw, Float32
from strata_engine.sampling.fixtures import FIXTURES, Case, Choose, reference
from strata_engine.sampling.trials import SIZES, difference, trial

DEFAULT_CASES = Path(__file__).resolve().parents[1] / "tests" / "data" / "sampler.json"
MAX_ROWS = 32  # rows a call; a device sampler has buffers of this size


def load_cases(path: Path) -> list[Case]:
    try:
        cases = [Case.parse(case) for case in json.loads(path.read_text())["cases"]]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError) as error:
        raise UsageError(f"--cases {path}: {error!r}"[:300]) from error
    if not cases:
        raise UsageError(f"--cases {path}: holds no cases")
    return cases


def device_sampler(device: str) -> Choose:
    """A `Choose` that runs on `device`, whatever the vocabulary and the number of rows."""
    make = _cuda_maker() if device == "cuda" else _cpu_maker()

    def choose(logits: Float32, draws: Sequence[Draw]) -> list[Choice]:
        run = make(logits.shape[1])
        parts = range(0, len(draws), MAX_ROWS)
        return [choice for i in parts for choice in run(logits[i : i + MAX_ROWS], draws[i : i + MAX_ROWS])]

    return choose


def _cpu_maker() -> Callable[[int], Choose]:
    from strata_engine.sampling.cpu import CpuSampler

    return cache(lambda vocab: CpuSampler(vocab).choose)


def _cuda_maker() -> Callable[[int], Choose]:
    need_gpu()
    from strata_engine.gpu.device import Device
    from strata_engine.sampling.cuda import CudaSampler

    device = Device()
    return cache(lambda vocab: CudaSampler(vocab, MAX_ROWS, device).choose)


def off_by_one(logits: Float32, draws: Sequence[Draw]) -> list[Choice]:
    """Broken: the id after the right one."""
    return [Choice((choice.token + 1) % logits.shape[1]) for choice in reference(logits, draws)]


def selftest(cases: list[Case]) -> int:
    """Check this tool: how many fixtures and cases refuse the reference, or accept a sampler that is wrong."""
    faults = 0
    for fixture in FIXTURES:
        faults += _report(f"selftest: {fixture.name}", fixture.run(reference))
    for i, case in enumerate(cases):
        wrong = case.reference_mismatch() or case.mismatch(reference)
        if not wrong and len(case.logits) > 1 and not case.mismatch(off_by_one):
            wrong = "blind: the next id passes too"
        faults += _report(f"selftest: case {i}", wrong) if wrong else 0
    print(f"selftest: {len(FIXTURES)} fixtures and {len(cases)} cases checked, {faults} faults")
    return faults


def run_fixtures(choose: Choose) -> int:
    """Print a line for each fixture; how many fail."""
    return sum(_report(fixture.name, fixture.run(choose)) for fixture in FIXTURES)


def run_cases(cases: list[Case], choose: Choose) -> int:
    """Print a line for each case that differs and the count of those that match; how many differ."""
    faults = 0
    for i, case in enumerate(cases):
        wrong = case.reference_mismatch() or case.mismatch(choose)
        faults += _report(f"case {i}", wrong) if wrong else 0
    print(f"{len(cases) - faults} of {len(cases)} cases match")
    return faults


def answered_trial(chunk: tuple[int, int, int]) -> tuple[Float32, list[Draw], list[Choice]]:
    """The random rows of a chunk (vocabulary, its number, rows) and what the reference makes of them."""
    vocab, number, rows = chunk
    logits, draws = trial(np.random.default_rng([vocab, number]), rows, vocab)
    return logits, draws, reference(logits, draws)


def run_trials(sizes: Sequence[int], trials: int, choose: Choose, jobs: int) -> int:
    """Print a line for each vocabulary; how many rows differ. The references are computed in `jobs` processes."""
    faults = 0
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for vocab in sizes:
            start, wrong = time.monotonic(), []
            chunks = [(vocab, at, min(MAX_ROWS, trials - at)) for at in range(0, trials, MAX_ROWS)]
            for logits, draws, answers in pool.imap(answered_trial, chunks):
                found = choose(logits, draws)
                pairs = zip(found, answers, draws, strict=True)
                wrong += [f"{text}: {draw.params}" for a, b, draw in pairs if (text := difference(a, b))]
            name = f"{trials} random rows of {vocab} logits, {time.monotonic() - start:.1f} s"
            _report(name, f"{len(wrong)} differ, the first: {wrong[0]}" if wrong else "")
            faults += len(wrong)
    return faults


def _report(name: str, wrong: str) -> int:
    print(f"FAIL  {name}: {wrong}" if wrong else f"ok    {name}", flush=True)
    return 1 if wrong else 0


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check a device's sampler against fixtures and stored cases.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--cases", type=Path, default=DEFAULT_CASES, metavar="FILE", help="default: %(default)s")
    parser.add_argument("--selftest", action="store_true", help="first check the fixtures and cases themselves")
    parser.add_argument(
        "--trials", type=count(0), default=0, metavar="N", help="random rows a vocabulary (default: none)"
    )
    parser.add_argument(
        "--vocab", type=count(1, 1 << 24), nargs="+", default=SIZES, metavar="V", help="of the random rows"
    )
    parser.add_argument(
        "--jobs", type=count(1, 1024), default=multiprocessing.cpu_count(), metavar="N", help="for the reference"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    cases, choose = load_cases(options.cases), device_sampler(options.device)
    faults = selftest(cases) if options.selftest else 0
    faults += run_fixtures(choose)
    faults += run_cases(cases, choose)
    if options.trials > 0:
        faults += run_trials(options.vocab, options.trials, choose, options.jobs)
    return 1 if faults else 0


if __name__ == "__main__":
    run(main)
