"""What load_model takes from the metadata, and the rotary table."""

import math
from dataclasses import replace

import numpy as np
import pytest
from tiny_model import Tiny, write_model

from strata_engine.model import Geometry, RopeScaling, load_model, rope_table


@pytest.fixture
def load(tmp_path):
    return lambda **spec: load_model(write_model(tmp_path / "m.gguf", Tiny(**spec)))


BASE = Geometry(
    arch="llama", vocab=9, layers=1, width=64, ff=64, heads=4, kv_heads=2, head_dim=16, context_length=2048,
    rms_eps=1e-5, rope_base=10000.0, rope_dims=16,
)  # fmt: skip


def test_sizes_are_the_metadatas(load):
    g = load(vocab=300, layers=3, width=70, ff=50, heads=6, kv_heads=3, head_dim=10, context=77, rope_dims=8).geometry
    assert (g.vocab, g.layers, g.width, g.ff) == (300, 3, 70, 50)
    assert (g.heads, g.kv_heads, g.head_dim, g.rope_dims) == (6, 3, 10, 8)
    assert (g.q_width, g.kv_width, g.context_length, g.rope_base) == (60, 30, 77, 10000.0)
    assert g.rms_eps == pytest.approx(1e-5)


def test_end_ids_are_every_end_tokens(load):
    model = load(metadata={"tokenizer.ggml.eot_token_id": 7})
    assert (model.bos, model.eos) == (1, {2, 7})


@pytest.mark.parametrize("key", ["eos_token_id", "bos_token_id"])
def test_ids_outside_the_vocabulary_are_none(load, key):
    model = load(metadata={f"tokenizer.ggml.{key}": 2**32 - 1})
    assert model.bos is None if key == "bos_token_id" else model.eos == frozenset()


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_is_the_embedding_where_they_are_tied(load, tied):
    model = load(tied=tied)
    assert model.tied is tied
    assert np.array_equal(model.head().dequantize(), model.embedding().dequantize()) is tied


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({}, RopeScaling()),
        ({"type": "none", "factor": 1.0}, RopeScaling("none")),
        ({"factor": 4.0}, RopeScaling("linear", 4.0)),
        ({"type": "linear", "factor": 2.0}, RopeScaling("linear", 2.0)),
        (
            {"type": "yarn", "factor": 8.0, "attn_factor": 0.5, "original_context_length": 512},
            RopeScaling("yarn", 8.0, 0.5, 512),
        ),
    ],
)
def test_rope_scaling_keys(load, keys, scaling):
    assert load(scaling=keys).geometry.rope_scaling == scaling


def test_a_pair_turns_by_its_frequency():
    cos, sin = rope_table(BASE, 100)
    angle = 99 * 10000.0 ** (-2 * 3 / 16)
    assert (cos.shape, cos.dtype) == ((100, 8), np.float32)
    assert cos[99, 3] == pytest.approx(math.cos(angle), abs=1e-7)
    assert sin[99, 3] == pytest.approx(math.sin(angle), abs=1e-7)


def test_linear_scaling_divides_positions():
    cos, _ = rope_table(replace(BASE, rope_scaling=RopeScaling("linear", 4.0)), 33)
    assert cos[32] == pytest.approx(rope_table(BASE, 9)[0][8], abs=1e-7)


def test_factors_divide_frequencies(load):
    model = load(rope_freqs=True)
    factors = model.vector("rope_freqs").astype(np.float64)
    angle = 5 * 10000.0 ** (-2.0 * np.arange(8) / 16) / factors
    assert model.rope(6)[0][5] == pytest.approx(np.cos(angle), abs=1e-7)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    scaling = RopeScaling("yarn", 4.0, 1.0, 2048)
    cos, sin = rope_table(replace(BASE, head_dim=128, rope_dims=128, rope_scaling=scaling), 5)
    plain = 4 * 10000.0 ** (-2.0 * np.arange(64) / 128)
    magnitude = 1 + 0.1 * math.log(4)
    assert np.hypot(cos, sin) == pytest.approx(np.full((5, 64), magnitude), abs=1e-6)
    assert sin[4, 0] / magnitude == pytest.approx(math.sin(plain[0]), abs=1e-6)
    assert sin[4, 63] / magnitude == pytest.approx(math.sin(plain[63] / 4), abs=1e-6)
    assert plain[40] / 4 < math.asin(sin[4, 40] / magnitude) < plain[40]
