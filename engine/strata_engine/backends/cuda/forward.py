"""The forward as launches: which buffers there are and which kernel follows which.

A layer is five kernels: heads (norm, q k v, RoPE, append), attention, output (+ residual), gate and up (norm, SwiGLU),
down (+ residual). `Forward.layers` and `Forward.head` queue launches and nothing else, so they can be captured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...gpu.compiled import KernelSpec
from ...gpu.device import Buffer, Device
from .inputs import BUCKETS, Layout
from .layout import TILE, UNIT
from .linear import Linear
from .plan import SPREAD_ROWS, AttentionPlan, argmax_spec, embed_spec
from .shapes import CELLS, WARPS, Cells, Heads, Logits, Residual, Swiglu

if TYPE_CHECKING:
    from ...model.geometry import Geometry

LOG2_E = 1.4426950408889634


def pad(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of a model on this device."""

    geometry: Geometry
    context: int
    slots: int
    max_rows: int
    parts: int  # 1: cells of halves; 2: float32-like

    @property
    def pages_a_slot(self) -> int:
        return -(-self.context // CELLS)

    @property
    def cell_dim(self) -> int:
        return pad(self.geometry.head_dim, 64)

    @property
    def groups(self) -> int:
        """Most groups of chunks a query sees."""
        return -(-self.pages_a_slot // WARPS)

    @property
    def cell_bytes(self) -> int:
        """Bytes of the keys (or values) of a layer."""
        g = self.geometry
        return self.slots * self.pages_a_slot * g.kv_heads * self.parts * CELLS * self.cell_dim * 2

    @property
    def tiles(self) -> int:
        """Tiles of the residual stream's width."""
        return -(-self.geometry.width // TILE)

    @property
    def vocab_tiles(self) -> int:
        return -(-self.geometry.vocab // TILE)

    @property
    def attention(self) -> AttentionPlan:
        g = self.geometry
        return AttentionPlan(g.heads // g.kv_heads, self.cell_dim, self.parts, self.groups)

    @property
    def scratch_bytes(self) -> int:
        """Bytes for what attention's blocks leave for one another."""
        return min(self.max_rows, SPREAD_ROWS) * self.geometry.kv_heads * self.attention.scratch_bytes

    def buffer_bytes(self) -> dict[str, int]:
        """Sizes of everything a step writes, besides the cells."""
        g, rows = self.geometry, self.max_rows
        return {
            "stream": rows * g.width * 4,
            "split": rows * 2 * pad(g.width, UNIT) * 2,
            "squares": rows * self.tiles * 4,
            "queries": rows * 2 * g.heads * self.cell_dim * 2,
            "attended": rows * 2 * pad(g.q_width, UNIT) * 2,
            "hidden": rows * 2 * pad(g.ff, UNIT) * 2,
            "logits": rows * g.vocab * 4,
            "top": rows * self.vocab_tiles * 4,
            "best": rows * self.vocab_tiles * 4,
        }


@dataclass(slots=True)
class Layer:
    """The matrices and cells of a layer. `next_gain` is the norm weight that follows the layer."""

    heads: list[Linear]
    output: Linear
    gate_up: Linear
    down: Linear
    ffn_gain: Buffer
    next_gain: Buffer
    keys: Buffer
    values: Buffer


@dataclass(slots=True)
class Forward:
    """Everything a step needs on the device."""

    device: Device
    sizes: Sizes
    embedding: Linear
    head: Linear
    layers_: list[Layer]
    first_gain: Buffer
    rope: Buffer
    pages: Buffer
    identity: Buffer
    chosen: Buffer  # int32 [max_rows]: the newest step's choices
    buffers: dict[str, Buffer]
    scratch: Buffer
    tickets: Buffer
    attention: AttentionPlan
    inputs: Buffer  # inputs.py, and room for what the sampler needs
    choices: int  # where the host finds the arg-maxima: page-locked memory, int32 [TURNS, max_rows]

    def specs(self) -> list[KernelSpec]:
        """Every kernel that some bucket needs."""
        linears = [self.head] + [
            m for layer in self.layers_ for m in (*layer.heads, layer.output, layer.gate_up, layer.down)
        ]
        buckets = [bucket for bucket in BUCKETS if bucket <= self.sizes.max_rows]
        specs = [linear.choose(bucket)[0] for linear in linears for bucket in buckets]
        specs += [self.attention.choose(bucket)[0] for bucket in buckets]
        specs += [embed_spec(self.embedding.weights.form), argmax_spec()]
        return list({spec.name: spec for spec in specs}.values())

    def layout(self, bucket: int) -> Layout:
        return Layout(bucket, self.attention.choose(bucket)[1].rows, self.sizes.slots)

    def _norm(self) -> tuple:
        g = self.sizes.geometry
        return self.buffers["squares"], self.sizes.tiles, 1.0 / g.width, g.rms_eps

    def _residual(self, gain: Buffer) -> Residual:
        b, width = self.buffers, self.sizes.geometry.width
        return Residual(b["stream"], gain, b["split"], b["squares"], width, pad(width, UNIT) // 2, self.sizes.tiles)

    def layers(self, bucket: int) -> None:
        """Queue embedding and all layers for `bucket` rows."""
        at = {
            part: self.inputs.at(self.layout(bucket).offset(part))
            for part in ("token", "position", "cell", "slot", "tiles")
        }
        e = self.embedding.weights
        kernel = self.device.load(embed_spec(e.form))
        out = self._residual(self.first_gain)
        self.device.launch(
            kernel, (bucket,), e.codes, e.scales, at["token"], self.chosen, e.units, out, dependent=False
        )
        for layer in self.layers_:
            self._layer(layer, bucket, at)

    def _layer(self, layer: Layer, bucket: int, at: dict[str, int]) -> None:
        b, g, norm = self.buffers, self.sizes.geometry, self._norm()
        for linear in layer.heads:
            linear.run(
                self.device, bucket, b["split"], self.identity, norm, self._heads(layer, at, linear.weights.first)
            )
        self._attend(layer, bucket, at)
        out = self._residual(layer.ffn_gain)
        layer.output.run(self.device, bucket, b["attended"], self.identity, norm, out)
        hidden = Swiglu(b["hidden"], pad(g.ff, UNIT))
        layer.gate_up.run(self.device, bucket, b["split"], self.identity, norm, hidden)
        layer.down.run(self.device, bucket, b["hidden"], self.identity, norm, self._residual(layer.next_gain))

    def _heads(self, layer: Layer, at: dict[str, int], first: int) -> Heads:
        g, s = self.sizes.geometry, self.sizes
        scale = LOG2_E / math.sqrt(g.head_dim)
        return Heads(
            self.buffers["queries"], layer.keys, layer.values, at["position"], at["cell"], self.rope,
            g.heads, g.kv_heads, g.head_dim, s.cell_dim, g.rope_dims, first, s.parts, scale,
        )  # fmt: skip

    def _attend(self, layer: Layer, bucket: int, at: dict[str, int]) -> None:
        g, s, b = self.sizes.geometry, self.sizes, self.buffers
        spec, shape, spread = self.attention.choose(bucket)
        grid = (self.layout(bucket).most_tiles, g.heads // shape.heads, spread)
        cells = Cells(
            b["queries"], layer.keys, layer.values, at["position"], at["slot"], self.pages, at["tiles"], b["attended"],
            self.scratch, self.tickets, g.heads, g.kv_heads, g.head_dim, s.pages_a_slot,
            pad(g.q_width, UNIT) // 2, s.groups,
        )  # fmt: skip
        self.device.launch(self.device.load(spec), grid, cells)

    def logits(self, count: int) -> None:
        """Queue the head for `count` wanted rows."""
        b, s = self.buffers, self.sizes
        wanted = self.inputs.at(self.layout(count).offset("wanted"))
        out = Logits(b["logits"], b["top"], b["best"], s.geometry.vocab, s.vocab_tiles)
        self.head.run(self.device, count, b["split"], wanted, self._norm(), out)

    def arg_max(self, count: int) -> None:
        """Queue the choice of the largest logit of each of `count` wanted rows."""
        b = self.buffers
        places = self.inputs, self.chosen, self.choices
        self.device.launch(
            self.device.load(argmax_spec()), (count,), b["top"], b["best"], self.sizes.vocab_tiles, *places
        )


def page_table(sizes: Sizes) -> np.ndarray:
    """int32 [slots, pages a slot]: each slot's pages, one after another."""
    return np.arange(sizes.slots * sizes.pages_a_slot, dtype=np.int32).reshape(sizes.slots, sizes.pages_a_slot)
