"""The CUDA backend: loads a model, captures graphs for each row bucket, replays one a step.

A step whose rows are all wanted, as when requests decode, is one graph: layers, head, choice. Steps that read prompts
are two or three. While one step runs the next is queued (base.Feeding): its tokens come from the device's `chosen`, its
inputs and results have a turn of their own in the host's memory.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...gpu.compiled import build_missing
from ...gpu.device import Device, DeviceError, Graph
from ...progress import Progress
from ...rows import Choice, Draw, Float32, Rows
from ...sampling.cuda import TURNS, CudaSampler, request_words, sampler_specs
from ...sampling.host import is_plain
from .forward import Forward, Layer, Sizes, page_table
from .inputs import BUCKETS, MAX_ROWS, MOST_WORDS, bucket_of, pack
from .linear import Linear
from .plan import Limits
from .weights import Arranged, arranged, encode, gated_matrix, heads_matrices, stored_bytes, upload

if TYPE_CHECKING:
    from ...model import Model

log = logging.getLogger(__name__)
WHOLE_ROWS = 64  # up to here a step whose rows are all wanted is one graph
WINDOW = 8  # most rows a request decodes with
RESERVE = 512 << 20  # bytes left for the driver, graphs, kernels and the sampler


@dataclass(frozen=True, slots=True)
class _Queued:
    """A step under way."""

    turn: int
    rows: int
    wanted: int
    draws: Sequence[Draw]
    chained: bool  # the sampling chain chooses


class CudaBackend:
    """backends.base.Feeding on one NVIDIA GPU. Cells are halves (`kv="f16"`) or two halves each (`"f32"`)."""

    device = "cuda"
    feeds = True
    chunk = MAX_ROWS

    def __init__(
        self, model: Model, *, context: int, slots: int, kv: str = "f32", max_rows: int = MAX_ROWS, progress: Progress
    ) -> None:
        self.vocab, self.context, self.slots, self.max_rows = model.vocab, context, slots, max_rows
        self._device = Device()
        self._thread = threading.get_ident()  # the one on which the device is current
        self._sizes = Sizes(model.geometry, context, slots, max_rows, {"f16": 1, "f32": 2}[kv])
        self._check_memory(model)
        self._choices = self._device.pinned(TURNS * max_rows).reshape(TURNS, max_rows)
        words = MOST_WORDS + request_words(model.vocab, max_rows)
        self._forward = load_forward(self._device, model, self._sizes, 4 * words, self._choices.ctypes.data, progress)
        self._compile(progress)
        self._pages = page_table(self._sizes)
        self._layouts = {bucket: self._forward.layout(bucket) for bucket in BUCKETS if bucket <= max_rows}
        self._graphs: dict[tuple[str, int], Graph] = {}
        self._inputs = [self._device.pinned(words) for _ in range(TURNS)]
        self._done = [self._device.flag() for _ in range(TURNS)]
        self._sampler = self._open_sampler()
        self._steps = 0
        self._under_way: deque[_Queued] = deque()
        self._last = _Queued(0, 0, 0, (), False)
        self._capture(progress)

    # -- start

    def _check_memory(self, model: Model) -> None:
        """BackendError now rather than a failed allocation later."""
        from .. import BackendError

        free, total = self._device.memory()
        weights = sum(stored_bytes(*matrix) for matrix in model.matrices())
        cells = 2 * model.geometry.layers * self._sizes.cell_bytes
        buffers = sum(self._sizes.buffer_bytes().values()) + self._sizes.scratch_bytes
        need = weights + cells + buffers + RESERVE
        if need > free:
            sizes = [f"{size / (1 << 30):.1f}" for size in (need, free, total, weights, cells, buffers)]
            raise BackendError(
                f"{sizes[0]} GiB are needed and {self._device.name} has {sizes[1]} of {sizes[2]} free "
                f"({sizes[3]} weights, {sizes[4]} cells of {self.slots} slots, {sizes[5]} buffers): "
                "lower --slots or --max-context, or take --kv f16"
            )

    def _open_sampler(self) -> CudaSampler:
        from .. import BackendError

        try:
            return CudaSampler(self.vocab, self.max_rows, self._device)
        except ValueError as error:
            raise BackendError(f"--device cuda: {error}; --device cpu serves this model") from None

    def _compile(self, progress: Progress) -> None:
        specs = self._forward.specs() + sampler_specs(self.vocab)
        with progress.stage("compiling kernels", total=len(specs)) as stage:
            build_missing(specs, self._device.cc, lambda done, total: stage.advance(1))
        for spec in specs:
            self._device.load(spec)

    def _capture(self, progress: Progress) -> None:
        """Capture every graph, so that no request waits for one; then run the smallest once."""
        captured = dict(self._graph_parts())
        with progress.stage("capturing graphs", total=len(captured)) as stage:
            for (name, bucket), parts in captured.items():
                with self._device.capture() as graph:
                    for part in parts:
                        part(bucket)
                self._graphs[name, bucket] = graph
                stage.advance(1, f"{bucket} rows")
        zero = np.zeros(1, np.int32)
        self.forward(Rows(zero, zero, zero, zero))
        self._device.synchronize()

    def _graph_parts(self) -> Iterator[tuple[tuple[str, int], Sequence[Callable[[int], None]]]]:
        """(name, bucket) and what is queued for it, of every graph."""
        run = self._forward
        for bucket, layout in self._layouts.items():
            yield ("layers", bucket), (run.layers,)
            yield ("head", bucket), (run.logits, run.arg_max)
            yield ("chain", bucket), (self._chain_at(MOST_WORDS),)
            if bucket <= min(WHOLE_ROWS, bucket_of(min(self.max_rows, WINDOW * self.slots))):
                yield ("greedy", bucket), (run.layers, run.logits, run.arg_max)
                yield ("chained", bucket), (run.layers, run.logits, self._chain_at(layout.words))

    def _chain_at(self, word: int) -> Callable[[int], None]:
        """What queues the sampling chain for a number of rows, its requests at a word of the inputs."""
        run = self._forward
        logits, requests = run.buffers["logits"], run.inputs.at(4 * word)
        return lambda rows: self._sampler.capture(logits, rows, requests, run.chosen)

    # -- a step

    def queue(self, rows: Rows, draws: Sequence[Draw]) -> None:
        """Begin a step; see base.Feeding."""
        if len(self._under_way) >= TURNS:
            raise RuntimeError(f"{TURNS} steps are under way")
        self._under_way.append(self._queue(rows, draws))

    def _queue(self, rows: Rows, draws: Sequence[Draw]) -> _Queued:
        self._use_here()
        step = _Queued(self._steps % TURNS, len(rows), len(rows.wanted), draws, not is_plain(draws))
        with ending_on_faults():
            self._device.wait_for(self._done[step.turn])  # only where its choices were not taken
            name, words = self._pack(rows, step)
            self._device.copy_in(self._forward.inputs, self._inputs[step.turn][:words])
            for graph in self._graphs_of(step, name):
                graph.launch()
            self._device.raise_flag(self._done[step.turn])
        self._steps += 1  # here, as one that cannot be packed takes no turn: the other one may be in use
        self._last = step
        return step

    def _pack(self, rows: Rows, step: _Queued) -> tuple[str, int]:
        """Write the step's inputs; the name of the graph that is the whole step, if one is, and how many words."""
        layout, words = self._layouts[bucket_of(step.rows)], self._inputs[step.turn]
        name = self._whole(step)
        pack(rows, layout, self._pages, words[: layout.words], step.turn * self.max_rows, step.chained)
        if not step.chained:
            return name, layout.words
        return name, self._pack_requests(step, layout.words if name else MOST_WORDS)

    def _whole(self, step: _Queued) -> str:
        """The name of the graph that is the whole step, empty if none is."""
        name = ("chained" if step.chained else "greedy") if step.wanted == step.rows else ""
        return name if (name, bucket_of(step.rows)) in self._graphs else ""

    def _pack_requests(self, step: _Queued, word: int) -> int:
        """Write what the chain reads from a word of the inputs on; the word behind it."""
        words = self._inputs[step.turn][word:]
        return word + self._sampler.pack(step.draws, bucket_of(step.wanted), words, step.turn)

    def _graphs_of(self, step: _Queued, name: str) -> Iterator[Graph]:
        bucket = bucket_of(step.rows)
        if name:
            yield self._graphs[name, bucket]
            return
        yield self._graphs["layers", bucket]
        if step.wanted:
            yield self._graphs["head", bucket_of(step.wanted)]
        if step.chained:
            yield self._graphs["chain", bucket_of(step.wanted)]

    def take(self) -> list[Choice]:
        """Wait for the oldest step under way; its choices."""
        return self._result(self._under_way.popleft())

    def _result(self, step: _Queued) -> list[Choice]:
        with ending_on_faults():
            self._device.wait_for(self._done[step.turn])
        if step.chained:
            return self._sampler.read(step.draws, step.turn)
        return [Choice(token) for token in self._choices[step.turn, : step.wanted].tolist()]

    def forward(self, rows: Rows) -> None:
        """Queue a step without choosing; returns before it is done."""
        self._queue(rows, ())

    def choose(self, draws: Sequence[Draw]) -> list[Choice]:
        """Choices for the last `forward`. Where all rows are plain they came with it, else the chain runs now."""
        step = replace(self._last, draws=draws, chained=not is_plain(draws))
        if step.chained:
            with ending_on_faults():
                end = self._pack_requests(step, MOST_WORDS)
                requests = self._inputs[step.turn][MOST_WORDS:end]
                self._device.copy_in(self._forward.inputs, requests, 4 * MOST_WORDS)
                self._graphs["chain", bucket_of(step.wanted)].launch()
                self._device.raise_flag(self._done[step.turn])
        return self._result(step)

    def _use_here(self) -> None:
        """Make the device current on this thread: loading and steps have a thread each."""
        if self._thread != (thread := threading.get_ident()):
            self._device.use()
            self._thread = thread

    def logits(self) -> Float32:
        """The logits of the last step's wanted rows, a copy on the host."""
        with ending_on_faults():
            return self._device.read(self._forward.buffers["logits"], (self._last.wanted, self.vocab), np.float32)

    def copy_bandwidth(self) -> float:
        """Bytes a second read and written by a device-to-device copy, for benchmarks."""
        return self._device.copy_bandwidth()

    def graph_ms(self, rows: int, chained: bool = False, repeats: int = 30) -> float:
        """Milliseconds of the GPU alone for a step like the last one, of `rows` rows, all wanted; for benchmarks."""
        step = _Queued(0, rows, rows, (), chained)
        graphs = list(self._graphs_of(step, self._whole(step)))
        start = self._device.event()
        for _ in range(repeats):
            for graph in graphs:
                graph.launch()
        return self._device.elapsed_ms(start, self._device.event()) / repeats

    def close(self) -> None:
        self._device.close()


