"""Small GGUF models of random weights, for tests: `from tiny_model import write_model`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

# Where the IEEE half scales and minima of a block lie, for types that `gguf` cannot quantise to. Blocks of these are
# made of random bytes, and a random half may be NaN or huge.
_HALVES = {
    Type.Q2_K: (80, 82), Type.Q3_K: (108,), Type.Q4_K: (0, 2), Type.Q5_K: (0, 2), Type.Q6_K: (208,), Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,), Type.IQ2_XXS: (0,), Type.IQ2_XS: (0,), Type.IQ2_S: (0,), Type.IQ3_XXS: (0,), Type.IQ3_S: (0,),
    Type.IQ1_S: (0,),
}  # fmt: skip
AFFINE = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
OTHERS = tuple(t.name for t in _HALVES if t.name not in AFFINE)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_BYTE = len(SPECIAL)  # the token of byte b is FIRST_BYTE + b
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Tiny:
    """A model to write. `kind` is the type of every matrix; `kinds` names others, as {"ffn_down": "Q6_K"}."""

    vocab: int = 261
    layers: int = 2
    width: int = 64
    ff: int = 96
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    context: int = 4096
    kind: str = "F32"
    kinds: Mapping[str, str] = field(default_factory=dict)
    tied: bool = True
    rope_dims: int | None = None  # default: all of head_dim
    rope_freqs: bool = False
    scaling: Mapping[str, object] = field(default_factory=dict)  # as {"type": "yarn", "factor": 4.0}
    metadata: Mapping[str, object] = field(default_factory=dict)  # whole numbers or lists of them, set last
    seed: int = 0

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of every matrix, by its name in the file."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {"token_embd": (self.vocab, self.width)}
        if not self.tied:
            shapes["output"] = (self.vocab, self.width)
        for layer in range(self.layers):
            shapes |= {
                f"blk.{layer}.attn_q": (q, self.width),
                f"blk.{layer}.attn_k": (kv, self.width),
                f"blk.{layer}.attn_v": (kv, self.width),
                f"blk.{layer}.attn_output": (self.width, q),
                f"blk.{layer}.ffn_gate": (self.ff, self.width),
                f"blk.{layer}.ffn_up": (self.ff, self.width),
                f"blk.{layer}.ffn_down": (self.width, self.ff),
            }
        return shapes

    def vectors(self) -> dict[str, int]:
        """Length of every vector."""
        names = [f"blk.{layer}.{name}" for layer in range(self.layers) for name in ("attn_norm", "ffn_norm")]
        lengths = dict.fromkeys([*names, "output_norm"], self.width)
        return lengths | ({"rope_freqs": (self.rope_dims or self.head_dim) // 2} if self.rope_freqs else {})


Tensors = dict[str, tuple[NDArray, Type]]


def write_model(path: Path, tiny: Tiny | None = None, change: Callable[[Tensors], object] | None = None) -> Path:
    """Write the model to `path`, with a byte-level tokenizer and a chat template; returns the path.

    `change` may edit the tensors, {"name.weight": (raw data, type)}, before they are written.
    """
    tiny = tiny or Tiny()
    tensors = random_tensors(tiny)
    if change is not None:
        change(tensors)
    writer = gguf.GGUFWriter(path, "llama")
    _add_geometry(writer, tiny)
    _add_tokenizer(writer, tiny.vocab)
    for key, value in tiny.metadata.items():
        writer.kv_data[0].pop(key, None)
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_uint32(key, int(value))  # type: ignore[call-overload]
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=None if kind == Type.F32 else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_tensors(tiny: Tiny) -> Tensors:
    """Weights of about the sizes of a real model: activations near 1, logits of a few units; norms near 1."""
    rng = np.random.default_rng(tiny.seed)
    tensors: Tensors = {}
    for name, (rows, cols) in tiny.matrices().items():
        kind = Type[tiny.kinds.get(name.rsplit(".", 1)[-1], tiny.kind)]
        spread = (3.0 if name in ("token_embd", "output") else 1.5) / np.sqrt(cols)
        tensors[name + ".weight"] = random_blocks(rng, kind, rows, cols, spread), kind
    for name, length in tiny.vectors().items():
        tensors[name + ".weight"] = rng.uniform(0.5, 1.5, length).astype(np.float32), Type.F32
    return tensors


def random_blocks(rng: np.random.Generator, kind: Type, rows: int, cols: int, spread: float = 1.0) -> NDArray:
    """Raw data of a random matrix of a GGUF type whose weights have a standard deviation of about `spread`."""
    if kind not in _HALVES:
        values = rng.normal(0.0, spread, (rows, cols)).astype(np.float32)
        return values if kind == Type.F32 else gguf.quants.quantize(values, kind)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows * (cols // block), size), dtype=np.uint8)
    for at in _HALVES[kind]:
        scale = rng.uniform(0.5, 1.5, len(data)).astype(np.float16)
        data[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    typical = gguf.quants.dequantize(data, kind).std()
    for at in _HALVES[kind]:
        scale = rng.uniform(0.5, 1.5, len(data)) * spread / typical
        data[:, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, cols // block * size)


def _add_geometry(writer: gguf.GGUFWriter, tiny: Tiny) -> None:
    writer.add_name("tiny")
    writer.add_vocab_size(tiny.vocab)
    writer.add_block_count(tiny.layers)
    writer.add_embedding_length(tiny.width)
    writer.add_feed_forward_length(tiny.ff)
    writer.add_head_count(tiny.heads)
    writer.add_head_count_kv(tiny.kv_heads)
    writer.add_key_length(tiny.head_dim)
    writer.add_value_length(tiny.head_dim)
    writer.add_context_length(tiny.context)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(tiny.rope_dims or tiny.head_dim)
    writer.add_rope_freq_base(10000.0)
    for key, value in tiny.scaling.items():
        writer.add_key_value(f"llama.rope.scaling.{key}", value, _value_type(value))


def _value_type(value: object) -> gguf.GGUFValueType:
    types = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    return types[type(value)]


def _add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """Control tokens, one token a byte, one merge; cut to the vocabulary, or filled up with unused tokens."""
    chars = _byte_chars()
    tokens = [*SPECIAL, *chars, chars[0] + chars[1]]
    tokens += [f"<unused{i}>" for i in range(vocab - len(tokens))]
    control = [token.startswith("<") and len(token) > 1 for token in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens[:vocab])
    writer.add_token_types([gguf.TokenType.CONTROL if c else gguf.TokenType.NORMAL for c in control[:vocab]])
    writer.add_token_merges([f"{chars[0]} {chars[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _byte_chars() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's map)."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(others)) for byte in range(256)]
