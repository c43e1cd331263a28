"""Devices: which one serves a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..progress import Progress
from .base import Backend
from .dump import VARIABLE, dumping

if TYPE_CHECKING:
    from ..model import Model

__all__ = ["Backend", "BackendError", "open_backend", "why_no_cuda"]

# module that may be missing -> the package that brings it
PACKAGES = {
    "cuda": "cuda-bindings",
    "cuda.bindings": "cuda-bindings",
    "cuda.core": "cuda-core",
    "numba.cuda": "numba-cuda",
}


class BackendError(Exception):
    """The device cannot serve the model; the message says what is missing and what to change."""


def open_backend(
    model: Model,
    *,
    device: str,
    context: int,
    slots: int,
    threads: int | None = None,
    kv: str = "f32",
    progress: Progress,
) -> Backend:
    """Load the model onto `device` ("auto", "cuda" or "cpu") and compile its kernels. Raises BackendError.

    With STRATA_DUMP_FIRST_LOGITS=FILE in the environment, each request's first logits are appended to FILE.
    """
    backend = _open(model, device, context, slots, threads, kv, progress)
    try:
        return dumping(backend)
    except OSError as error:
        backend.close()
        raise BackendError(f"{VARIABLE}: {error.filename}: {error.strerror}") from None


def _open(
    model: Model, device: str, context: int, slots: int, threads: int | None, kv: str, progress: Progress
) -> Backend:
    if device != "cpu" and _cuda_wanted(device):
        return _open_cuda(model, context, slots, kv, progress)
    from .cpu.backend import CpuBackend

    try:
        backend = CpuBackend(model, context=context, slots=slots, threads=threads, kv=kv, progress=progress)
        backend.warm_up(progress)
    except MemoryError:
        raise BackendError(
            f"{slots} slots of {context} cells do not fit in memory: lower --slots or --max-context, or take --kv f16"
        ) from None
    return backend


def _open_cuda(model: Model, context: int, slots: int, kv: str, progress: Progress) -> Backend:
    from ..gpu.compiled import CacheError
    from ..gpu.device import DeviceError, OutOfMemoryError
    from .cuda.backend import CudaBackend

    try:
        return CudaBackend(model, context=context, slots=slots, kv=kv, progress=progress)
    except OutOfMemoryError:
        raise BackendError(
            f"{slots} slots of {context} cells do not fit beside the model in the GPU's memory:"
            " lower --slots or --max-context, or take --kv f16"
        ) from None
    except CacheError as error:
        raise BackendError(f"{error}; set STRATA_CUDA_CACHE to a folder that can be written") from None
    except DeviceError as error:
        raise BackendError(f"the GPU cannot be used: {error}; --device cpu does without it") from error


def _cuda_wanted(device: str) -> bool:
    """True if a GPU answers. Raises BackendError where it was asked for and does not."""
    reason = why_no_cuda()
    if reason is not None and device == "cuda":
        raise BackendError(f"--device cuda: {reason}; or take --device cpu")
    return reason is None


def why_no_cuda() -> str | None:
    """None if a GPU answers and the packages that drive it are installed, else why not, in one line."""
    try:
        from ..gpu.device import why_unavailable

        reason = why_unavailable()
        if reason is None:
            from .cuda import backend  # noqa: F401
    except ImportError as error:
        package = PACKAGES.get(error.name or "", error.name)
        what = f"the Python package {package} is missing" if package else str(error)
        return f"{what}; `make setup EXTRAS=cuda,dev` installs what a GPU needs"
    return reason and f"no NVIDIA GPU answers: {reason}"
