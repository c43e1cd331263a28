"""Which kernel shape serves which step: figures measured on an H200, rules that hold on any GPU.

Shapes change speed, never results. What does decide results, the number of slices of a matrix, depends on the matrix
alone.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

from ...gpu.compiled import KernelSpec
from .layout import Format
from .shapes import THREADS, AttentionShape, SliceShape, TileShape

MOST_SLICE_ROWS = 64  # more rows than this take the tile kernel
MOST_SLICE_TILES = 288  # rows times tiles a multiprocessor: of a step of over 8 rows with more it is faster, too
RING_BYTES = 96 << 10  # of a multiprocessor's shared memory for weights under way: more does not help
MOST_SHARES = 32  # blocks over which the cells of a row are spread
SPREAD_ROWS = 32  # up to here the cells of a row are spread over blocks


@dataclass(frozen=True, slots=True)
class Limits:
    """What shapes depend on of a GPU; the defaults are an H200's."""

    processors: int = 132  # multiprocessors
    block_bytes: int = 227 << 10  # shared memory that a block can have
    shared_bytes: int = 228 << 10  # shared memory of a multiprocessor, of which each block costs
    reserved_bytes: int = 1 << 10  # this much more than it asks for
    threads: int = 2048  # that a multiprocessor can hold

    def fits(self, blocks: int, block_bytes: int) -> bool:
        """Whether `blocks` blocks that ask for `block_bytes` of shared memory each run on a multiprocessor at once."""
        return block_bytes <= self.block_bytes and blocks * (block_bytes + self.reserved_bytes) <= self.shared_bytes


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


def takes_slices(tiles: int, rows: int, limits: Limits) -> bool:
    """Whether a step of `rows` rows takes the slice kernel: a matrix of many tiles fills the tile kernel sooner."""
    return rows <= 8 or (rows <= MOST_SLICE_ROWS and rows * tiles <= MOST_SLICE_TILES * limits.processors)


