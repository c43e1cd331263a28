"""What a person reads who asks for a GPU that cannot be used."""

from __future__ import annotations

import sys

import pytest

from strata_engine import backends
from strata_engine.progress import NoProgress


@pytest.mark.parametrize(("module", "package"), [("cuda.bindings", "cuda-bindings"), ("cuda", "cuda-bindings")])
def test_a_missing_package_is_named_with_what_installs_it(monkeypatch, module: str, package: str) -> None:
    for name in [n for n in sys.modules if n.startswith(("cuda.bindings", "strata_engine.gpu."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(backends.BackendError) as caught:
        backends._cuda_wanted("cuda")
    expected = f"--device cuda: the Python package {package} is missing; `make setup EXTRAS=cuda,dev` installs"
    assert str(caught.value).startswith(expected)
    assert not backends._cuda_wanted("auto")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("OutOfMemoryError", "^4 slots of 512 cells do not fit beside the model in the GPU's memory: lower --slots"),
        ("DeviceError", "^the GPU cannot be used: CUDA: CUDA_ERROR; --device cpu does without it$"),
    ],
)
def test_a_gpu_that_fails_while_loading_is_one_line(monkeypatch, error: str, message: str) -> None:
    device = pytest.importorskip("strata_engine.gpu.device", reason="needs the cuda extra")
    backend = pytest.importorskip("strata_engine.backends.cuda.backend", reason="needs the cuda extra")

    def fail(*_, **__):
        raise getattr(device, error)("CUDA: CUDA_ERROR")

    monkeypatch.setattr(device, "why_unavailable", lambda: None)
    monkeypatch.setattr(backend, "CudaBackend", fail)
    with pytest.raises(backends.BackendError, match=message):
        backends.open_backend(None, device="cuda", context=512, slots=4, progress=NoProgress())


def test_no_gpu_is_one_line(monkeypatch) -> None:
    device = pytest.importorskip("strata_engine.gpu.device", reason="needs the cuda extra")
    monkeypatch.setattr(device, "why_unavailable", lambda: "no driver")
    with pytest.raises(
        backends.BackendError, match=r"^--device cuda: no NVIDIA GPU answers: no driver; or take --device cpu$"
    ):
        backends._cuda_wanted("cuda")
