"""Devices: which one serves a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..progress import Progress
from .base import Backend

if TYPE_CHECKING:
    from ..model import Model

__all__ = ["Backend", "BackendError", "open_backend"]


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
    """Load the model onto `device` ("auto", "cuda" or "cpu") and compile its kernels. Raises BackendError."""
    if device != "cpu" and _cuda_wanted(device):
        from .cuda.backend import CudaBackend

        return CudaBackend(model, context=context, slots=slots, kv=kv, progress=progress)
    from .cpu.backend import CpuBackend

    try:
        backend = CpuBackend(model, context=context, slots=slots, threads=threads, kv=kv, progress=progress)
        backend.warm_up(progress)
    except MemoryError:
        raise BackendError(
            f"{slots} slots of {context} cells do not fit in memory: lower --slots or --max-context, or take --kv f16"
        ) from None
    return backend


def _cuda_wanted(device: str) -> bool:
    """True if a GPU answers. Raises BackendError where it was asked for and does not."""
    try:
        from .cuda.device import why_unavailable
    except ImportError as error:
        reason: str | None = f"{error} (install the extra: pip install 'strata[cuda]')"
    else:
        reason = why_unavailable()
    if reason is not None and device == "cuda":
        raise BackendError(f"--device cuda: {reason}")
    return reason is None