def slice_shape(form: Format, slices: int, tiles: int, units: int, rows: int, limits: Limits) -> tuple[SliceShape, int]:
    """(shape, blocks a multiprocessor) of the slice kernel.

    Tiles of one warp share what it reads of the activations, and the wait for the other warps.
    """
    if rows > 8:
        return _fitted(*_many_slice_shape(slices, tiles, rows, limits.processors), form, limits)
    few = rows <= 4
    chunk, whole = slice_steps(form, slices, units, few)
    mt, blocks = 1, 1
    if slices < 12:
        blocks = -(-tiles // limits.processors)
        if blocks > (3 if few else 2):
            mt = 2 - tiles % 2
            blocks = 1 if not few and whole and chunk * form.vectors > 2 else 2  # one: activations fill the registers
        if blocks == 3 and not whole:
            chunk = 2 - chunk % 2
    elif tiles > limits.processors:
        mt = 2 - tiles % 2
    return _fitted(SliceShape(slices, mt, 1, 8, few, chunk, whole), blocks, form, limits)


def _many_slice_shape(slices: int, tiles: int, rows: int, processors: int) -> tuple[SliceShape, int]:
    """`slice_shape` for more than 8 rows: 16 rows a warp."""
    down = -(-rows // 16)
    if slices <= 12 and tiles * down > processors and rows <= 32:
        return SliceShape(slices, 1, 2, 4), 2
    counts = (2, 1) if slices > 12 else (4, 2, 1)
    mt = next((n for n in counts if tiles % n == 0 and tiles // n * down > 0.9 * processors), 1)
    return SliceShape(slices, mt, 2, 8), 1


def _fitted(shape: SliceShape, blocks: int, form: Format, limits: Limits) -> tuple[SliceShape, int]:
    """The shape as it fits shared memory: first with fewer stages, fewer tiles, blocks, units a step, rows."""
    blocks = min(blocks, limits.threads // shape.threads)
    if shape.nt == 1:
        stages = RING_BYTES // (blocks * shape.slices * shape.slot_bytes(form))
        shape = replace(shape, stages=max(2, min(shape.stages, stages)))
    while not limits.fits(blocks, shape.shared_bytes(form)):
        if shape.stages > 2:
            shape = replace(shape, stages=shape.stages - 1)
        elif shape.mt > 1:
            shape = replace(shape, mt=shape.mt // 2)
        elif blocks > 1:
            blocks -= 1
        elif shape.chunk > 1:
            shape = replace(shape, chunk=1, whole=False)
        elif shape.nt > 1:
            shape = replace(shape, nt=1)
        elif shape.stages > 1:
            shape = replace(shape, stages=1)
        else:
            raise ValueError(f"{shape} does not fit {limits}")
    return shape, blocks


def slice_steps(form: Format, slices: int, units: int, few: bool) -> tuple[int, bool]:
    """(units a step, whether that is a whole slice): as many as leave room in registers for their activations."""
    if units % slices:
        return 1, False
    own, vectors = units // slices, form.vectors
    if own * vectors <= 4:
        return own, True
    most = max(1, (4 if few and slices < 12 else 2) // vectors)
    return next(n for n in range(most, 0, -1) if own % n == 0), False


# (mt, nt, across, down, stages); ns that a unit takes with 1, 2, .. of its blocks on a multiprocessor, as many as fit
TILE_SHAPES = (
    ((4, 4, 2, 2, 2), (1208, 1902)),
    ((2, 4, 4, 1, 4), (735, 1243, 1416)),
    ((2, 4, 4, 1, 4), (711, 1004)),  # more registers a thread
    ((2, 2, 4, 1, 4), (467, 801, 870)),
)


def tile_shape(form: Format, slices: int, tiles: int, rows: int, limits: Limits) -> tuple[TileShape, int]:
    """(shape, blocks a multiprocessor) of the tile kernel: the one that is done first."""
    best, least = None, math.inf
    for sizes, times in TILE_SHAPES:
        fitted = _tile_fitted(TileShape(slices, *sizes), len(times), form, limits)
        if fitted is None:
            continue
        shape, blocks = fitted
        count = -(-tiles * 16 // shape.features) * -(-rows // shape.rows)
        waves, rest = divmod(count, limits.processors * blocks)
        time = waves * times[blocks - 1] + (times[-(-rest // limits.processors) - 1] if rest else 0)
        if time < least:
            best, least = fitted, time
    if best is None:
        raise ValueError(f"no tile shape of {form.name} fits {limits}")
    return best


def _tile_fitted(shape: TileShape, blocks: int, form: Format, limits: Limits) -> tuple[TileShape, int] | None:
    """The shape with as many stages and blocks as fit; None if it does not, or operand A of halves its registers."""
    if form.codes == "f16" and shape.mt > 2:
        return None
    while not limits.fits(blocks, shape.shared_bytes(form)):
        if blocks > 1:
            blocks -= 1
        elif shape.stages > 2:
            shape = replace(shape, stages=shape.stages - 1)
        else:
            return None
    return shape, blocks


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
        shape = self._shape(spread)
        if spread:
            return attention_spec(shape), shape, min(MOST_SHARES, self.groups)
        return attention_spec(shape, 3 if self.cell_dim <= 64 else 2), shape, 1

    def _shape(self, spread: bool) -> AttentionShape:
        """As many heads as fit a query tile."""
        heads = next(h for h in range(min(8 if spread else 16, self.heads), 0, -1) if self.heads % h == 0)
        return AttentionShape(self.cell_dim, heads, self.parts, spread)

    @property
    def scratch_bytes(self) -> int:
        """Scratch of a key-value head's query heads, for one query tile of a step that spreads them."""
        shape = self._shape(True)
        return self.heads // shape.heads * self.groups * shape.partial_floats * 4


def _build_attention(shape: AttentionShape) -> tuple[Any, Any]:
    from .attention import SIGNATURE, attention_kernel

    return attention_kernel(shape), SIGNATURE


def attention_spec(shape: AttentionShape, blocks: int = 1) -> KernelSpec:
    kind = "spread" if shape.spread else "whole"
    name = f"attention_{shape.head_dim}_{shape.heads}_{shape.parts}_{kind}_{blocks}"
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
