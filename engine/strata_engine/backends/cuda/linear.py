"""A weight matrix on the device, and which kernel multiplies it for how many rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from .device import Buffer, Device, KernelSpec
from .layout import TILE, UNIT, Format
from .shapes import SliceShape, TileShape

MAX_SLICE_ROWS = 32  # from here on the tile kernel


def build_matmul(form: Format, shape: SliceShape | TileShape, epilogue: str) -> tuple[Any, Any]:
    """(kernel, signature) of a matmul kernel with a named epilogue."""
    from .epilogue import EPILOGUES
    from .matmul import signature, slice_kernel, tile_kernel

    function, kind, normed = EPILOGUES[epilogue]
    if isinstance(shape, SliceShape):
        return slice_kernel(form, shape, function, normed), signature(kind)
    return tile_kernel(form, shape, function, normed), signature(kind)


def slice_spec(form: Format, shape: SliceShape, epilogue: str, blocks: int) -> KernelSpec:
    name = f"slice_{epilogue}_{form.name}_{shape.slices}_{shape.mt}_{shape.nt}_{shape.groups}_{shape.depth}"
    build = functools.partial(build_matmul, form, shape, epilogue)
    return KernelSpec(f"{name}_{blocks}", build, shape.threads, shape.shared_bytes, blocks)


def tile_spec(form: Format, shape: TileShape, epilogue: str, blocks: int = 1) -> KernelSpec:
    parts = (shape.slices, shape.mt, shape.nt, shape.across, shape.down, shape.stages, blocks)
    name = f"tile_{epilogue}_{form.name}_{'_'.join(map(str, parts))}"
    build = functools.partial(build_matmul, form, shape, epilogue)
    return KernelSpec(name, build, shape.threads, shape.shared_bytes(form), blocks)


@dataclass(slots=True)
class Weights:
    """A matrix [features, inputs] in lane order on the device."""

    form: Format
    features: int
    inputs: int
    codes: Buffer
    scales: Buffer

    @property
    def tiles(self) -> int:
        return -(-self.features // TILE)

    @property
    def units(self) -> int:
        return -(-self.inputs // UNIT)

    @property
    def bytes(self) -> int:
        return self.tiles * self.units * (512 * self.form.vectors + 32 * self.form.scale_words)


def run_slice(
    device: Device, spec: KernelSpec, shape: SliceShape, w: Weights, rows: int, x: Any, index: Any, norm: Any, out: Any
) -> None:
    """Launch a slice kernel."""
    down = -(-rows // shape.rows)
    across = min(-(-w.tiles // (shape.mt * shape.groups)), max(1, device.multiprocessors * spec.blocks // down))
    grid = (across, down)
    device.launch(device.load(spec), grid, w.codes, w.scales, x, index, rows, w.units, w.tiles, norm, out)


def run_tile(
    device: Device, spec: KernelSpec, shape: TileShape, w: Weights, rows: int, x: Any, index: Any, norm: Any, out: Any
) -> None:
    """Launch a tile kernel."""
    grid = (-(-rows // shape.rows), -(-w.tiles // (shape.mt * shape.across)))
    device.launch(device.load(spec), grid, w.codes, w.scales, x, index, rows, w.units, w.tiles, norm, out)
