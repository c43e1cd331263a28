"""Open a GGUF file, check that it is a model we can run exactly, and hand out its tensors one at a time."""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import gguf
import numpy as np

from ..rows import Float32
from .geometry import Geometry, RopeScaling, rope_table
from .header import HeaderError, check_header, list_size
from .repack import Matrix, exact, readable, repack

log = logging.getLogger(__name__)

ARCHITECTURES = ("llama",)
_LAYER_VECTORS = ("attn_norm", "ffn_norm")
_OPTIONAL = ("output.weight", "rope_freqs.weight")
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_LARGEST = 2**31  # metadata numbers stay below


class ModelError(Exception):
    """The file cannot be served; the message is one line that names the file and the reason."""


class _Reader(gguf.GGUFReader):
    """The library's reader, with lists left unread: it makes several objects of each of a vocabulary's entries (a
    second and 60 MB for 49,152 tokens), and the engine needs none of them."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        return list_size(self.data, orig_offs), [], [], [gguf.GGUFValueType.ARRAY]


@dataclass(slots=True)
class Model:
    """A checked model file. Tensors are read from the memory-mapped file when asked for."""

    path: str
    geometry: Geometry
    bos: int | None
    eos: frozenset[int]
    _tensors: dict[str, gguf.ReaderTensor] = field(repr=False)

    @property
    def arch(self) -> str:
        return self.geometry.arch

    @property
    def vocab(self) -> int:
        return self.geometry.vocab

    @property
    def context_length(self) -> int:
        return self.geometry.context_length

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """(GGUF type, rows, columns) of every matrix in the file."""
        for tensor in self._tensors.values():
            if len(tensor.shape) == 2:
                columns, rows = (int(n) for n in tensor.shape)
                yield tensor.tensor_type.name, rows, columns

    def matrix(self, name: str) -> Matrix:
        """The tensor `name`.weight as integer codes, e.g. ``matrix("blk.0.attn_q")``."""
        tensor = self._tensors[name + ".weight"]
        return repack(name, tensor.tensor_type, tensor.data, int(tensor.shape[0]))

    def layer(self, index: int, name: str) -> Matrix:
        return self.matrix(f"blk.{index}.{name}")

    def embedding(self) -> Matrix:
        return self.matrix("token_embd")

    def head(self) -> Matrix:
        """The output matrix: the embedding itself where the model ties them."""
        return self.matrix("token_embd" if self.tied else "output")

    @property
    def tied(self) -> bool:
        return "output.weight" not in self._tensors

    def vector(self, name: str) -> Float32:
        """The one-dimensional tensor `name`.weight as float32."""
        tensor = self._tensors[name + ".weight"]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(-1)

    def rope(self, positions: int) -> tuple[Float32, Float32]:
        """Cosines and sines, each float32 [positions, rope_dims / 2]."""
        factors = self.vector("rope_freqs") if "rope_freqs.weight" in self._tensors else None
        return rope_table(self.geometry, positions, factors)


def load_model(path: str | os.PathLike[str]) -> Model:
    """Open and check a GGUF file.

    Raises ModelError where it is missing, damaged, of an unknown architecture, or has tensors that are missing, of the
    wrong shape, or that this engine would leave out of the computation.
    """
    path = os.path.abspath(path)
    try:
        reader = _open(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        geometry = _geometry(reader, tensors)
        _check_tensors(geometry, tensors)
        ends = [_token(reader, key, geometry.vocab) for key in _END_KEYS]
        bos = _token(reader, "bos_token_id", geometry.vocab)
        _tell_rounded(path, tensors)
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from None
    return Model(path, geometry, bos, frozenset(end for end in ends if end is not None), tensors)


def _open(path: str) -> gguf.GGUFReader:
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise ModelError("is a directory" if os.path.isdir(path) else "is not a file")
    try:
        with open(path, "rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError("not a GGUF file (its first four bytes are not 'GGUF')")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                check_header(data)
    except OSError as error:
        raise ModelError(error.strerror or str(error)) from None
    except HeaderError as error:
        raise ModelError(f"truncated or damaged GGUF file: {error}") from None
    try:
        return _Reader(path)
    except Exception as error:  # the reader trusts its input, so damage surfaces as whatever happens to break first
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"truncated or damaged GGUF file: {reason}") from None


def _value(reader: gguf.GGUFReader, key: str, default: Any = ...) -> Any:
    """A metadata value; ModelError where it is missing and no default is given, or does not decode."""
    entry = reader.fields.get(key)
    if entry is None:
        if default is ...:
            raise ModelError(f"metadata key '{key}' is missing")
        return default
    if entry.types[0] == gguf.GGUFValueType.ARRAY:
        raise ModelError(f"metadata key '{key}' is a list, which is not supported")
    try:
        return entry.contents()
    except Exception as error:
        raise ModelError(f"metadata key '{key}' does not decode ({error})") from None


def _token(reader: gguf.GGUFReader, key: str, vocab: int) -> int | None:
    """A token id of the metadata; None where it is missing or not one of the model's."""
    value = _value(reader, f"tokenizer.ggml.{key}", None)
    return value if isinstance(value, int) and 0 <= value < vocab else None