@contextmanager
def ending_on_faults() -> Iterator[None]:
    """A fault of the device cannot be recovered from, whichever call meets it: the process ends with one clear line."""
    try:
        yield
    except DeviceError as error:
        print(f"strata-engine: the GPU failed: {error}", file=sys.stderr, flush=True)
        os._exit(70)


# -- loading


def load_forward(device: Device, model: Model, sizes: Sizes, inputs: int, choices: int, progress: Progress) -> Forward:
    """Read, arrange and upload every tensor; allocate cells and buffers.

    inputs: bytes of what a step is told; choices: where arg-maxima go, an address of the host's.
    """
    g = model.geometry
    memory = device.block_bytes, device.shared_bytes, device.reserved_bytes
    limits = Limits(device.multiprocessors, *memory, device.resident_threads)

    def linear(host: Arranged, epilogue: str) -> Linear:
        return Linear(upload(device, host), epilogue, limits)

    def vector(name: str):
        return device.upload(model.vector(name))

    embedding = linear(arranged(encode(model.embedding())), "logits")
    head = embedding if model.tied else linear(arranged(encode(model.head())), "logits")
    attn_gains = [vector(f"blk.{i}.attn_norm") for i in range(g.layers)] + [vector("output_norm")]
    layers = []
    with progress.stage("reading weights", total=g.layers) as stage, ThreadPoolExecutor(_readers()) as pool:
        for i, host in enumerate(_ahead(pool, model, g.layers)):
            layers.append(
                Layer(
                    heads=[linear(part, "heads") for part in host["heads"]],
                    output=linear(host["output"][0], "residual"),
                    gate_up=linear(host["gate_up"][0], "swiglu"),
                    down=linear(host["down"][0], "residual"),
                    ffn_gain=vector(f"blk.{i}.ffn_norm"),
                    next_gain=attn_gains[i + 1],
                    keys=device.allocate(sizes.cell_bytes),
                    values=device.allocate(sizes.cell_bytes),
                )
            )
            stage.advance(1, f"layer {i}")
    cosine, sine = model.rope(sizes.pages_a_slot * 64)
    return Forward(
        device=device,
        sizes=sizes,
        embedding=embedding,
        head=head,
        layers_=layers,
        first_gain=attn_gains[0],
        rope=device.upload(np.stack([cosine, sine], axis=-1)),
        pages=device.upload(page_table(sizes)),
        identity=device.upload(np.arange(MAX_ROWS, dtype=np.int32)),
        inputs=device.allocate(inputs),
        chosen=device.allocate(4 * sizes.max_rows),
        buffers={name: device.allocate(size) for name, size in sizes.buffer_bytes().items()},
        scratch=device.allocate(sizes.scratch_bytes, zero=False),
        tickets=device.allocate(4 * MAX_ROWS * g.heads),
        attention=sizes.attention,
        choices=choices,
    )


def _readers() -> int:
    return max(1, min(16, len(os.sched_getaffinity(0))))


def _ahead(pool: ThreadPoolExecutor, model: Model, layers: int):
    """Each layer's matrices in lane order, a few layers ahead of their use."""
    ahead = _readers() + 1
    jobs = [pool.submit(_layer_matrices, model, i) for i in range(min(ahead, layers))]
    for i in range(layers):
        host = jobs[i].result()
        jobs[i] = None  # type: ignore[call-overload]
        if i + ahead < layers:
            jobs.append(pool.submit(_layer_matrices, model, i + ahead))
        yield host


def _layer_matrices(model: Model, layer: int) -> dict[str, list[Arranged]]:
    def one(name: str) -> list[Arranged]:
        return [arranged(encode(model.layer(layer, name)))]

    return {
        "heads": heads_matrices([model.layer(layer, name) for name in ("attn_q", "attn_k", "attn_v")]),
        "output": one("attn_output"),
        "gate_up": [gated_matrix(model.layer(layer, "ffn_gate"), model.layer(layer, "ffn_up"))],
        "down": one("ffn_down"),
    }
