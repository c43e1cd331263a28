"""The key-value part of a GGUF file, without its tensors.

`gguf.GGUFReader` wraps every string of the vocabulary in NumPy views (seconds for a large one) and maps every
tensor. The proxy needs the keys alone, so this walks them once (GGUF specification, versions 2 and 3).
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from .errors import reason

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # type id -> code
STRING, ARRAY = 8, 9


class ModelFileError(Exception):
    """The model file cannot be used; the message says why, for a person."""


def read_metadata(path: Path) -> dict[str, Any]:
    """Key -> value (str, number, bool, list) of the GGUF file at `path`. Raises ModelFileError."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walker(data).metadata()
    except (OSError, ValueError, struct.error, KeyError, RecursionError, MemoryError) as error:
        why = reason(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        raise ModelFileError(f"cannot read the model file {path}: {why}") from None


class _Walker:
    """Reads forward through little-endian GGUF bytes."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def metadata(self) -> dict[str, Any]:
        if self._data[:4] != b"GGUF":
            raise ValueError("not a GGUF file")
        self._at = 4
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"GGUF version {version & 0xFFFF_FFFF} is not supported (2 and 3 are)")
        self._number("Q")  # the tensor count
        return {self._string(): self._value(self._number("I")) for _ in range(self._number("Q"))}

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        (size,) = struct.unpack_from("<Q", self._data, self._at)
        start = self._at + 8
        self._at = start + size
        if self._at > len(self._data):
            raise ValueError("the file ends inside a string")
        return self._data[start : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        return self._array() if kind == ARRAY else self._number(SCALARS[kind])

    def _array(self) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if kind in SCALARS:
            code = f"<{count}{SCALARS[kind]}"
            values = list(struct.unpack_from(code, self._data, self._at))
            self._at += struct.calcsize(code)
            return values
        return [self._value(kind) for _ in range(count)]