def _geometry(reader: gguf.GGUFReader, tensors: dict[str, gguf.ReaderTensor]) -> Geometry:
    arch = _value(reader, "general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(f"architecture {arch!r:.60} is not supported (only {', '.join(ARCHITECTURES)})")
    if "token_embd.weight" not in tensors:
        raise ModelError("tensor 'token_embd.weight' is missing")

    def number(key: str, default: Any = ..., low: float = 1) -> float:
        value = _value(reader, f"{arch}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value < _LARGEST:
            raise ModelError(f"metadata key '{arch}.{key}' has the value {value!r:.60}")
        return value

    def whole(key: str, default: Any = ..., low: int = 1) -> int:
        value = number(key, default, low)
        if not isinstance(value, int):
            raise ModelError(f"metadata key '{arch}.{key}' has the value {value!r}, which is not a whole number")
        return value

    width, heads = whole("embedding_length"), whole("attention.head_count")
    head_dim = whole("attention.key_length", width // heads)
    if whole("attention.value_length", head_dim) != head_dim:
        raise ModelError("attention.key_length and attention.value_length differ, which is not supported")
    kv_heads = whole("attention.head_count_kv", heads)
    rope_dims = whole("rope.dimension_count", head_dim)
    if heads % kv_heads or rope_dims % 2 or rope_dims > head_dim:
        raise ModelError(f"heads {heads}, kv heads {kv_heads}, rope dimensions {rope_dims} do not fit together")
    return Geometry(
        arch=arch,
        vocab=int(tensors["token_embd.weight"].shape[-1]),
        layers=whole("block_count"),
        width=width,
        ff=whole("feed_forward_length"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=whole("context_length"),
        rms_eps=float(number("attention.layer_norm_rms_epsilon", low=0)),
        rope_base=float(number("rope.freq_base", 10000.0, low=2)),
        rope_dims=rope_dims,
        rope_scaling=_rope_scaling(reader, arch, number, whole),
    )


def _rope_scaling(reader: gguf.GGUFReader, arch: str, number: Any, whole: Any) -> RopeScaling:
    kind = _value(reader, f"{arch}.rope.scaling.type", None)
    factor = float(number("rope.scaling.factor", number("rope.scale_linear", 1.0, low=1e-6), low=0))
    if kind is None:
        kind = "linear" if factor not in (0.0, 1.0) else "none"
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"rope scaling {kind!r:.60} is not supported (only none, linear, yarn)")
    return RopeScaling(
        kind,
        factor or 1.0,
        float(number("rope.scaling.attn_factor", 1.0, low=0)),
        whole("rope.scaling.original_context_length", 0, low=0),
    )


def _check_tensors(geometry: Geometry, tensors: dict[str, gguf.ReaderTensor]) -> None:
    extra = set(tensors)
    for name, shape in _expected_shapes(geometry):
        tensor = tensors.get(name)
        if tensor is None:
            if name in _OPTIONAL:
                continue
            raise ModelError(f"tensor '{name}' is missing")
        extra.discard(name)
        if tuple(int(n) for n in tensor.shape) != shape:
            raise ModelError(f"tensor '{name}' has shape {[int(n) for n in tensor.shape]}, expected {list(shape)}")
        if not readable(tensor.tensor_type):
            raise ModelError(f"tensor '{name}' has the type {tensor.tensor_type.name}, which holds no weights")
    if extra:
        raise ModelError(f"tensor {min(extra)!r} is not part of a plain llama model; leaving it out changes answers")


def _tell_rounded(path: str, tensors: dict[str, gguf.ReaderTensor]) -> None:
    """Exact weights are the rule; what cannot be kept is said."""
    rounded = sorted({t.tensor_type.name for t in tensors.values() if len(t.shape) > 1 and not exact(t.tensor_type)})
    if rounded:
        log.warning("%s: weights of type %s are rounded to half precision", path, ", ".join(rounded))


def _expected_shapes(g: Geometry) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and GGUF shape (columns first) of every tensor that the forward uses."""
    yield "token_embd.weight", (g.width, g.vocab)
    yield "output.weight", (g.width, g.vocab)
    yield "output_norm.weight", (g.width,)
    yield "rope_freqs.weight", (g.rope_dims // 2,)
    matrices = {
        "attn_q": (g.width, g.q_width),
        "attn_k": (g.width, g.kv_width),
        "attn_v": (g.width, g.kv_width),
        "attn_output": (g.q_width, g.width),
        "ffn_gate": (g.width, g.ff),
        "ffn_up": (g.width, g.ff),
        "ffn_down": (g.ff, g.width),
    }
    for layer in range(g.layers):
        for name, shape in matrices.items():
            yield f"blk.{layer}.{name}.weight", shape
        for name in _LAYER_VECTORS:
            yield f"blk.{layer}.{name}.weight", (g.width,)
