"""numba's `njit` with a disk cache that cannot be stale.

numba looks only at the file of the function that it caches, not at the files of what the function calls. So the cache
lies in a folder named after the content of all kernel sources: edit one and everything is compiled anew. Where that
folder cannot be written, nothing is cached: numba would fall back to a folder of its own, where the cache can be stale.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import numba
import numba.core.config

from .paths import cache_home

log = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parent
_KERNEL_FOLDERS = ("backends/cpu", "backends/cuda", "sampling", "selection")


def _sources_digest() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for folder in _KERNEL_FOLDERS:
        for path in sorted((_PACKAGE / folder).glob("*.py")):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def kernel_cache() -> Path:
    """Where compiled kernels are kept: $NUMBA_CACHE_DIR where it is set."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    return Path(given) if given else cache_home() / "kernels" / _sources_digest()


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def _compiler() -> Any:
    """numba.njit, with `cache=True` honoured only where the cache can be kept."""
    folder = kernel_cache()
    if _writable(folder):
        config: Any = numba.core.config
        config.CACHE_DIR = str(folder)
        return numba.njit
    log.warning("%s cannot be written: kernels will be compiled at every start (set XDG_CACHE_HOME)", folder)
    return lambda **options: numba.njit(**{**options, "cache": False})


njit = _compiler()
