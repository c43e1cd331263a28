"""Keeping the resident size near what the model needs (Linux with glibc; elsewhere nothing happens)."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_MADV_DONTNEED = 4  # of madvise(2)


def return_large_blocks() -> None:
    """Have the C library give freed arrays back to the system, instead of learning to keep them."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 16)


def drop_compiler_code() -> None:
    """Unmap the pages of LLVM's machine code, some 80 MB, after the last kernel was loaded.

    They are clean copies of the library's file: should LLVM be called again, they come back by themselves.
    """
    with suppress(AttributeError, OSError, ValueError), open("/proc/self/maps") as maps:
        for line in maps:
            addresses, permissions, *_, path = line.split()
            if permissions == "r-xp" and "libllvmlite" in path:
                begin, end = (int(address, 16) for address in addresses.split("-"))
                ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)
