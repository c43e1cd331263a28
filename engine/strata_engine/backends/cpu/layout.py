"""Weights in the order in which the CPU kernels read them.

A matrix is cut into tiles of 32 output rows; a tile is a run of records, one for each block of columns:

    codes   column after column, 32 rows' codes each (4-bit: byte r holds row r low, row r + 16 high)
    scale   32 values, one a row      (quantised formats only; IEEE half where that is exact, else float32)
    offset  32 values, one a row      (only where the matrix has offsets)

so a kernel reads memory strictly forward, and the 32 rows of a column fill two vectors. All matrices of a model lie in
one arena of bytes; a matrix is an int64 descriptor with the fields below.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...model import Matrix

TILE = 32  # output rows a tile
FORMATS = ("q4", "q8", "f16", "bf16", "f32")
Q4, Q8, F16, BF16, F32 = range(5)

# Fields of a descriptor.
FORMAT, ROWS, BLOCKS, BLOCK, BASE, RECORD, CODES, HALF, OFFSETS = range(9)
FIELDS = 9
ALIGN = 64


def tiles(rows: int) -> int:
    return -(-rows // TILE)


def pad(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pack(matrix: Matrix) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The matrix as bytes [tiles * blocks * record] and its descriptor (BASE still 0).

    Rows are padded to whole tiles and columns to whole blocks with zero weights.
    """
    block, count = matrix.block, -(-matrix.cols // matrix.block)
    rows = pad(matrix.rows, TILE)
    codes = np.zeros((rows, count * block), matrix.codes.dtype)
    codes[: matrix.rows, : matrix.cols] = matrix.codes
    columns = codes.reshape(rows // TILE, TILE, count, block).transpose(0, 2, 3, 1)  # [tile, block, column, row]
    if matrix.format == "q4":
        columns = columns[..., :16] | (columns[..., 16:] << 4)
    parts = [np.ascontiguousarray(columns).view(np.uint8).reshape(rows // TILE, count, -1)]
    values = [v for v in (matrix.scale, matrix.offset) if v is not None]
    half = all(_exact_half(v) for v in values)
    for value in values:
        padded = np.zeros((rows, count), np.float16 if half else np.float32)
        padded[: matrix.rows] = value
        per_tile = padded.reshape(rows // TILE, TILE, count).transpose(0, 2, 1)
        parts.append(np.ascontiguousarray(per_tile).view(np.uint8).reshape(rows // TILE, count, -1))
    packed = np.concatenate(parts, axis=2)
    descriptor = np.zeros(FIELDS, np.int64)
    descriptor[FORMAT], descriptor[ROWS] = FORMATS.index(matrix.format), matrix.rows
    descriptor[BLOCKS], descriptor[BLOCK] = count, block
    descriptor[RECORD], descriptor[CODES] = packed.shape[2], parts[0].shape[2]
    descriptor[HALF], descriptor[OFFSETS] = half, matrix.offset is not None
    return packed.reshape(-1), descriptor


def _exact_half(values: NDArray[np.float32]) -> bool:
    """True if every value survives a round trip through IEEE half."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


class Arena:
    """Growing list of packed matrices, joined at the end into one aligned run of bytes."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.uint8]] = []
        self._size = 0

    def add(self, matrix: Matrix) -> NDArray[np.int64]:
        """Pack the matrix; returns its descriptor."""
        packed, descriptor = pack(matrix)
        descriptor[BASE] = self._size
        self._parts.append(packed)
        self._size += pad(len(packed), ALIGN)
        return descriptor

    def join(self) -> NDArray[np.uint8]:
        """All bytes, 64-byte aligned. The parts are let go as they are copied."""
        raw = np.empty(self._size + ALIGN, np.uint8)
        arena = raw[-raw.ctypes.data % ALIGN :][: self._size]
        at = 0
        while self._parts:
            part = self._parts.pop(0)
            arena[at : at + len(part)] = part
            at += pad(len(part), ALIGN)
        return arena
