"""The CPU backend: owns the arrays, lays out a step, runs the forward on a team of threads, then the sampler."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...cores import usable_cores
from ...model import Geometry, Model
from ...progress import Progress
from ...rows import Choice, Draw, Float32, Int32, Rows
from ...sampling.cpu import CpuSampler
from .attention import CHUNK, DIMS, SEGMENT, SPAN, STATE
from .forward import COUNTERS, MATRICES, PHASES_A_LAYER, PHASES_ELSEWHERE, Buffers, Sizes, run_step
from .layout import TILE, Arena, pad
from .matmul import GROUP
from .memory import drop_compiler_code, return_large_blocks
from .precompile import CELL_TYPES, ensure_compiled
from .team import LAG, Team

MAX_ROWS = 512


class CpuBackend:
    """backends.base.Backend on numba CPU kernels. KV cells are float32 (`kv="f32"`) or IEEE halves (`"f16"`)."""

    device = "cpu"
    feeds = False
    chunk = 64

    def __init__(
        self,
        model: Model,
        *,
        context: int,
        slots: int,
        threads: int | None = None,
        kv: str = "f32",
        max_rows: int = MAX_ROWS,
        progress: Progress,
    ) -> None:
        self.vocab, self.context, self.slots, self.max_rows = model.vocab, context, slots, max_rows
        self._team = Team(threads or usable_cores())
        self._sizes = _sizes(model.geometry, context, max_rows)
        return_large_blocks()
        with progress.stage("reading weights", total=model.geometry.layers + 1) as stage:
            arena, matrices, norms = _weights(model, self._sizes, stage.advance)
        weights = arena, matrices, norms
        self._buffers = _buffers(model, self._sizes, weights, context, slots, kv, max_rows, self._team.size)
        phases = PHASES_A_LAYER * model.geometry.layers + PHASES_ELSEWHERE
        self._counters = [np.zeros(phases * COUNTERS, np.int64) for _ in range(LAG + 1)]
        self._sampler = CpuSampler(self.vocab)
        self._kv = kv
        self._wanted = 0

    def warm_up(self, progress: Progress) -> None:
        """Compile every kernel, or load it from the cache."""
        one, none = np.zeros(1, np.int32), np.zeros(0, np.int32)
        with progress.stage("compiling kernels", total=2) as stage:
            ensure_compiled(self._kv)
            stage.advance(1, "loading")
            self.forward(Rows(one, one, one, none))
            self._sampler.warm_up()
            stage.advance(1, "done")
        drop_compiler_code()

    def forward(self, rows: Rows) -> None:
        arrays = [np.ascontiguousarray(a, np.int32) for a in (rows.slot, rows.position, rows.token, rows.wanted)]
        arrays.append(_spans(rows))
        self._counters.append(self._counters.pop(0))
        counters, threads, sizes, buffers = self._counters[-1], self._team.size, self._sizes, self._buffers
        counters[:] = 0
        self._team.run(lambda thread: run_step(thread, threads, counters, sizes, buffers, *arrays))
        self._wanted = len(rows.wanted)

    def choose(self, draws: Sequence[Draw]) -> list[Choice]:
        return self._sampler.choose(self._logits(), draws)

    def logits(self) -> Float32:
        return self._logits()[:, : self.vocab].copy()

    def _logits(self) -> Float32:
        """[wanted, vocab_ld]: rows padded to whole tiles."""
        return self._buffers.logits.reshape(-1, self._sizes.vocab_ld)[: self._wanted]

    def close(self) -> None:
        self._team.close()


def _spans(rows: Rows) -> Int32:
    """Runs of at most SPAN rows that follow one another in a slot: int32 [s, 2] of first row and count."""
    slot, position = np.asarray(rows.slot), np.asarray(rows.position)
    breaks = np.flatnonzero((np.diff(slot) != 0) | (np.diff(position) != 1)) + 1
    edges = [0, *breaks.tolist(), len(slot)]
    spans = [
        (start, min(SPAN, end - start))
        for first, end in zip(edges, edges[1:], strict=False)
        for start in range(first, end, SPAN)
    ]
    return np.array(spans, np.int32).reshape(-1, 2)


def _sizes(g: Geometry, context: int, max_rows: int) -> Sizes:
    x_ld, att_ld, ff_ld = pad(g.width, TILE), pad(g.q_width, TILE), pad(g.ff, TILE)
    k_at = pad(g.q_width, TILE)
    v_at = k_at + pad(g.kv_width, TILE)
    return Sizes(
        layers=g.layers,
        heads=g.heads,
        kv_heads=g.kv_heads,
        head_dim=g.head_dim,
        value_dim=pad(g.head_dim, DIMS),
        rope_half=g.rope_dims // 2,
        width=g.width,
        rms_eps=np.float32(g.rms_eps),
        q_scale=np.float32(1.0 / math.sqrt(g.head_dim)),
        x_ld=x_ld,
        qkv_ld=v_at + pad(g.kv_width, TILE),
        k_at=k_at,
        v_at=v_at,
        att_ld=att_ld,
        ff_ld=ff_ld,
        sums_ld=max(x_ld, att_ld, ff_ld) // TILE,
        vocab_ld=pad(g.vocab, TILE),
        chunks=-(-context // CHUNK),
        segments=-(-context // SEGMENT),
        scratch_ld=2 * pad(max_rows, GROUP) * TILE,
    )


def _weights(model: Model, sizes: Sizes, advance) -> tuple[NDArray, NDArray, Float32]:
    """The arena, the descriptors [7 * layers + 2, fields] and the norms [2 * layers + 1, x_ld]."""
    arena, descriptors = Arena(), []
    norms = np.zeros((2 * sizes.layers + 1, sizes.x_ld), np.float32)
    for layer in range(sizes.layers):
        descriptors += [arena.add(model.layer(layer, name)) for name in MATRICES]
        for i, name in enumerate(("attn_norm", "ffn_norm")):
            norms[2 * layer + i, : sizes.width] = model.vector(f"blk.{layer}.{name}")
        advance(1, f"layer {layer}")
    norms[-1, : sizes.width] = model.vector("output_norm")
    descriptors.append(arena.add(model.embedding()))
    descriptors.append(descriptors[-1] if model.tied else arena.add(model.head()))
    advance(1, "embedding")
    return arena.join(), np.stack(descriptors), norms


def _buffers(
    model: Model,
    s: Sizes,
    weights: tuple[NDArray, NDArray, Float32],
    context: int,
    slots: int,
    kv: str,
    max_rows: int,
    threads: int,
) -> Buffers:
    arena, matrices, norms = weights
    rows = pad(max_rows, GROUP)
    cos, sin = model.rope(context)
    cell = CELL_TYPES[kv]
    cells = slots * s.layers * s.kv_heads * s.chunks * CHUNK
    partial = rows * s.heads * s.segments * (s.value_dim + STATE)

    def floats(count: int) -> Float32:
        return np.zeros(count, np.float32)

    return Buffers(
        u8=arena,
        i8=arena.view(np.int8),
        u16=arena.view(np.uint16),
        i16=arena.view(np.int16),
        f32=arena.view(np.float32),
        matrices=matrices.reshape(-1),
        norms=norms.reshape(-1),
        cos=cos.reshape(-1),
        sin=sin.reshape(-1),
        keys=np.zeros(cells * s.head_dim, cell),
        values=np.zeros(cells * s.value_dim, cell),
        x=floats(rows * s.x_ld),
        normed=floats(rows * s.x_ld),
        qkv=floats(rows * s.qkv_ld),
        att=floats(rows * s.att_ld),
        hidden=floats(rows * s.ff_ld),
        sums=floats(rows * s.sums_ld),
        partial=floats(partial),
        logits=floats(rows * s.vocab_ld),
        scratch=floats(threads * s.scratch_ld),
    )
