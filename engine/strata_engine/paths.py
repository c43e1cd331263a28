"""Where strata keeps things for a user."""

from __future__ import annotations

import os
from pathlib import Path

DEFAULT_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_home() -> Path:
    """The user's strata folder: $XDG_CACHE_HOME/strata or ~/.cache/strata (/var/cache/strata without a home)."""
    given = os.environ.get("XDG_CACHE_HOME")
    if given:
        return Path(given) / "strata"
    try:
        return Path.home() / ".cache" / "strata"
    except RuntimeError:
        return Path("/var/cache/strata")


def default_model() -> Path:
    """Where `make model` puts the default model."""
    return cache_home() / DEFAULT_MODEL
