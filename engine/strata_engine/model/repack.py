"""GGUF blocks -> integer codes with a scale and an offset per block, exactly.

Every affine GGUF type stores weights as scale * code + offset over blocks of 32 (Q6_K: 16). Splitting a tensor into
these three keeps each weight exact: the codes are small integers, and scale and offset are the float32 values that the
type itself computes with. Layouts: the block structs of ggml-common.h; bit orders as in `gguf.quants`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from ..rows import Float32

Bytes = NDArray[Any]  # uint8
Affine = tuple[NDArray, Float32, Float32 | None]  # codes [n, block], scale [n], offset [n] or None (all zero)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix [rows, cols]; row r times the activations gives output r.

    format  codes                          weight
    q4      uint8 [rows, cols], 0..15      scale * code + offset, scale and offset float32 [rows, cols / block]
    q8      int8 [rows, cols]              the same; offset is None where it is zero everywhere
    f16     uint16, IEEE half bits         the code
    bf16    uint16, the upper half bits    the code
    f32     float32                        the code
    """

    name: str
    format: str
    codes: NDArray
    scale: Float32 | None = None
    offset: Float32 | None = None
    block: int = 32

    @property
    def rows(self) -> int:
        return self.codes.shape[0]

    @property
    def cols(self) -> int:
        return self.codes.shape[1]

    def dequantize(self) -> Float32:
        """The weights as float32 [rows, cols]."""
        if self.format == "f32":
            return self.codes
        if self.format == "f16":
            return self.codes.view(np.float16).astype(np.float32)
        if self.format == "bf16":
            return (self.codes.astype(np.uint32) << 16).view(np.float32)
        assert self.scale is not None  # every quantised format has one
        blocks = self.codes.reshape(self.rows, -1, self.block).astype(np.float32) * self.scale[:, :, None]
        if self.offset is not None:
            blocks += self.offset[:, :, None]
        return blocks.reshape(self.rows, self.cols)


def readable(kind: Type) -> bool:
    """True if weights of this type can be had; I8 and its kin hold other things."""
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def exact(kind: Type) -> bool:
    """True if `repack` keeps every weight of this type, False if it rounds them to half precision."""
    return kind in _SPLITTERS or kind in (Type.F32, Type.F16, Type.BF16)


def repack(name: str, kind: Type, data: NDArray, cols: int) -> Matrix:
    """The matrix of a GGUF tensor whose raw data is `data` [rows, ...]; types that are not affine become f16."""
    rows = data.shape[0]
    if kind == Type.F32:
        return Matrix(name, "f32", np.ascontiguousarray(data, np.float32).reshape(rows, cols))
    if kind in (Type.F16, Type.BF16):
        return Matrix(name, kind.name.lower(), np.ascontiguousarray(data).view(np.uint16).reshape(rows, cols))
    if kind not in _SPLITTERS:
        values = gguf.quants.dequantize(data, kind).reshape(rows, cols).astype(np.float16)
        return Matrix(name, "f16", values.view(np.uint16))
    format, block, split = _SPLITTERS[kind]
    size = gguf.GGML_QUANT_SIZES[kind][1]
    codes, scale, offset = split(np.ascontiguousarray(data).view(np.uint8).reshape(-1, size))
    shape = (rows, cols // block)
    return Matrix(
        name,
        format,
        codes.reshape(rows, cols),
        scale.reshape(shape),
        None if offset is None else offset.reshape(shape),
        block,
    )


def _half(raw: Bytes, at: int) -> Float32:
    return np.ascontiguousarray(raw[:, at : at + 2]).view(np.float16).astype(np.float32)[:, 0]


def _nibbles(raw: Bytes) -> Bytes:
    """Low nibbles, then high nibbles: [n, b] bytes -> [n, 2b] codes."""
    return np.concatenate([raw & 15, raw >> 4], axis=1)


def _fifth_bits(raw: Bytes) -> Bytes:
    """32 packed high bits [n, 4] -> [n, 32] of 0 or 16."""
    return np.unpackbits(raw, axis=1, bitorder="little") << 4


def _q4_0(raw: Bytes) -> Affine:
    d = _half(raw, 0)
    return _nibbles(raw[:, 2:]), d, -8.0 * d


def _q4_1(raw: Bytes) -> Affine:
    return _nibbles(raw[:, 4:]), _half(raw, 0), _half(raw, 2)


def _q5_0(raw: Bytes) -> Affine:
    codes = _nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6])
    return codes.astype(np.int8) - np.int8(16), _half(raw, 0), None


def _q5_1(raw: Bytes) -> Affine:
    codes = _nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8])
    return codes.astype(np.int8), _half(raw, 0), _half(raw, 2)


def _q8_0(raw: Bytes) -> Affine:
    return raw[:, 2:].view(np.int8), _half(raw, 0), None


def _k_scales(raw: Bytes) -> tuple[Float32, Float32]:
    """Scale and minimum of the eight 32-blocks of a Q4_K / Q5_K super-block: two float32 [n * 8]."""
    packed = raw[:, 4:16]
    low, high, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([low & 63, (rest & 15) | ((low >> 6) << 4)], axis=1)
    minima = np.concatenate([high & 63, (rest >> 4) | ((high >> 6) << 4)], axis=1)
    return (_half(raw, 0)[:, None] * scales).ravel(), -(_half(raw, 2)[:, None] * minima).ravel()


def _k_nibbles(raw: Bytes) -> Bytes:
    """128 bytes of a super-block -> [n, 8, 32]: each run of 32 bytes holds two 32-blocks, low nibbles first."""
    runs = raw.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(raw: Bytes) -> Affine:
    scale, offset = _k_scales(raw)
    return _k_nibbles(raw[:, 16:]).reshape(-1, 32), scale, offset


def _q5_k(raw: Bytes) -> Affine:
    scale, offset = _k_scales(raw)
    fifth = (raw[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[None, :, None]) & 1
    codes = _k_nibbles(raw[:, 48:]) | (fifth << 4)
    return codes.reshape(-1, 32).astype(np.int8), scale, offset


def _q6_k(raw: Bytes) -> Affine:
    low = raw[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = raw[:, 128:192].reshape(-1, 2, 1, 32)
    high = (high >> np.array([0, 2, 4, 6], np.uint8)[None, None, :, None]) & 3
    codes = (low | (high << 4)).astype(np.int8) - np.int8(32)
    scale = _half(raw, 208)[:, None] * raw[:, 192:208].view(np.int8)
    return codes.reshape(-1, 16), scale.ravel(), None


_SPLITTERS: dict[Type, tuple[str, int, Callable[[Bytes], Affine]]] = {
    Type.Q4_0: ("q4", 32, _q4_0),
    Type.Q4_1: ("q4", 32, _q4_1),
    Type.Q5_0: ("q8", 32, _q5_0),
    Type.Q5_1: ("q8", 32, _q5_1),
    Type.Q8_0: ("q8", 32, _q8_0),
    Type.Q4_K: ("q4", 32, _q4_k),
    Type.Q5_K: ("q8", 32, _q5_k),
    Type.Q6_K: ("q8", 16, _q6_k),
}
