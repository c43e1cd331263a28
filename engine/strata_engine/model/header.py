"""Walk the header of a GGUF file and check every count, length and offset against the file's size.

The `gguf` library trusts what it reads: a damaged count makes it loop or allocate without end. This walk costs a few
milliseconds, allocates nothing and says what is wrong. Layout: docs/gguf.md of the ggml project, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

import gguf
from gguf import GGUFValueType as Value

VERSIONS = (2, 3)
_KEY_BYTES = 65535  # longest key that the format allows
_DIMENSIONS = 4
_SIZES = {
    Value.UINT8: 1, Value.INT8: 1, Value.BOOL: 1, Value.UINT16: 2, Value.INT16: 2, Value.UINT32: 4, Value.INT32: 4,
    Value.FLOAT32: 4, Value.UINT64: 8, Value.INT64: 8, Value.FLOAT64: 8,
}  # fmt: skip


class HeaderError(Exception):
    """The header does not hold together; the message says where."""


@dataclass(slots=True)
class _Cursor:
    data: mmap | bytes
    at: int = 0

    def skip(self, count: int, what: str) -> int:
        """Move over `count` bytes; returns where they began. HeaderError where the file ends before."""
        start, self.at = self.at, self.at + count
        if self.at > len(self.data):
            raise HeaderError(f"the file ends within {what}")
        return start

    def number(self, format: str, what: str) -> int:
        return struct.unpack_from("<" + format, self.data, self.skip(struct.calcsize(format), what))[0]

    def text(self, what: str) -> str:
        length = self.number("Q", what)
        if length > _KEY_BYTES:
            raise HeaderError(f"{what} has {length} bytes")
        start = self.skip(length, what)
        try:
            return self.data[start : self.at].decode()
        except UnicodeDecodeError:
            raise HeaderError(f"{what} is not UTF-8") from None


@dataclass(slots=True)
class _Tensors:
    alignment: int = gguf.GGUF_DEFAULT_ALIGNMENT
    ends: list[tuple[int, int, str]] = field(default_factory=list)  # offset, end, name


def check_header(data: mmap | bytes) -> None:
    """Raises HeaderError unless every key, array and tensor of the GGUF file lies within the file, none on another."""
    cursor, tensors = _Cursor(data, at=4), _Tensors()
    version = cursor.number("I", "the version")
    if version not in VERSIONS:
        raise HeaderError(f"version {version} is not one of {', '.join(map(str, VERSIONS))}")
    count, keys = cursor.number("Q", "the tensor count"), cursor.number("Q", "the key count")
    for _ in range(keys):
        _check_key(cursor, tensors)
    for _ in range(count):
        _check_tensor(cursor, tensors)
    _check_places(tensors, -(-cursor.at // tensors.alignment) * tensors.alignment, len(data))


def list_size(data: Any, at: int) -> int:
    """Bytes that the metadata list at byte `at` of a checked file takes, its type and count included."""
    cursor = _Cursor(data, at)
    _skip_value(cursor, Value.ARRAY, "a list")
    return cursor.at - at


def _check_key(cursor: _Cursor, tensors: _Tensors) -> None:
    key = cursor.text("a metadata key")
    kind, start = _kind(cursor, key), cursor.at
    _skip_value(cursor, kind, key)
    if key == "general.alignment":
        if kind != Value.UINT32 or (alignment := struct.unpack_from("<I", cursor.data, start)[0]).bit_count() != 1:
            raise HeaderError("general.alignment is not a power of two")
        tensors.alignment = alignment


def _kind(cursor: _Cursor, key: str) -> Value:
    number = cursor.number("I", f"the type of key {key!r}")
    try:
        return Value(number)
    except ValueError:
        raise HeaderError(f"key {key!r} has the unknown type {number}") from None


def _skip_value(cursor: _Cursor, kind: Value, key: str) -> None:
    what = f"the value of key {key!r}"
    if kind == Value.STRING:
        cursor.skip(cursor.number("Q", what), what)
    elif kind == Value.ARRAY:
        item, count = _kind(cursor, key), cursor.number("Q", what)
        if item == Value.ARRAY:
            raise HeaderError(f"{what} is an array of arrays")
        if item == Value.STRING:
            for _ in range(count):
                cursor.skip(cursor.number("Q", what), what)
        else:
            cursor.skip(count * _SIZES[item], what)
    else:
        cursor.skip(_SIZES[kind], what)


def _check_tensor(cursor: _Cursor, tensors: _Tensors) -> None:
    name = cursor.text("a tensor name")
    what = f"the description of tensor {name!r}"
    dimensions = cursor.number("I", what)
    if not 1 <= dimensions <= _DIMENSIONS:
        raise HeaderError(f"tensor {name!r} has {dimensions} dimensions")
    shape = [cursor.number("Q", what) for _ in range(dimensions)]
    number, offset = cursor.number("I", what), cursor.number("Q", what)
    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
    except (KeyError, ValueError):
        raise HeaderError(f"tensor {name!r} has the unknown type {number}") from None
    if 0 in shape or shape[0] % block:
        raise HeaderError(f"tensor {name!r} has shape {shape}, which its type cannot have")
    if offset % tensors.alignment:
        raise HeaderError(f"tensor {name!r} is not aligned to {tensors.alignment} bytes")
    tensors.ends.append((offset, offset + math.prod(shape) // block * size, name))


def _check_places(tensors: _Tensors, data_start: int, file_size: int) -> None:
    for end, start, name in _neighbours(sorted(tensors.ends)):
        if start < end:
            raise HeaderError(f"tensor {name!r} lies on another")
    for _, end, name in tensors.ends:
        if data_start + end > file_size:
            raise HeaderError(f"tensor {name!r} ends at byte {data_start + end}, the file at {file_size}")


def _neighbours(places: list[tuple[int, int, str]]) -> Iterator[tuple[int, int, str]]:
    """(where one ends, where the next starts, the next one's name)."""
    for (_, end, _), (start, _, name) in zip(places, places[1:], strict=False):
        yield end, start, name
