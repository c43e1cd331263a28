"""strata-engine: a language-model daemon with numba kernels and a text line protocol."""

__version__ = "0.1.0"
