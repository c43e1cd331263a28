#!/usr/bin/env python3
"""Speed of a backend: decoding at 1, 8 and 32 requests, reading prompts of 512, 4,096 and 32,768 rows.

    python scripts/bench_engine.py model.gguf --device cuda --json result.json

Drives the backend itself, without scheduler or socket, as the scheduler does: a backend that feeds is kept one step
ahead. Decoding is greedy, each step's token fed to the next, after a context of --fill rows. A last pair decodes one
request greedily and sampled (top_k 20, top_p 0.95, min_p 0.05, penalties over 64 tokens) by turns; their ratio says
what sampling costs. "GB/s" counts the bytes a step must read: every weight once, and the cells of each request; "share"
is that over the copy bandwidth measured in the same run (device to device, or memory to memory on a CPU). On a GPU
"host" is the host's time to queue a step, which passes while the GPU computes, and "idle" the share of a step in which
the GPU waits for the host, by replaying the step's graph alone.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
from arguments import count, counts, out_file, plot_file
from arguments import run as run_script

from strata_engine.backends import BackendError, open_backend
from strata_engine.backends.base import Backend
from strata_engine.model import Model, ModelError, load_model
from strata_engine.params import GenParams
from strata_engine.progress import NoProgress
from strata_engine.rows import Choice, Draw, Int32, Rows
from strata_engine.steps import Pipeline

NO_HISTORY = np.empty(0, np.int32)
SAMPLED = GenParams(
    temperature=0.8, top_k=20, top_p=0.95, min_p=0.05, penalty_repeat=1.1, penalty_freq=0.1, penalty_present=0.1, seed=1
)
ROUNDS = 4  # turns of greedy and sampled decoding
COPY_BYTES = 1 << 30


@dataclass(slots=True)
class Result:
    """One line of the table."""

    what: str
    tokens_per_s: float
    ms_per_step: float
    gb_per_s: float | None = None  # None where arithmetic, not memory, is the limit
    share: float | None = None
    host_us: float | None = None  # to queue a step
    idle: float | None = None  # share of a step in which the GPU waits for the host


def greedy(count: int) -> list[Draw]:
    return [Draw(GenParams(), 0, NO_HISTORY) for _ in range(count)]


def sampled_draw(step: int) -> list[Draw]:
    """The draw of one request at `step`, with a full penalty window, whose last token is the step before's."""
    window = (step + np.arange(SAMPLED.penalty_last_n, dtype=np.int32)) * 7
    window[-1] = -1
    return [Draw(SAMPLED, step, window)]


def known(draws: list[Draw], choices: list[Choice]) -> list[Draw]:
    """The draws with the step before's tokens in place of what stands for them."""
    tokens = np.array([choice.token for choice in choices] or [1], np.int32)
    return [Draw(d.params, d.index, np.where(d.history < 0, tokens[0], d.history)) for d in draws]


def chunk(slot: int, first: int, count: int, vocab: int, wanted: bool) -> Rows:
    """`count` prompt rows of a slot from position `first` on."""
    position = np.arange(first, first + count, dtype=np.int32)
    token = (position * 7919 + slot * 104729) % vocab
    last = np.array([count - 1] if wanted else [], np.int32)
    return Rows(np.full(count, slot, np.int32), position, token.astype(np.int32), last)


def read_prompt(backend: Backend, slot: int, count: int) -> None:
    """A prompt in chunks of the most rows a step, then its first token."""
    pipeline = Pipeline(backend, time.perf_counter)
    for first in range(0, count, backend.max_rows):
        size = min(backend.max_rows, count - first)
        last = first + size == count
        pipeline.queue(chunk(slot, first, size, backend.vocab, last), draws=greedy(1) if last else [])
        if len(pipeline) == pipeline.depth:
            pipeline.take()
    while pipeline:
        pipeline.take()


def decode(
    backend: Backend, slots: int, position: int, steps: int, draws_of: Callable[[int], list[Draw]] | None = None
) -> Iterator[float]:
    """Seconds of each of `steps` steps with one row a slot; `draws_of(step)`: what to choose by, else greedily."""
    pipeline, slot = Pipeline(backend, time.perf_counter), np.arange(slots, dtype=np.int32)
    token: Int32 = np.ones(slots, np.int32)
    same = greedy(slots)
    choices: list[Choice] = []
    for step in range(steps):
        draws = draws_of(step) if draws_of else same
        draws = draws if backend.feeds and step else known(draws, choices)
        pipeline.queue(Rows(slot, np.full(slots, position + step, np.int32), token, slot), draws=draws)
        token = -1 - slot
        if len(pipeline) == pipeline.depth:
            done = pipeline.take()
            choices = done.choices
            yield done.seconds
        if not backend.feeds:
            token = np.array([choice.token for choice in choices], np.int32)
    while pipeline:
        yield pipeline.take().seconds


