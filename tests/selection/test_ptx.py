"""The CUDA selection kernels compile for every GPU generation that is supported; no GPU is needed."""

import pytest

pytest.importorskip("numba.cuda", reason="numba-cuda is not installed")

from numba import types

from strata_engine.selection import ptx, sample, wide

if ptx.SIMULATED:
    pytest.skip("the simulator does not compile", allow_module_level=True)

INTS, TABLE = types.int32[::1], types.int32[:, ::1]
COMMON = (types.float32[:, ::1], TABLE, INTS, TABLE)
SIGNATURES = {
    "wide": (wide.wide, COMMON),
    "sample": (sample.sample, (*COMMON, INTS)),
    "window": (sample.window, (*COMMON, INTS, types.uint32[:, :, ::1], TABLE, TABLE)),
}


@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0), (12, 0)], ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
@pytest.mark.parametrize("name", SIGNATURES)
def test_kernel_compiles_to_vector_loads_and_no_local_memory(name, cc):
    kernel, signature = SIGNATURES[name]
    text = ptx.compile_ptx(kernel, signature, cc)
    assert f".target sm_{cc[0]}{cc[1]}" in text
    assert "ld.global.nc.v4.f32" in text
    assert ".local" not in text and "call.uni" not in text
