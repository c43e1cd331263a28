"""The CUDA backend: loads a model, captures a graph a row bucket, replays one a step."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ...progress import Progress
from ...rows import Choice, Draw, Float32, Rows
from ...sampling.cuda import CudaSampler, sampler_specs
from ...sampling.host import is_plain
from .device import Device, DeviceError, Graph, build_missing
from .forward import Forward, Layer, Sizes, page_table
from .inputs import BUCKETS, MAX_ROWS, bucket_of, pack
from .linear import Linear
from .plan import AttentionPlan
from .weights import Arranged, arranged, encode, gated_matrix, heads_matrices, upload

if TYPE_CHECKING:
    from ...model import Model

log = logging.getLogger(__name__)
RING = 4  # steps whose inputs may wait for the device
RESERVE = 512 << 20  # bytes left for the driver, graphs, kernels and the sampler


class CudaBackend:
    """backends.base.Backend on one NVIDIA GPU. Cells are halves (`kv="f16"`) or two halves each (`"f32"`)."""

    device = "cuda"
    chunk = MAX_ROWS

    def __init__(
        self, model: Model, *, context: int, slots: int, kv: str = "f32", max_rows: int = MAX_ROWS, progress: Progress
    ) -> None:
        self.vocab, self.context, self.slots, self.max_rows = model.vocab, context, slots, max_rows
        self._device = Device()
        self._thread = threading.get_ident()  # the one on which the device is current
        self._sizes = Sizes(model.geometry, context, slots, max_rows, {"f16": 1, "f32": 2}[kv])
        self._check_memory(model)
        self._choice = self._device.pinned(max_rows)
        self._forward = load_forward(self._device, model, self._sizes, self._choice.ctypes.data, progress)
        self._compile(progress)
        self._pages = page_table(self._sizes)
        self._layouts = {bucket: self._forward.layout(bucket) for bucket in BUCKETS if bucket <= max_rows}
        self._graphs: dict[tuple[str, int], Graph] = {}
        self._ring = [self._device.pinned(self._forward.inputs.size // 4) for _ in range(RING)]
        self._sampler = self._open_sampler()
        self._step = self._wanted = 0
        self._capture(progress)

    # -- start

    def _check_memory(self, model: Model) -> None:
        """BackendError now rather than a failed allocation later."""
        from .. import BackendError

        free, total = self._device.memory()
        weights = int(os.path.getsize(model.path) * 1.15)
        cells = 2 * model.geometry.layers * self._sizes.cell_bytes
        buffers = sum(self._sizes.buffer_bytes().values())
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
        buckets = [bucket for bucket in BUCKETS if bucket <= self.max_rows]
        sampler, logits = self._sampler, self._forward.buffers["logits"]
        chain = partial(sampler.capture, logits, requests=sampler.requests, chosen=sampler.chosen)
        with progress.stage("capturing graphs", total=3 * len(buckets)) as stage:
            for bucket in buckets:
                for name, queue in (
                    ("layers", self._forward.layers),
                    ("logits", self._forward.logits),
                    ("chain", chain),
                ):
                    with self._device.capture() as graph:
                        queue(bucket)
                    self._graphs[name, bucket] = graph
                stage.advance(3, f"{bucket} rows")
        zero = np.zeros(1, np.int32)
        self.forward(Rows(zero, zero, zero, zero))
        self._device.synchronize()

    # -- a step

    def forward(self, rows: Rows) -> None:
        """Queue a step; returns before it is done."""
        if self._thread != (thread := threading.get_ident()):  # loading and steps have a thread each
            self._device.use()
            self._thread = thread
        layout = self._layouts[bucket_of(len(rows))]
        if self._step % RING == 0:
            self._wait()  # the oldest inputs are about to be overwritten
        inputs = self._ring[self._step % RING][: layout.words]
        self._step += 1
        pack(rows, layout, self._pages, inputs)
        self._wanted = len(rows.wanted)
        with ending_on_faults():
            self._device.copy_in(self._forward.inputs, inputs)
            self._graphs["layers", layout.bucket].launch()
            if self._wanted:
                self._graphs["logits", bucket_of(self._wanted)].launch()

    def choose(self, draws: Sequence[Draw]) -> list[Choice]:
        """Plain greedy rows take the arg-max that came with the logits; beside others, the chain's, which is the same.

        The chain's graph follows the forward's in stream order, so parameters are packed while that still runs.
        """
        chain = not is_plain(draws)
        if chain:
            bucket = bucket_of(len(draws))
            with ending_on_faults():
                self._sampler.stage(draws, bucket)
                self._graphs["chain", bucket].launch()
        self._wait()
        if chain:
            return self._sampler.read(draws)
        return [Choice(token) for token in self._choice[: self._wanted].tolist()]

    def logits(self) -> Float32:
        """The logits of the wanted rows, a copy on the host."""
        self._wait()
        return self._device.read(self._forward.buffers["logits"], (self._wanted, self.vocab), np.float32)

    def _wait(self) -> None:
        with ending_on_faults():
            self._device.synchronize()

    def copy_bandwidth(self) -> float:
        """Bytes a second read and written by a device-to-device copy, for benchmarks."""
        return self._device.copy_bandwidth()

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


def load_forward(device: Device, model: Model, sizes: Sizes, choice: int, progress: Progress) -> Forward:
    """Read, arrange and upload every tensor; allocate cells and buffers. `choice`: where arg-maxima go, host memory."""
    g = model.geometry

    def linear(host: Arranged, epilogue: str) -> Linear:
        return Linear(upload(device, host), epilogue, device.multiprocessors)

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
    plan = AttentionPlan(g.heads // g.kv_heads, sizes.cell_dim, sizes.parts, sizes.groups)
    tiles = min(sizes.max_rows, 32)
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
        inputs=device.allocate(4 * (MAX_ROWS + 6 * MAX_ROWS)),
        buffers={name: device.allocate(size) for name, size in sizes.buffer_bytes().items()},
        scratch=device.allocate(tiles * g.heads * plan.scratch_bytes, zero=False),
        tickets=device.allocate(4 * MAX_ROWS * g.heads),
        attention=plan,
        choice=choice,
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