def host_seconds(backend: Backend, slots: int, position: int, draws: list[Draw], steps: int = 50) -> float:
    """The host's time to queue a decode step while the one ahead runs."""
    pipeline, slot = Pipeline(backend, time.perf_counter), np.arange(slots, dtype=np.int32)
    rows = Rows(slot, np.full(slots, position, np.int32), slot, slot)
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        pipeline.queue(rows, draws=draws)
        times.append(time.perf_counter() - begun)
        if len(pipeline) == pipeline.depth:
            pipeline.take()
    while pipeline:
        pipeline.take()
    return statistics.median(times)


def with_gpu(backend: Backend, result: Result, slots: int, position: int, draws: list[Draw]) -> Result:
    """The result with what the host and the GPU alone take for such a step."""
    graph_ms = getattr(backend, "graph_ms", None)
    if graph_ms is None:
        return result
    host = host_seconds(backend, slots, position, draws)
    alone = graph_ms(slots, chained=draws[0].params.sampled)
    return replace(result, host_us=host * 1e6, idle=1 - alone / result.ms_per_step)


def weight_bytes(model: Model) -> int:
    """Bytes of the tensors that every step reads: all but an embedding that is not the head as well."""
    path = pathlib.Path(model.path)
    size = path.stat().st_size
    return size if model.tied else size - model.embedding().codes.size * size // _values(model)


def _values(model: Model) -> int:
    g = model.geometry
    layer = g.width * (2 * g.q_width + 2 * g.kv_width + 3 * g.ff)
    return g.layers * layer + g.vocab * g.width * (1 if model.tied else 2)


def cell_bytes(model: Model, kv: str) -> int:
    """Bytes of one cell of all layers."""
    return model.geometry.layers * 2 * model.geometry.kv_width * (2 if kv == "f16" else 4)


