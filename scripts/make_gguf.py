#!/usr/bin/env python3
"""Write a GGUF model of a named geometry with random weights: for measuring speed, not for reading its answers.

    python scripts/make_gguf.py 8b --type Q4_0 --out /tmp/8b.gguf

The same arguments give the same file. Weights are written as they are drawn, so memory stays small. Values have about
the spread of a trained model's, so that nothing overflows and logits stay apart.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import gguf
import numpy as np
from arguments import count, out_file, run
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a llama model."""

    layers: int
    width: int
    ff: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    rope_base: float
    tied: bool


GEOMETRIES = {
    "tiny": Shape(2, 128, 256, 4, 2, 32, 512, 1024, 1e4, True),
    "135m": Shape(30, 576, 1536, 9, 3, 64, 49152, 8192, 1e5, True),
    "1b": Shape(16, 2048, 8192, 32, 8, 64, 128256, 131072, 5e5, True),
    "8b": Shape(32, 4096, 14336, 32, 8, 128, 128256, 131072, 5e5, False),
}
# type -> bytes of a block of 32 and the spread of its codes' values in units of the scale
BLOCKS = {Type.Q4_0: (18, 4.6), Type.Q4_1: (20, 4.6), Type.Q8_0: (34, 73.9)}


def random_rows(rng: np.random.Generator, kind: Type, rows: int, cols: int) -> NDArray[np.uint8]:
    """Raw blocks [rows, bytes] whose values have standard deviation 1 / sqrt(cols)."""
    if kind == Type.F16:
        values = rng.standard_normal((rows, cols), np.float32) / np.float32(np.sqrt(cols))
        return values.astype(np.float16).view(np.uint8)
    size, spread = BLOCKS[kind]
    raw = rng.integers(0, 2**64, -(-rows * cols // 32 * size // 8), np.uint64).view(np.uint8)
    blocks = raw[: rows * cols // 32 * size].reshape(-1, size)
    scale = (rng.random(len(blocks), np.float32) + 0.5) / np.float32(spread * np.sqrt(cols))
    blocks[:, :2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
    if kind == Type.Q4_1:
        blocks[:, 2:4] = (-7.5 * scale).astype(np.float16).view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def matrices(shape: Shape) -> Iterator[tuple[str, int, int]]:
    """(name, rows, columns) of every matrix, in file order."""
    yield "token_embd.weight", shape.vocab, shape.width
    if not shape.tied:
        yield "output.weight", shape.vocab, shape.width
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        for name, rows, cols in (
            ("attn_q", q, shape.width),
            ("attn_k", kv, shape.width),
            ("attn_v", kv, shape.width),
            ("attn_output", shape.width, q),
            ("ffn_gate", shape.ff, shape.width),
            ("ffn_up", shape.ff, shape.width),
            ("ffn_down", shape.width, shape.ff),
        ):
            yield f"blk.{layer}.{name}.weight", rows, cols


def vectors(shape: Shape) -> Iterator[str]:
    """Names of the norm weights, all of the model's width."""
    yield "output_norm.weight"
    for layer in range(shape.layers):
        yield f"blk.{layer}.attn_norm.weight"
        yield f"blk.{layer}.ffn_norm.weight"


def add_metadata(writer: gguf.GGUFWriter, shape: Shape, kind: Type) -> None:
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(shape.vocab)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_name(f"random {kind.name}")


def write_model(path: pathlib.Path, shape: Shape, kind: Type, seed: int = 0) -> None:
    """Write the file, every matrix in the same type."""
    writer = gguf.GGUFWriter(path, "llama")
    add_metadata(writer, shape, kind)
    for name, rows, cols in matrices(shape):
        size = rows * cols * 2 if kind == Type.F16 else rows * cols // 32 * BLOCKS[kind][0]
        row_bytes = size // rows
        writer.add_tensor_info(name, (rows, row_bytes), np.dtype(np.uint8), size, raw_dtype=kind)
    for name in vectors(shape):
        writer.add_tensor_info(name, (shape.width,), np.dtype(np.float32), 4 * shape.width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for index, (_, rows, cols) in enumerate(matrices(shape)):
        writer.write_tensor_data(random_rows(np.random.default_rng((seed, index)), kind, rows, cols))
    rng = np.random.default_rng((seed, 1 << 20))
    for _ in vectors(shape):
        writer.write_tensor_data(rng.uniform(0.8, 1.2, shape.width).astype(np.float32))
    writer.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("--type", default="Q4_0", choices=["Q4_0", "Q4_1", "Q8_0", "F16"])
    parser.add_argument("--vocab", type=count(), help="vocabulary size instead of the geometry's")
    parser.add_argument("--layers", type=count(), help="layers instead of the geometry's")
    parser.add_argument("--seed", type=count(0), default=0)
    parser.add_argument("--out", type=out_file, required=True)
    args = parser.parse_args(arguments)
    shape = GEOMETRIES[args.geometry]
    shape = replace(shape, vocab=args.vocab or shape.vocab, layers=args.layers or shape.layers)
    write_model(args.out, shape, Type[args.type], args.seed)
    print(f"{args.out}: {args.out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    run(main)
