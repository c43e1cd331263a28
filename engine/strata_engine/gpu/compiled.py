"""Compiled kernels, kept on disk.

Kernels are compiled ahead of time (PTX by numba, machine code by the CUDA linker), so a second start loads them from
the cache folder and compiles nothing. None of this needs a GPU.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import multiprocessing
import os
import pathlib
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)
_ENGINE = pathlib.Path(__file__).parents[1]
KERNEL_FOLDERS = tuple(_ENGINE / part for part in ("gpu", "backends/cuda", "sampling", "selection"))  # kernels' sources


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """What it takes to compile a kernel, as plain data that a worker process can receive.

    `build()` gives (kernel function, numba signature).
    """

    name: str
    build: Callable[[], tuple[Callable[..., None], Any]]
    threads: int
    shared_bytes: int = 0
    blocks: int = 1  # blocks that are to fit on a multiprocessor: caps the registers


def cache_folder() -> pathlib.Path:
    """Where compiled kernels are kept: $STRATA_CUDA_CACHE, or strata/cuda in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or str(pathlib.Path.home() / ".cache")
    return pathlib.Path(os.environ.get("STRATA_CUDA_CACHE") or pathlib.Path(root) / "strata" / "cuda")


@functools.cache
def _versions() -> str:
    """Everything besides the spec that decides a kernel's machine code: our sources and the compilers."""
    digest = hashlib.sha256()
    for folder in KERNEL_FOLDERS:
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    for package in ("numba", "numba-cuda", "llvmlite", "cuda-core", "nvidia-nvjitlink"):
        with suppress(importlib.metadata.PackageNotFoundError):  # the last may be a part of the system
            digest.update(importlib.metadata.version(package).encode())
    return digest.hexdigest()


def cubin_path(spec: KernelSpec, cc: tuple[int, int]) -> pathlib.Path:
    key = hashlib.sha256(f"{_versions()} {spec.name} {spec.threads} {spec.blocks}".encode()).hexdigest()[:24]
    return cache_folder() / f"sm_{cc[0]}{cc[1]}" / f"{spec.name}-{key}.cubin"


def compile_spec(spec: KernelSpec, cc: tuple[int, int]) -> str:
    """The PTX of a kernel; needs no GPU."""
    from .emit import compile_ptx

    kernel, signature = spec.build()
    return compile_ptx(kernel, signature, cc, spec.threads, spec.blocks)


def link(ptx: str, cc: tuple[int, int]) -> bytes:
    """PTX -> machine code."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    options = LinkerOptions(arch=f"sm_{cc[0]}{cc[1]}")
    return bytes(Linker(ObjectCode.from_ptx(ptx.encode()), options=options).link("cubin").code)


ARGUMENTS = {
    "p": ctypes.c_uint64,
    "i": ctypes.c_int32,
    "u": ctypes.c_uint32,
    "f": ctypes.c_float,
    "l": ctypes.c_int64,
    "d": ctypes.c_double,
}


def _codes(kind: Any) -> str:
    """numba type -> one letter of ARGUMENTS for each launch argument it becomes."""
    from numba import types

    if isinstance(kind, types.BaseTuple):
        return "".join(_codes(part) for part in kind.types)  # type: ignore[attr-defined]
    if isinstance(kind, types.CPointer):
        return "p"
    return {"int32": "i", "uint32": "u", "float32": "f", "int64": "l", "float64": "d"}[kind.name]


class CacheError(RuntimeError):
    """Compiled kernels cannot be kept."""


def build_to_disk(spec: KernelSpec, cc: tuple[int, int]) -> str:
    """Compile a kernel into the cache: its argument letters, a line feed, machine code. Gives back its name.

    CacheError if the cache cannot be written.
    """
    path = cubin_path(spec, cc)
    _, signature = spec.build()
    kinds = "".join(code for argument in signature.args for code in _codes(argument))
    code = kinds.encode() + b"\n" + link(compile_spec(spec, cc), cc)
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(code)
        partial.replace(path)  # another process may read at any time
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise CacheError(f"compiled kernels cannot be kept in {path.parent}: {error.strerror}") from None
    return spec.name


def end_with_parent() -> None:
    """In a worker process: end when the process that started it does, however that ends, and leave Ctrl-C to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def build_missing(
    specs: Sequence[KernelSpec], cc: tuple[int, int], report: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Compile what the cache lacks, on all cores; `report(done, total)` after each."""
    missing = {spec.name: spec for spec in specs if not cubin_path(spec, cc).exists()}
    if not missing:
        return
    log.info("compiling %d kernels for sm_%d%d (once; kept in %s)", len(missing), *cc, cache_folder())
    workers = min(len(missing), len(os.sched_getaffinity(0)))
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context, initializer=end_with_parent) as pool:
        jobs = [pool.submit(build_to_disk, spec, cc) for spec in missing.values()]
        for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            job.result()
            report(done, len(missing))
