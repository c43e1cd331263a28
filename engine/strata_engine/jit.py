"""numba's `njit` with a disk cache that cannot be stale.

numba looks only at the file of the function that it caches, not at the files of what the function calls. So the cache
lies in a folder named after the content of all our sources: edit a kernel and everything is compiled anew.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numba
import numba.core.config

_PACKAGE = Path(__file__).parent


def cache_home() -> Path:
    """The user's strata folder: $XDG_CACHE_HOME/strata or ~/.cache/strata."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strata"


def _sources_digest() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def kernel_cache() -> Path:
    """Where compiled kernels are kept: $NUMBA_CACHE_DIR where it is set."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    return Path(given) if given else cache_home() / "kernels" / _sources_digest()


_config: Any = numba.core.config
_config.CACHE_DIR = str(kernel_cache())

njit: Any = numba.njit
