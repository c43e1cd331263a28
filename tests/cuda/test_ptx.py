"""Every kernel compiles for every GPU generation, without a GPU."""

from __future__ import annotations

import pytest

pytest.importorskip("numba.cuda", reason="needs the cuda extra")

from strata_engine.backends.cuda.layout import Format
from strata_engine.backends.cuda.linear import slice_spec, tile_spec
from strata_engine.backends.cuda.plan import argmax_spec, attention_spec, embed_spec
from strata_engine.backends.cuda.shapes import AttentionShape, SliceShape, TileShape
from strata_engine.gpu.compiled import KernelSpec, compile_spec, link

Q4_0 = Format("q4", "f16", False, 8)
Q4_1 = Format("q4", "f16", True)
Q6_K = Format("q8", "f32", False, 128, 16)
F16 = Format("f16", "none")

SPECS = [
    slice_spec(Q4_1, SliceShape(9, 1, 1, 2), "heads", 2),
    slice_spec(Q4_0, SliceShape(8, 2, 1, 4), "swiglu", 2),
    slice_spec(Q4_0, SliceShape(16, 1, 1, 4, True, 4, True), "residual", 1),
    slice_spec(Q6_K, SliceShape(4, 2, 1, 3, True, 2), "logits", 1),
    slice_spec(Q6_K, SliceShape(4, 1, 4, 2), "logits", 1),
    slice_spec(F16, SliceShape(4, 1, 2, 2), "residual", 1),
    tile_spec(Q4_0, TileShape(8, 4, 4, 2, 2, 2), "residual", 2),
    tile_spec(Q6_K, TileShape(4, 2, 2, 2, 2, 2), "swiglu", 2),
    tile_spec(Q4_1, TileShape(4, 2, 2, 2, 2, 2), "heads", 2),
    attention_spec(AttentionShape(64, 3, 2, True)),
    attention_spec(AttentionShape(128, 4, 1, False)),
    embed_spec(Q4_1),
    embed_spec(Q6_K),
    embed_spec(F16),
    argmax_spec(),
]


@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0), (12, 0)], ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_compiles_to_ptx(spec: KernelSpec, cc: tuple[int, int]) -> None:
    ptx = compile_spec(spec, cc)
    assert f".target sm_{cc[0]}{cc[1]}" in ptx
    assert "mma.sync" in ptx or not spec.name.startswith(("slice", "tile", "attention"))


def test_ptx_links_to_machine_code() -> None:
    assert link(compile_spec(argmax_spec(), (9, 0)), (9, 0))[:4] == b"\x7fELF"


def test_hopper_starts_kernels_early_and_turing_does_not() -> None:
    assert "griddepcontrol.wait" in compile_spec(argmax_spec(), (9, 0))
    assert "griddepcontrol" not in compile_spec(argmax_spec(), (8, 0))
