"""Which kernel shape serves which step: figures measured on an H200, rules that hold on any GPU.

Shapes change speed, never results. What does decide results, the number of slices of a matrix, depends on the matrix
alone.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from .device import KernelSpec
from .layout import Format
from .shapes import THREADS, AttentionShape, SliceShape, TileShape

MOST_SLICE_ROWS = 64  # more rows than this take the tile kernel
RING_BYTES = 96 << 10  # shared memory of a multiprocessor for weights under way
SHARED_BYTES = 220 << 10  # what blocks may use of a multiprocessor's shared memory
MOST_SHARES = 32  # blocks over which the cells of a row are spread
SPREAD_ROWS = 32  # up to here the cells of a row are spread over blocks


def slices_of(units: int) -> int:
    """Into how many slices K is cut: decides the order of adding, so it may depend on the matrix alone.

    Equal slices, where there is a number of them that gives any: they allow steps of several units.
    """
    if units <= 12:
        return units
    if units < 32:
        return -(-units // 2)
    counts = (8, 9, 10, 11, 12) if units < 128 else (14, 16, 15, 13, 12)
    return next((count for count in counts if units % count == 0), counts[0])


def slice_shape(
    form: Format, slices: int, tiles: int, units: int, rows: int, processors: int
) -> tuple[SliceShape, int]:
    """(shape, blocks a multiprocessor) of the slice kernel.

    Tiles of one warp share what it reads of the activations, and the wait for the other warps.
    """
    if rows > 8:
        return _many_slice_shape(form, slices, tiles, rows, processors)
    few = rows <= 4
    chunk, whole = slice_steps(form, slices, units, few)
    mt, blocks = 1, 1
    if slices < 12:
        blocks = -(-tiles // processors)
        if blocks > (3 if few else 2):
            mt = 2 - tiles % 2
            blocks = 1 if not few and whole and chunk * form.vectors > 2 else 2  # one: activations fill the registers
        if blocks == 3 and not whole:
            chunk = min(chunk, 2)
    elif tiles > processors:
        mt = 2 - tiles % 2
    return _with_stages(SliceShape(slices, mt, 1, 2, few, chunk, whole), form, blocks, RING_BYTES), blocks


def _many_slice_shape(form: Format, slices: int, tiles: int, rows: int, processors: int) -> tuple[SliceShape, int]:
    """`slice_shape` for more than 8 rows: 16 rows a warp, in as many tiles as keep all multiprocessors busy."""
    counts = (2, 1) if slices > 12 else (4, 2, 1)
    down = -(-rows // 16)
    mt = next((n for n in counts if tiles % n == 0 and tiles // n * down > 0.9 * processors), 1)
    shape = SliceShape(slices, mt, 2)
    return _with_stages(shape, form, 1, SHARED_BYTES - 2 * shape.set_bytes), 1


def _with_stages(shape: SliceShape, form: Format, blocks: int, room: int) -> SliceShape:
    """The shape with as many stages as `room` bytes of a multiprocessor hold: 2 to 8."""
    stages = max(2, min(8, room // (blocks * shape.slices * shape.slot_bytes(form))))
    return replace(shape, stages=stages)


def slice_steps(form: Format, slices: int, units: int, few: bool) -> tuple[int, bool]:
    """(units a step, whether that is a whole slice): as many as leave room in registers for their activations."""
    if units % slices:
        return 1, False
    own, vectors = units // slices, form.vectors
    if own * vectors <= 4:
        return own, True
    most = max(1, (4 if few and slices < 12 else 2) // vectors)
    return next(n for n in range(most, 0, -1) if own % n == 0), False


# mt, nt, across, down, stages, blocks
TILE_SHAPES = ((4, 4, 2, 2, 2, 2), (2, 4, 4, 2, 3, 1), (2, 4, 2, 2, 3, 3), (2, 2, 2, 2, 3, 4))
TILE_COSTS = (1.0, 1.19, 1.15, 1.3)  # time a product and row, against the first, when the GPU is full


def tile_shape(form: Format, slices: int, tiles: int, rows: int, processors: int) -> tuple[TileShape, int]:
    """(shape, blocks a multiprocessor) of the tile kernel: the one whose last wave wastes least."""

    def cost(i: int) -> float:
        shape, blocks = TileShape(slices, *TILE_SHAPES[i][:5]), TILE_SHAPES[i][5]
        count = -(-tiles * 16 // shape.features) * -(-rows // shape.rows)
        waves = -(-count // (processors * blocks))
        return waves * shape.features * shape.rows * blocks * TILE_COSTS[i]

    indexes = range(len(TILE_SHAPES))
    fits = [i for i in indexes if _fits(TileShape(slices, *TILE_SHAPES[i][:5]), form, TILE_SHAPES[i][5])]
    best = min(fits, key=cost)
    return TileShape(slices, *TILE_SHAPES[best][:5]), TILE_SHAPES[best][5]


def _fits(shape: TileShape, form: Format, blocks: int) -> bool:
    """True if `blocks` blocks share a multiprocessor's shared memory and operand A of 16-bit codes its registers."""
    return shape.shared_bytes(form) * blocks <= SHARED_BYTES and not (form.codes == "f16" and shape.mt > 2)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Attention shapes of a model: heads that share a key-value head, size of a head's cells, parts of a cell."""

    heads: int
    cell_dim: int
    parts: int
    groups: int  # most groups of chunks a query sees

    def choose(self, bucket: int) -> tuple[KernelSpec, AttentionShape, int]:
        """(kernel, its shape, blocks a tile) for a step of `bucket` rows."""
        spread = bucket <= SPREAD_ROWS
        heads = next(h for h in range(min(8 if spread else 16, self.heads), 0, -1) if self.heads % h == 0)
        shape = AttentionShape(self.cell_dim, heads, self.parts, 1, spread)
        if spread:
            return attention_spec(shape), shape, min(MOST_SHARES, self.groups)
        return attention_spec(shape, 3 if self.cell_dim <= 64 else 2), shape, 1

    @property
    def scratch_bytes(self) -> int:
        """Scratch of one head tile of one query tile."""
        shape = AttentionShape(self.cell_dim, 1, self.parts, 1)
        return self.groups * shape.partial_floats * 4


def _build_attention(shape: AttentionShape) -> tuple[Any, Any]:
    from .attention import SIGNATURE, attention_kernel

    return attention_kernel(shape), SIGNATURE


def attention_spec(shape: AttentionShape, blocks: int = 1) -> KernelSpec:
    kind = "spread" if shape.spread else "whole"
    name = f"attention_{shape.head_dim}_{shape.heads}_{shape.parts}_{shape.mt}_{kind}_{blocks}"
    return KernelSpec(name, functools.partial(_build_attention, shape), THREADS, shape.shared_bytes, blocks)


def _build_embed(form: Format) -> tuple[Any, Any]:
    from .elementwise import EMBED_SIGNATURE, embed_kernel

    return embed_kernel(form), EMBED_SIGNATURE


def embed_spec(form: Format) -> KernelSpec:
    return KernelSpec(f"embed_{form.name}", functools.partial(_build_embed, form), 256)


def _build_argmax() -> tuple[Any, Any]:
    from .elementwise import ARGMAX_SIGNATURE, argmax_kernel

    return argmax_kernel(), ARGMAX_SIGNATURE


def argmax_spec() -> KernelSpec:
    return KernelSpec("argmax", _build_argmax, 1024)
