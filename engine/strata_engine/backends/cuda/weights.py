"""Matrices of a model file -> lane order on the device."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...gpu.device import Buffer, Device
from .layout import TILE, UNIT, Format, Order, arrange, arrange_scales

if TYPE_CHECKING:
    from ...model.repack import Matrix

log = logging.getLogger(__name__)
CODE_ZERO = 128  # 8-bit codes are stored as unsigned bytes


@dataclass(slots=True)
class Coded:
    """A matrix in the device's terms, in plain order."""

    form: Format
    codes: NDArray  # uint8 or float16 [N, K]
    scale: NDArray[np.float32] | None  # [N, K / block]
    offset: NDArray[np.float32] | None


@dataclass(slots=True)
class Weights:
    """A matrix [features, inputs] in lane order on the device."""

    form: Format
    features: int
    inputs: int
    codes: Buffer
    scales: Buffer
    first: int = 0  # the first feature, where a wider matrix was cut by format

    @property
    def tiles(self) -> int:
        return -(-self.features // TILE)

    @property
    def units(self) -> int:
        return -(-self.inputs // UNIT)


# what `encode` makes of a file's types, at most; those that are not here become halves
FORMS = {
    "Q4_0": Format("q4", "f16", zero=8),
    "Q4_1": Format("q4", "f16", offset=True),
    "Q4_K": Format("q4", "f32", offset=True),
    "Q5_0": Format("q8", "f16", zero=CODE_ZERO),
    "Q5_1": Format("q8", "f16", offset=True, zero=CODE_ZERO),
    "Q5_K": Format("q8", "f32", offset=True, zero=CODE_ZERO),
    "Q6_K": Format("q8", "f32", zero=CODE_ZERO, block=16),
    "Q8_0": Format("q8", "f16", zero=CODE_ZERO),
    "BF16": Format("f16", "f32"),
    "F32": Format("f16", "f32"),
}


def stored_bytes(kind: str, features: int, inputs: int) -> int:
    """Device memory of a matrix [features, inputs] of a GGUF type."""
    form = FORMS.get(kind, Format("f16", "none"))
    return -(-features // TILE) * -(-inputs // UNIT) * (512 * form.vectors + 32 * form.scale_words)


@functools.cache
def _say_once(message: str) -> None:
    log.warning(message)


def encode(matrix: Matrix) -> Coded:
    """The exact integer codes of a matrix; bf16 and f32 become halves with a power-of-two scale a block."""
    if matrix.format == "f16":
        return Coded(Format("f16", "none"), matrix.codes.view(np.float16), None, None)
    if matrix.format == "f32":
        _say_once("float32 matrices are rounded to halves with a scale for each block of 32")
    if matrix.format in ("bf16", "f32"):
        return _halves(matrix.dequantize())
    if matrix.scale is None:
        raise ValueError(f"{matrix.name}: {matrix.format} codes without scales")
    scale, offset, zero = matrix.scale, matrix.offset, 0
    codes = matrix.codes
    if matrix.format == "q8":
        codes, zero = (codes.view(np.uint8) ^ np.uint8(CODE_ZERO)), CODE_ZERO
    elif offset is not None and np.array_equal(offset, np.float32(-8.0) * scale):
        offset, zero = None, 8
    kind = "f16" if all(_fits_half(part) for part in (scale, offset) if part is not None) else "f32"
    form = Format("q4" if matrix.format == "q4" else "q8", kind, offset is not None, zero, matrix.block)  # type: ignore[arg-type]
    return Coded(form, codes, scale, offset)


def _fits_half(values: NDArray[np.float32]) -> bool:
    """True if every value is exactly a half."""
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values))


def _halves(values: NDArray[np.float32]) -> Coded:
    """float32 [N, K] -> halves whose block scale, a power of two, brings the largest to 1..2."""
    pad = -values.shape[1] % 32
    blocks = np.pad(values, ((0, 0), (0, pad))).reshape(values.shape[0], -1, 32)
    top = np.abs(blocks).max(-1)
    scale = np.where(top > 0, np.exp2(np.floor(np.log2(np.where(top > 0, top, 1)))), 1).astype(np.float32)
    codes = (blocks / scale[:, :, None]).astype(np.float16).reshape(values.shape[0], -1)
    return Coded(Format("f16", "f32"), codes[:, : values.shape[1]], scale, None)


def widen(coded: Coded, block: int) -> Coded:
    """4-bit or 8-bit codes as 8-bit codes with float32 scale and offset a block of `block` inputs: the same values."""
    form, scale = coded.form, coded.scale
    if scale is None or form.codes == "f16":
        raise ValueError("matrices of 16-bit and of integer formats cannot share a kernel")
    repeat = form.block // block
    codes = coded.codes + np.uint8(CODE_ZERO - form.zero)
    offset = np.zeros_like(scale) if coded.offset is None else coded.offset
    parts = (np.repeat(scale, repeat, axis=1), np.repeat(offset, repeat, axis=1))
    return Coded(Format("q8", "f32", True, CODE_ZERO, block), codes, *parts)


def join(parts: Sequence[Coded]) -> Coded:
    """Matrices of one format under one another."""
    first = parts[0]
    if len(parts) == 1:
        return first

    def stack(arrays: list[NDArray | None]) -> NDArray | None:
        return None if arrays[0] is None else np.concatenate([a for a in arrays if a is not None])

    codes = np.concatenate([part.codes for part in parts])
    return Coded(first.form, codes, stack([p.scale for p in parts]), stack([p.offset for p in parts]))


@dataclass(slots=True)
class Arranged:
    """A matrix in lane order on the host."""

    form: Format
    shape: tuple[int, int]
    codes: NDArray[np.uint32]
    scales: NDArray[np.uint32]
    first: int = 0


def arranged(coded: Coded, order: Order = "pairs", first: int = 0) -> Arranged:
    codes = arrange(coded.codes, coded.form.codes, order)
    scales = np.zeros(1, np.uint32)
    if coded.scale is not None:
        scales = arrange_scales(coded.scale, coded.offset, coded.form, order)
    return Arranged(coded.form, coded.codes.shape, codes, scales, first)


def heads_matrices(matrices: Sequence[Matrix]) -> list[Arranged]:
    """q, k and v under one another, cut where the format changes."""
    out, first = [], 0
    for _, run in groupby([encode(m) for m in matrices], key=lambda c: c.form):
        joined = join(list(run))
        out.append(arranged(joined, first=first))
        first += joined.codes.shape[0]
    return out


def gated_matrix(gate: Matrix, up: Matrix) -> Arranged:
    """gate and up as one matrix whose tiles hold 8 features of each."""
    parts = [encode(gate), encode(up)]
    if parts[0].form != parts[1].form:
        block = min(part.form.block for part in parts)
        parts = [widen(part, block) for part in parts]
    return arranged(join(parts), "halves")


def upload(device: Device, host: Arranged) -> Weights:
    return Weights(host.form, *host.shape, device.upload(host.codes), device.upload(host.scales), host.first)