def bench_decode(backend: Backend, model: Model, kv: str, slots: int, fill: int, steps: int, copy: float) -> Result:
    for slot in range(slots):
        read_prompt(backend, slot, fill)
    list(decode(backend, slots, fill, 8))
    times = list(decode(backend, slots, fill + 8, steps))
    step = statistics.median(times)
    rate = (weight_bytes(model) + slots * (fill + 8 + steps / 2) * cell_bytes(model, kv)) / step
    result = Result(f"decode, {slots} requests", slots / step, step * 1e3, rate / 1e9, rate / copy)
    return with_gpu(backend, result, slots, fill + 8 + steps // 2, greedy(slots))


def bench_sampled(backend: Backend, fill: int, steps: int) -> tuple[Result, Result]:
    """One request decoding greedily, then sampled, over the same positions."""
    read_prompt(backend, 0, fill)
    turn_steps = max(steps // ROUNDS, 8)
    kinds, middle = (None, sampled_draw), fill + turn_steps // 2
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS + 1):  # the first warms up
        for seconds, draws_of in zip(times, kinds, strict=True):
            taken = list(decode(backend, 1, fill, turn_steps, draws_of))
            seconds += taken if turn else []
    greedy_s, sampled_s = (statistics.median(seconds) for seconds in times)
    sampled = Result("sampled, 1 request", 1 / sampled_s, sampled_s * 1e3)
    return (
        with_gpu(backend, Result("greedy, 1 request", 1 / greedy_s, greedy_s * 1e3), 1, middle, greedy(1)),
        with_gpu(backend, sampled, 1, middle, known(sampled_draw(0), [])),
    )


def bench_prompt(backend: Backend, rows: int, repeats: int) -> Result:
    times = []
    for _ in range(repeats + 1):  # the first warms up
        begun = time.perf_counter()
        read_prompt(backend, 0, rows)
        times.append(time.perf_counter() - begun)
    best = statistics.median(times[1:])
    return Result(f"prompt, {rows} rows", rows / best, best * 1e3)


def copy_bandwidth(backend: Backend) -> float:
    """Bytes a second read and written by a large copy."""
    measure = getattr(backend, "copy_bandwidth", None)
    if measure is not None:
        return measure()
    source = np.ones(COPY_BYTES // 8)
    target = np.empty_like(source)
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun)
    return 2 * COPY_BYTES / min(times)


def show(result: Result) -> None:
    rate = "" if result.gb_per_s is None else f"{result.gb_per_s:10.0f} GB/s {100 * (result.share or 0):5.0f} %"
    host = "" if result.host_us is None else f"{result.host_us:7.0f} us host {100 * (result.idle or 0):4.1f} % idle"
    print(f"{result.what:24} {result.tokens_per_s:12,.0f} tok/s {result.ms_per_step:10.3f} ms{rate}{host}", flush=True)


def run(args: argparse.Namespace) -> dict:
    begun = time.perf_counter()
    model = load_model(args.model)
    slots = max(args.requests, default=1)
    context = max([args.fill + args.steps + 16, *args.prompts])
    backend = open_backend(
        model, device=args.device, context=context, slots=slots, threads=args.threads, kv=args.kv, progress=NoProgress()
    )
    ready = time.perf_counter() - begun
    copy = copy_bandwidth(backend)
    print(f"{args.model} on {backend.device}, cells {args.kv}; ready after {ready:.1f} s; copy {copy / 1e9:,.0f} GB/s")
    results = []
    for requests in args.requests:
        results.append(bench_decode(backend, model, args.kv, requests, args.fill, args.steps, copy))
        show(results[-1])
    for rows in args.prompts:
        results.append(bench_prompt(backend, rows, args.repeats))
        show(results[-1])
    pair = bench_sampled(backend, args.fill, args.steps)
    for result in pair:
        show(result)
    ratio = pair[1].tokens_per_s / pair[0].tokens_per_s
    print(f"sampled / greedy         {ratio:12.3f}")
    results += pair
    backend.close()
    return {"model": args.model, "device": backend.device, "kv": args.kv, "ready_s": ready, "copy_gb_per_s": copy / 1e9,
            "fill": args.fill, "sampled_over_greedy": ratio,
            "results": [asdict(result) for result in results]}  # fmt: skip


def draw(runs: list[dict], path: pathlib.Path) -> None:
    """Bars: tokens a second of each line, a colour a run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = [result["what"] for result in runs[0]["results"]]
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for i, run_ in enumerate(runs):
        rates = {result["what"]: result["tokens_per_s"] for result in run_["results"]}
        known = [(at, rates[what]) for at, what in enumerate(lines) if what in rates]
        places = [at + 0.8 * (i + 0.5) / len(runs) - 0.4 for at, _ in known]
        label = f"{pathlib.Path(run_['model']).stem}, {run_['device']}, cells {run_['kv']}"
        bars = axes.bar(places, [rate for _, rate in known], 0.8 / len(runs), label=label)
        axes.bar_label(bars, [f"{rate:,.0f}" for _, rate in known], rotation=90, fontsize=7, padding=2)
    axes.set_yscale("log")
    axes.margins(y=0.2)
    axes.set_xticks(range(len(lines)), lines, rotation=25, ha="right", fontsize=8)
    axes.set_ylabel("tokens / s")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def other_run(text: str) -> dict:
    """An argparse type: the figures of a run before, from its JSON."""
    try:
        figures = json.loads(pathlib.Path(text).read_text())
        figures["results"], figures["model"], figures["device"], figures["kv"]
    except (OSError, ValueError, LookupError, TypeError):
        raise argparse.ArgumentTypeError(f"{text} holds no figures that --json wrote") from None
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file; scripts/make_gguf.py makes one of random weights")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--kv", default="f16", choices=["f16", "f32"])
    parser.add_argument("--threads", type=count(1, 4096), help="CPU threads (default: all cores)")
    parser.add_argument("--requests", type=counts(1, 512), default=[1, 8, 32], help="request counts, e.g. 1,8,32")
    parser.add_argument("--prompts", type=counts(), default=[512, 4096, 32768], help="prompt lengths, e.g. 512,4096")
    parser.add_argument("--fill", type=count(), default=128, help="context of each request before decoding")
    parser.add_argument("--steps", type=count(), default=128, help="decode steps measured")
    parser.add_argument("--repeats", type=count(), default=3, help="prompts measured of each length")
    parser.add_argument("--json", type=out_file, help="write the figures here")
    parser.add_argument("--plot", type=plot_file, metavar="FILE", help="also draw the figures there, as a PNG")
    parser.add_argument(
        "--beside", type=other_run, nargs="*", default=[], metavar="FILE", help="JSON of other runs, for the plot"
    )
    args = parser.parse_args(arguments)
    figures = run(args)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    if args.plot:
        draw([*args.beside, figures], args.plot)


if __name__ == "__main__":
    run_script(main, ModelError, BackendError)
