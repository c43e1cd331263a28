"""A matmul of the forward: weights on the device, an epilogue, and the kernel for each number of rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ...gpu.compiled import KernelSpec
from ...gpu.device import Device
from .layout import Format
from .plan import Limits, slice_shape, slices_of, takes_slices, tile_shape
from .shapes import SliceShape, TileShape
from .weights import Weights


def build_matmul(form: Format, shape: SliceShape | TileShape, epilogue: str) -> tuple[Any, Any]:
    """(kernel, signature) of a matmul kernel with a named epilogue."""
    from .epilogue import EPILOGUES
    from .matmul import signature
    from .slice import slice_kernel
    from .tile import tile_kernel

    prepare, finish, kind, normed = EPILOGUES[epilogue]
    if isinstance(shape, SliceShape):
        return slice_kernel(form, shape, prepare, finish, normed), signature(kind)
    return tile_kernel(form, shape, prepare, finish, normed), signature(kind)


def slice_spec(form: Format, shape: SliceShape, epilogue: str, blocks: int) -> KernelSpec:
    name = f"slice_{epilogue}_{form.name}_{shape.name}_{blocks}"
    build = functools.partial(build_matmul, form, shape, epilogue)
    return KernelSpec(name, build, shape.threads, shape.shared_bytes(form), blocks)


def tile_spec(form: Format, shape: TileShape, epilogue: str, blocks: int = 1) -> KernelSpec:
    parts = (shape.slices, shape.mt, shape.nt, shape.across, shape.down, shape.stages, blocks)
    name = f"tile_{epilogue}_{form.name}_{'_'.join(map(str, parts))}"
    build = functools.partial(build_matmul, form, shape, epilogue)
    return KernelSpec(name, build, shape.threads, shape.shared_bytes(form), blocks)


@dataclass(slots=True)
class Linear:
    """One matrix and what is done with its products."""

    weights: Weights
    epilogue: str
    limits: Limits  # of the device

    def choose(self, rows: int) -> tuple[KernelSpec, SliceShape | TileShape]:
        """The kernel for a step of `rows` rows."""
        w = self.weights
        slices = slices_of(w.units)
        if takes_slices(w.tiles, rows, self.limits):
            small, blocks = slice_shape(w.form, slices, w.tiles, w.units, rows, self.limits)
            return slice_spec(w.form, small, self.epilogue, blocks), small
        large, blocks = tile_shape(w.form, slices, w.tiles, rows, self.limits)
        return tile_spec(w.form, large, self.epilogue, blocks), large

    def run(self, device: Device, rows: int, x: Any, index: Any, norm: Any, out: Any) -> None:
        """Queue the product; arguments as in matmul.slice_kernel."""
        spec, shape = self.choose(rows)
        run = run_slice if isinstance(shape, SliceShape) else run_tile
        run(device, spec, shape, self.weights, rows, x, index, norm, out)


def run_slice(
    device: Device, spec: KernelSpec, shape: Any, w: Weights, rows: int, x: Any, index: Any, norm: Any, out: Any
) -> None:
    """Launch a slice kernel: as many blocks as fit at once, which share the tiles."""
    down = -(-rows // shape.rows)
    across = min(w.tiles // shape.mt, max(1, device.multiprocessors * spec.blocks // down))
    args = (w.codes, w.scales, x, index, rows, w.units, w.tiles, norm, out)
    device.launch(device.load(spec), (across, down), *args)


def run_tile(
    device: Device, spec: KernelSpec, shape: Any, w: Weights, rows: int, x: Any, index: Any, norm: Any, out: Any
) -> None:
    """Launch a tile kernel, a block for each tile of rows and features."""
    grid = (-(-rows // shape.rows), -(-w.tiles // (shape.mt * shape.across)))
    args = (w.codes, w.scales, x, index, rows, w.units, w.tiles, norm, out)
    device.launch(device.load(spec), grid, *args)
