"""Compare the block top-k kernels with the NumPy reference, id by id.

    python scripts/topk_parity.py CONTEXT [QUERIES=256] [REPS=10] [CAPACITY=CONTEXT] [--prompt] [--device cpu|cuda]
    python scripts/topk_parity.py --selftest | --active | --cases FILE

CONTEXT and CAPACITY are in cells. Every kind of scores is one case: QUERIES queries, spread over contexts up to
CONTEXT, or with --prompt at the last QUERIES positions of it. A line a case: how many queries have identical ids, the
median time of the reference and of the dispatched kernel a call, and their ratio. Exit status: 0, 1 on a mismatch, 2 on
bad arguments.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from arguments import count, need_gpu, run

from strata_engine.backends import why_no_cuda
from strata_engine.selection import cpu, dispatch, reference, scores

UNTOUCHED = -7
ACTIVE_CAPACITY = 524288  # cells
LONGEST = 1 << 29  # cells of a row, too many
FIELDS = {"kind": str, "n_kv": int, "seed": int, "width": int, "sha256": str}  # of a recorded case
DAMAGE = (LookupError, TypeError, ValueError, RecursionError, OverflowError, MemoryError)


@dataclass
class Case:
    """One call: scores [queries, max_blocks], step records, and the blocks in use (None: all)."""

    name: str
    table: reference.Float32
    records: reference.Int32
    active: int | None = None

    @property
    def cap(self) -> int:
        return int(self.records[:, reference.WIDTH].max()) + 5

    def empty_ids(self) -> reference.Int32:
        return np.full((len(self.records), self.cap), UNTOUCHED, dtype=np.int32)


def make_case(kind: str, context: int, queries: int, capacity: int, prompt: bool, active: bool = False) -> Case:
    """Scores of one kind; past the last block in use they are +inf, so that a read there shows."""
    blocks = -(-context // reference.BLOCK)
    max_blocks = -(-capacity // (4 * reference.BLOCK)) * 4
    drawn = scores.make(kind, blocks + queries, context)
    table = np.full((queries, max_blocks), np.inf, dtype=np.float32)
    for q in range(queries):
        table[q, :blocks] = drawn[q : q + blocks]
    if prompt:
        positions = np.arange(max(0, context - queries), context)
        positions = np.concatenate([np.zeros(queries - len(positions), dtype=positions.dtype), positions])
    else:
        positions = np.linspace(0, context - 1, queries).astype(np.int64)
        positions[0] = context - 1
    return Case(kind, table, reference.step_records(positions.astype(np.int32)), blocks if active else None)


def median_ms(call: Callable[[], Any], reps: int) -> float:
    times = []
    for _ in range(reps):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def run_cpu(case: Case, reps: int) -> tuple[reference.Int32, str, float]:
    """(ids, kernel, ms a call) of the CPU kernel."""
    ids = case.empty_ids()
    cpu.select_rows(case.table, case.records, ids, case.active)
    spare = ids.copy()
    return ids, "cpu", median_ms(lambda: cpu.select_rows(case.table, case.records, spare, case.active), reps)


def run_cuda(case: Case, reps: int) -> tuple[reference.Int32, str, float]:
    """(ids, kernel, ms a call in a graph) of the kernel that `dispatch` chooses."""
    from cuda.core import Device
    from numba import cuda

    from strata_engine.selection import launch

    device = Device()
    device.set_current()
    stream = device.create_stream()
    queries, max_blocks = case.table.shape
    topk = launch.BlockTopK(queries, max_blocks)
    table, records, ids = (cuda.to_device(a) for a in (case.table, case.records, case.empty_ids()))
    active_blocks = max_blocks if case.active is None else case.active
    active = cuda.to_device(np.array([active_blocks], dtype=np.int32))

    def select(on: Any) -> None:
        topk.launch(table, records, ids, active, active_blocks, stream=on)

    select(0)
    cuda.synchronize()
    first = ids.copy_to_host()
    ms = launch.replay_us(stream, launch.capture(stream, select), reps) / 1e3
    return first, dispatch.choose(queries, active_blocks, max_blocks), ms


RUNNERS = {"cpu": run_cpu, "cuda": run_cuda}


def check(case: Case, device: str, reps: int) -> bool:
    """Run one case on the reference and on the device, print its line; True if all ids are identical."""
    expected = case.empty_ids()
    start = time.perf_counter()
    reference.select_rows(case.table, case.records, expected, case.active)
    reference_ms = 1e3 * (time.perf_counter() - start)
    ids, kernel, ms = RUNNERS[device](case, reps)
    same = int((ids == expected).all(axis=1).sum())
    cells = int(case.records[:, reference.CELLS].max())
    print(
        f"{case.name:<12} {cells:>7} cells  {same:>3}/{len(ids):<3} identical  {kernel:<7}"
        f" reference {reference_ms:9.3f} ms  dispatched {ms:8.4f} ms  ratio {reference_ms / ms:9.1f}",
        flush=True,
    )
    return same == len(ids)


def cases_of_file(path: str) -> list[tuple[Case, str]]:
    """The cases of a JSON file of recorded answers, each with the SHA-256 of its right ids.

    Raises OSError, or one of DAMAGE for a file that holds none, or a damaged one.
    """
    with open(path) as file:
        entries = json.load(file)["cases"]
    if not entries:
        raise ValueError("it holds none")
    cases = []
    for entry in entries:
        if not all(type(entry[key]) is kind for key, kind in FIELDS.items()):
            raise TypeError(f"a case with a value of another kind than {', '.join(FIELDS)} have")
        if not 0 < entry["n_kv"] < LONGEST:
            raise ValueError(f"n_kv {entry['n_kv']}")
        row = scores.make_row(entry["kind"], entry["n_kv"], entry["seed"])
        if not 0 < entry["width"] <= entry["n_kv"]:
            raise ValueError(f"width {entry['width']} of {entry['n_kv']} cells")
        padded = np.full((1, -(-len(row) // 4) * 4), np.nan, dtype=np.float32)
        padded[0, : len(row)] = row
        record = np.array([[entry["n_kv"] - 1, entry["n_kv"], entry["n_kv"] // 4, entry["width"]]], dtype=np.int32)
        cases.append((Case(entry["kind"], padded, record), entry["sha256"]))
    return cases


def check_recorded(case: Case, sha256: str, device: str) -> bool:
    """True if the device's ids of a recorded case have the recorded digest and equal the reference's."""
    ids, _, _ = RUNNERS[device](case, 1)
    width = int(case.records[0, reference.WIDTH])
    found = hashlib.sha256(ids[0, :width].astype("<i4").tobytes()).hexdigest()
    same = check(case, device, 1)
    if found != sha256:
        print(f"{case.name:<12} the ids have the digest {found[:16]}.., recorded is {sha256[:16]}..")
    return same and found == sha256


def selftest_cases() -> list[Case]:
    """Every kind around the width, around the kernels' bounds, and at a long context, for windows and prompts."""
    contexts = (1, 2051, 2052, 16386, 65540, 135171)
    cases = [make_case(kind, context, 8, context, prompt=True) for kind in scores.KINDS for context in contexts]
    return cases + [make_case(kind, 20003, 64, 20003, prompt=False) for kind in scores.KINDS]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("context", type=count(1, LONGEST - 1), nargs="?", help="cells of the longest query")
    parser.add_argument("queries", type=count(1, 65535), nargs="?", default=256)
    parser.add_argument("reps", type=count(1, 100_000), nargs="?", default=10)
    parser.add_argument(
        "capacity", type=count(1, LONGEST - 1), nargs="?", help="cells that a row of scores has room for"
    )
    parser.add_argument("--prompt", action="store_true", help="the last QUERIES positions of the context")
    parser.add_argument("--device", choices=sorted(RUNNERS), help="default: cuda where a GPU answers, else cpu")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--selftest", action="store_true", help="a matrix of small cases")
    group.add_argument("--active", action="store_true", help="short contexts in rows of a large capacity")
    group.add_argument("--cases", metavar="FILE", help="a JSON file of recorded answers")
    args = parser.parse_args(argv)
    chosen = [args.context is not None, args.selftest, args.active, args.cases is not None]
    if sum(chosen) != 1:
        parser.error("give one of CONTEXT, --selftest, --active, --cases")
    if args.prompt and args.context is None:
        parser.error("--prompt goes with CONTEXT")
    if args.context is not None:
        args.capacity = args.capacity or args.context
        if args.context > args.capacity:
            parser.error(f"CONTEXT {args.context} is more than CAPACITY {args.capacity}")
    if args.device == "cuda":
        need_gpu()
    args.device = args.device or ("cpu" if why_no_cuda() else "cuda")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.cases is not None:
        try:
            recorded = cases_of_file(args.cases)
        except (OSError, *DAMAGE) as error:
            print(f"topk_parity: cannot read the cases of {args.cases!r}: {str(error)[:200]}", file=sys.stderr)
            return 2
        results = [check_recorded(case, sha256, args.device) for case, sha256 in recorded]
    elif args.selftest:
        results = [check(case, args.device, 3) for case in selftest_cases()]
    elif args.active:
        shorts = (1000, 2053, 16386, 60001)
        made = (make_case(kind, c, 8, ACTIVE_CAPACITY, True, active=True) for kind in scores.KINDS for c in shorts)
        results = [check(case, args.device, 3) for case in made]
    else:
        shape = (args.context, args.queries, args.capacity, args.prompt)
        results = [check(make_case(kind, *shape), args.device, args.reps) for kind in scores.KINDS]
    print(f"{sum(results)} of {len(results)} cases match")
    return 0 if all(results) else 1


if __name__ == "__main__":
    run(main)
