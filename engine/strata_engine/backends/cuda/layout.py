"""Weights in the order in which the lanes of a warp read them.

A matrix [N, K] is cut into *tiles* of 16 features and *units* of 64 inputs: what one warp multiplies in one step. Lane
(g, t) = (lane // 4, lane % 4) of a warp holds, for each half unit of 32 inputs, inputs 8 t .. 8 t + 7 of the tile's
features at places g and g + 8: operand A of two m16n8k16 instructions with the inputs permuted, which costs nothing
because the activations are read with the same permutation (16 plain bytes a lane).

    codes   [tile, unit, vector, lane, 4] words    vectors: 1 (4 bit), 2 (8 bit) or 4 (16 bit)
    scales  [tile, unit, g, words]                 for each block: place g, place g + 8; then the offsets likewise

`arrange` and `arrange_scales` are plain NumPy; `restore` undoes them and is what the tests compare with.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

TILE = 16  # features a tile
UNIT = 64  # inputs a unit
LANES = 32

Codes = Literal["q4", "q8", "f16"]
Order = Literal["pairs", "halves"]


@dataclass(frozen=True, slots=True)
class Format:
    """How a matrix is stored: value = scale * (code - zero) + offset."""

    codes: Codes
    scale: Literal["none", "f16", "f32"]
    offset: bool = False
    zero: int = 0  # subtracted from the code, exactly
    block: int = 32  # inputs that share a scale: 32 or 16

    @property
    def vectors(self) -> int:
        """16-byte vectors of codes a lane and unit."""
        return {"q4": 1, "q8": 2, "f16": 4}[self.codes]

    @property
    def code_words(self) -> int:
        """32-bit words of codes a lane and unit."""
        return 4 * self.vectors

    @property
    def scale_values(self) -> int:
        """Scales (and offsets) a lane and unit: two features, each block of the unit."""
        return 0 if self.scale == "none" else 2 * (UNIT // self.block) * (2 if self.offset else 1)

    @property
    def scale_words(self) -> int:
        """32-bit words of scales a lane and unit."""
        return self.scale_values // 2 if self.scale == "f16" else self.scale_values

    @property
    def name(self) -> str:
        return f"{self.codes}_{self.scale}{'_offset' if self.offset else ''}_{self.zero}_{self.block}"


def feature_order(features: int, order: Order) -> NDArray[np.int64]:
    """Which feature stands at each place of the tiles: [N padded to 16], -1 for padding.

    "pairs": places g and g + 8 hold neighbours 2 g and 2 g + 1 (a RoPE pair; one 8-byte store).
    "halves": they hold feature g of the matrix's first half and of its second (gate and up of SwiGLU).
    """
    place = np.arange(_pad(features, TILE))
    tile, low, high = place // TILE, place % 8, place % TILE // 8
    if order == "pairs":
        feature = tile * TILE + 2 * low + high
    else:
        feature = tile * 8 + low
        feature = np.where(feature < features // 2, feature + high * (features // 2), features)
    return np.where(feature < features, feature, -1)


def _pad(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _place(values: NDArray, order: Order, width: int) -> NDArray:
    """[N, W] -> [places, width], rows in place order, zeros for what does not exist."""
    rows = feature_order(values.shape[0], order)
    out = np.zeros((len(rows), width), values.dtype)
    out[:, : values.shape[1]] = np.where(rows[:, None] >= 0, values[rows], 0)
    return out


def arrange(codes: NDArray, kind: Codes, order: Order = "pairs") -> NDArray[np.uint32]:
    """Codes [N, K] (uint8; float16 for "f16") -> words [tile, unit, vector, lane, 4]."""
    placed = _place(codes, order, _pad(codes.shape[1], UNIT))
    units = placed.shape[1] // UNIT
    # [tile, half of the tile, g, unit, half unit, t, 8] -> [tile, unit, half unit, g, t, half of the tile, 8]
    split = placed.reshape(-1, 2, 8, units, 2, 4, 8).transpose(0, 3, 4, 2, 5, 1, 6)
    shape = (split.shape[0], units)
    if kind == "q4":
        pairs = split.reshape(*split.shape[:-1], 4, 2).astype(np.uint32)
        shift = np.arange(4, dtype=np.uint32) * 4
        word = (pairs[..., 0] << shift | pairs[..., 1] << (shift + 16)).sum(-1, dtype=np.uint32)
        # [tile, unit, half unit, g, t, half of the tile] -> the four words of a lane side by side
        return np.ascontiguousarray(word.transpose(0, 1, 3, 4, 2, 5)).reshape(*shape, 1, LANES, 4)
    if kind == "q8":
        word = np.ascontiguousarray(split.astype(np.uint8)).view(np.uint32)
        return word.reshape(*shape, 2, LANES, 4)
    word = np.ascontiguousarray(split.astype(np.float16)).view(np.uint32)  # [.., half unit, g, t, half of the tile, 4]
    return np.ascontiguousarray(word.transpose(0, 1, 2, 5, 3, 4, 6)).reshape(*shape, 4, LANES, 4)


def arrange_scales(
    scale: NDArray[np.float32], offset: NDArray[np.float32] | None, form: Format, order: Order = "pairs"
) -> NDArray[np.uint32]:
    """Scales and offsets [N, K / block] -> words [tile, unit, g, words]."""
    parts = [_scale_part(values, form, order) for values in (scale, offset) if values is not None]
    joined = np.concatenate(parts, axis=-1)
    kind = np.float16 if form.scale == "f16" else np.float32
    return np.ascontiguousarray(joined.astype(kind)).view(np.uint32)


def _scale_part(values: NDArray[np.float32], form: Format, order: Order) -> NDArray[np.float32]:
    """[N, K / block] -> [tile, unit, g, blocks of a unit x 2 places]."""
    blocks = UNIT // form.block
    placed = _place(values, order, _pad(values.shape[1], blocks))
    split = placed.reshape(-1, 2, 8, placed.shape[1] // blocks, blocks).transpose(0, 3, 2, 4, 1)
    return split.reshape(*split.shape[:3], 2 * blocks)


def restore(
    codes: NDArray[np.uint32], scales: NDArray[np.uint32] | None, form: Format, order: Order, shape: tuple[int, int]
) -> NDArray[np.float32]:
    """The matrix [N, K] of float32 values that arranged codes and scales stand for."""
    tiles, units = codes.shape[:2]
    placed = _codes_in_place(codes, form.codes, tiles, units)
    if scales is not None:
        kind = np.float16 if form.scale == "f16" else np.float32
        values = scales.view(kind).astype(np.float32).reshape(tiles, units, 8, -1, UNIT // form.block, 2)
        # [tile, unit, g, kind, block, place] -> [kind, tile, place, g, unit, block]
        values = values.transpose(3, 0, 5, 2, 1, 4).reshape(values.shape[3], tiles * TILE, -1)
        values = np.repeat(values, form.block, axis=-1)
        placed = values[0] * (placed - form.zero) + (values[1] if form.offset else 0)
    rows = feature_order(shape[0], order)
    out = np.empty(shape, np.float32)
    out[rows[rows >= 0]] = placed[rows >= 0, : shape[1]]
    return out


def _codes_in_place(codes: NDArray[np.uint32], kind: Codes, tiles: int, units: int) -> NDArray[np.float32]:
    """Words [tile, unit, vector, lane, 4] -> codes [places, K padded]."""
    if kind == "q4":
        word = codes.reshape(tiles, units, 8, 4, 2, 2)  # g, t, half unit, half of the tile
        shift = np.arange(4, dtype=np.uint32) * 4
        pairs = np.stack([word[..., None] >> shift & 15, word[..., None] >> (shift + 16) & 15], axis=-1)
        split = pairs.reshape(*word.shape, 8).transpose(0, 5, 2, 1, 4, 3, 6)
    elif kind == "q8":
        split = codes.view(np.uint8).reshape(tiles, units, 2, 8, 4, 2, 8).transpose(0, 5, 3, 1, 2, 4, 6)
    else:
        split = codes.view(np.float16).reshape(tiles, units, 2, 2, 8, 4, 8).transpose(0, 3, 4, 1, 2, 5, 6)
    return split.astype(np.float32).reshape(tiles * TILE, units * UNIT)
