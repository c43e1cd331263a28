"""numba's `njit` with a disk cache that cannot be stale.

numba looks only at the file of the function that it caches, not at the files of what the function calls. So the cache
lies in a folder named after the content of all kernel sources: edit one and everything is compiled anew. Where that
folder cannot be written, nothing is cached: numba would fall back to a folder of its own, where the cache can be stale.

Nor can it stop the engine: where numba would raise for a file that is damaged, as after a power cut, or for a disk that
is full, the kernel is compiled and the engine says so.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numba.core.config
from numba.core.caching import FunctionCache

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


@cache
def _warn_once(text: str) -> None:
    log.warning(text)


class _Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """One function's files."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """As numba has it, but what cannot be read is compiled anew and replaced."""
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # whatever unpickling a damaged file comes to
            log.warning("a cached kernel cannot be read (%s); it is compiled anew: %s", error, self._name)
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _warn_once(f"{kernel_cache()}: kernels cannot be cached: {error.strerror}")


def _cached(function: Any, options: dict[str, Any]) -> Any:
    dispatcher = numba.njit(**options)(function)
    dispatcher._cache = _Cache(function)  # what numba's enable_caching does with its own class
    return dispatcher


def _compiler() -> Callable[..., Any]:
    """numba.njit, with `cache=True` honoured only where the cache can be kept."""
    folder = kernel_cache()
    keeps = _writable(folder)
    if keeps:
        config: Any = numba.core.config
        config.CACHE_DIR = str(folder)
    else:
        log.warning("%s cannot be written: kernels will be compiled at every start (set XDG_CACHE_HOME)", folder)

    def njit(**options: Any) -> Any:
        if options.pop("cache", False) and keeps:
            return lambda function: _cached(function, options)
        return numba.njit(**options)

    return njit


njit = _compiler()
