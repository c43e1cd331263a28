"""Shapes and arguments of the kernels: what the host needs to plan and launch them without loading numba."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from .layout import TILE, UNIT, Format

CELLS = 64  # cells a page of the cache, and a chunk of attention
WARPS = 4  # chunks a group
THREADS = 32 * WARPS  # of an attention block


@dataclass(frozen=True, slots=True)
class SliceShape:
    """Compile-time shape of a slice kernel."""

    slices: int  # worker warps
    mt: int = 1  # tiles a warp; divides the matrix's tiles
    nt: int = 1  # groups of 8 rows
    stages: int = 8  # steps whose weights are under way
    few: bool = False  # at most 4 rows: their high and low halves share an instruction; nt is 1
    chunk: int = 1  # units a step; divides the units of every slice
    whole: bool = False  # a step is a whole slice: the activations stay in registers
    # a finishing warp has one row group; with one row group, one tile
    finishing = property(lambda self: self.mt if self.nt == 1 else self.nt)
    threads = property(lambda self: 32 * (self.slices + self.finishing))
    rows = property(lambda self: 4 if self.few else 8 * self.nt)
    values = property(lambda self: 2 if self.few else 4)  # sums of a lane, tile and row group
    part_bytes = property(lambda self: 128 * self.values * self.slices * self.mt * self.nt)
    # a power of two, so that the two sets of sums are told apart by one bit
    set_bytes = property(lambda self: 1 << (self.part_bytes - 1).bit_length())

    @property
    def name(self) -> str:
        kind = ("few" if self.few else "") + ("whole" if self.whole else "")
        return f"{self.slices}_{self.mt}_{self.nt}_{self.stages}_{self.chunk}{kind}"

    def tile_bytes(self, form: Format) -> int:
        """Bytes of a step of one tile in a ring: codes, then scales."""
        return self.chunk * (512 * form.vectors + 32 * form.scale_words)

    def slot_bytes(self, form: Format) -> int:
        return self.mt * self.tile_bytes(form)

    def shared_bytes(self, form: Format) -> int:
        return 2 * self.set_bytes + self.slices * self.stages * self.slot_bytes(form)


@dataclass(frozen=True, slots=True)
class TileShape:
    """Compile-time shape of a tile kernel: `across` warps side by side over features, `down` over rows."""

    slices: int
    mt: int = 4
    nt: int = 4
    across: int = 2
    down: int = 4
    stages: int = 3
    threads = property(lambda self: 32 * self.across * self.down)
    features = property(lambda self: TILE * self.mt * self.across)
    rows = property(lambda self: 8 * self.nt * self.down)

    def stage_bytes(self, form: Format) -> int:
        x = 2 * self.rows * UNIT * 2
        return x + self.mt * self.across * (128 * form.code_words + 32 * form.scale_words)

    def shared_bytes(self, form: Format) -> int:
        totals = 16 * self.mt * self.nt * self.threads
        return 4 * self.rows + max(totals, self.stages * self.stage_bytes(form))


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Compile-time shape: head size, query heads of a tile, parts of a cell.

    `spread`: for few rows. An operand A holds the high halves of 8 queries and below them the low ones; else the halves
    of 16 queries are two operands.
    """

    head_dim: int
    heads: int  # query heads that share a key-value head and a tile
    parts: int = 1
    spread: bool = True
    own = property(lambda self: 1 if self.spread else 2)  # queries of a lane
    queries = property(lambda self: 8 * self.own)
    rows = property(lambda self: self.queries // self.heads)  # rows a tile
    # pieces of the output (2 values of each of `own` queries) that a thread merges
    quads = property(lambda self: self.head_dim // (8 * WARPS))
    shared_bytes = property(lambda self: WARPS * self.queries * (self.head_dim + 2) * 4)
    partial_floats = property(lambda self: THREADS * 4 * self.own * self.quads)  # scratch of a tile, head and group


# -- arguments that a kernel or an epilogue takes as one tuple


class Logits(NamedTuple):
    logits: Any  # float32 [rows, vocab]
    top: Any  # float32 [rows, tiles]: the largest of each tile
    best: Any  # int32 [rows, tiles]: its index
    vocab: Any
    tiles: Any


class Swiglu(NamedTuple):
    split: Any  # halves [rows, 2, pitch]
    pitch: Any  # halves


class Residual(NamedTuple):
    stream: Any  # float32 [rows, width], added to
    gain: Any  # float32 [width]: the next norm's weight
    split: Any  # words [rows, 2, half_pitch]: stream * gain, high and low halves
    squares: Any  # float32 [rows, tiles]: sums of squares of the stream, for the next norm
    width: Any
    half_pitch: Any
    tiles: Any


class Heads(NamedTuple):
    queries: Any  # words [rows, 2, heads * cell_dim / 2], scaled for exp2
    keys: Any  # words [page, kv head, part, cell, cell_dim / 2]
    values: Any  # halves [page, kv head, part, cell_dim, cell]
    position: Any  # int32 [rows]; -1: padding
    cell: Any  # int32 [rows]: page * 64 + cell of the page, where the row's key and value go
    rope: Any  # float32 [positions, rope_dims / 2, 2]: cosine, sine
    heads: Any
    kv_heads: Any
    head_dim: Any
    cell_dim: Any  # head_dim padded to 64; the padding of queries and cells stays zero
    rope_dims: Any
    first: Any  # the matrix's first feature
    parts: Any  # 1: cells of halves; 2: high and low halves
    scale: Any  # log2(e) / sqrt(head_dim)


class Cells(NamedTuple):
    """Arguments of the attention kernel."""

    queries: Any  # words [rows, 2, heads * head_dim / 2]
    keys: Any  # words [page, kv head, part, cell, head_dim / 2]
    values: Any  # words [page, kv head, part, head_dim, cell / 2]
    position: Any  # int32 [rows]
    slot: Any  # int32 [rows]
    pages: Any  # int32 [slots, pages a slot]
    tiles: Any  # int32 [tiles, 2]: first row, rows (0: nothing to do)
    out: Any  # words [rows, 2, half_pitch]
    scratch: Any  # float32 [tile, head tile, group, quad, thread, 4]
    tickets: Any  # int32 [tile, head tile], zero before and after
    heads: Any  # query heads of the model
    kv_heads: Any
    head_dim: Any  # features of a head that are stored; the cells' own is padded to 64
    pages_a_slot: Any
    half_pitch: Any
    groups: Any  # most groups of a tile, the stride in scratch
