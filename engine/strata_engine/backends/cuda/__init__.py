"""The CUDA backend: numba kernels in replayed graphs."""
