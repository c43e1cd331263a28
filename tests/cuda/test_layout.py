"""Lane order and back: what the device multiplies is what the file holds."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_model import AFFINE, OTHERS, Tiny, write_model

from strata_engine.backends.cuda.layout import Format, arrange, arrange_scales, feature_order, restore
from strata_engine.backends.cuda.weights import (
    Arranged,
    _say_once,
    arranged,
    encode,
    gated_matrix,
    heads_matrices,
    stored_bytes,
)
from strata_engine.model import load_model


def values(host: Arranged, order: str = "pairs") -> np.ndarray:
    return restore(host.codes, None if host.form.scale == "none" else host.scales, host.form, order, host.shape)


@pytest.mark.parametrize("order", ["pairs", "halves"])
@pytest.mark.parametrize("codes", ["q4", "q8", "f16"])
@pytest.mark.parametrize("inputs", [64, 96])
def test_every_code_comes_back(codes: str, order: str, inputs: int) -> None:
    rng = np.random.default_rng(0)
    q = rng.integers(0, 16 if codes == "q4" else 256, (48, inputs)).astype(np.float16 if codes == "f16" else np.uint8)
    scale = rng.normal(size=(48, inputs // 32)).astype(np.float16).astype(np.float32)
    form = Format(codes, "f16", zero=3)
    back = restore(arrange(q, codes, order), arrange_scales(scale, None, form, order), form, order, q.shape)
    assert np.array_equal(back, np.repeat(scale, 32, 1) * (q.astype(np.float32) - 3))


@pytest.mark.parametrize("kind", [k for k in AFFINE if k != "F32"])
def test_file_to_lane_order_keeps_every_weight(kind: str, tmp_path) -> None:
    size = 256 if kind.endswith("_K") else 64
    write_model(tmp_path / "m.gguf", Tiny(kind="Q8_0", kinds={"ffn_down": kind}, ff=size, layers=1))
    matrix = load_model(tmp_path / "m.gguf").layer(0, "ffn_down")
    expected = matrix.dequantize()
    host = arranged(encode(matrix))
    offset = host.form.offset or host.form.zero == 8
    tolerance = 1e-7 * np.abs(expected).max() if offset else 0.0  # scale * q + offset rounds once more or once less
    assert np.allclose(values(host), expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", [*AFFINE, *OTHERS])
def test_the_size_on_the_device_is_known_from_the_type(kind: str, tmp_path) -> None:
    write_model(tmp_path / "m.gguf", Tiny(kind=kind, width=256, ff=256, heads=16, layers=1))
    model = load_model(tmp_path / "m.gguf")
    host = arranged(encode(model.embedding()))
    scales = host.scales.nbytes if host.form.scale != "none" else 0
    assert next(model.matrices()) == (kind, 261, 256)
    assert stored_bytes(kind, 261, 256) == host.codes.nbytes + scales


def test_q4_0_needs_no_offsets(tmp_path) -> None:
    write_model(tmp_path / "m.gguf", Tiny(kind="Q4_0", layers=1))
    form = encode(load_model(tmp_path / "m.gguf").layer(0, "ffn_up")).form
    assert form == Format("q4", "f16", False, 8)


def test_gate_and_up_share_tiles(tmp_path) -> None:
    write_model(tmp_path / "m.gguf", Tiny(kind="Q8_0", layers=1))
    model = load_model(tmp_path / "m.gguf")
    gate, up = model.layer(0, "ffn_gate"), model.layer(0, "ffn_up")
    expected = np.concatenate([gate.dequantize(), up.dequantize()])
    assert np.array_equal(values(gated_matrix(gate, up), "halves"), expected)


def test_gate_and_up_of_two_formats_become_one(tmp_path) -> None:
    kinds = {"ffn_gate": "Q4_0", "ffn_up": "Q6_K"}
    write_model(tmp_path / "m.gguf", Tiny(kind="Q8_0", kinds=kinds, width=256, layers=1))
    model = load_model(tmp_path / "m.gguf")
    gate, up = model.layer(0, "ffn_gate"), model.layer(0, "ffn_up")
    expected = np.concatenate([gate.dequantize(), up.dequantize()])
    host = gated_matrix(gate, up)
    assert host.form.codes == "q8"
    assert np.allclose(values(host, "halves"), expected, rtol=0, atol=1e-6 * np.abs(expected).max())


def test_q_k_v_are_cut_where_the_format_changes(tmp_path) -> None:
    write_model(tmp_path / "m.gguf", Tiny(kind="Q4_1", kinds={"attn_v": "Q8_0"}, layers=1))
    model = load_model(tmp_path / "m.gguf")
    parts = heads_matrices([model.layer(0, name) for name in ("attn_q", "attn_k", "attn_v")])
    assert [(part.first, part.shape[0]) for part in parts] == [(0, 96), (96, 32)]


def test_neighbours_share_a_lane() -> None:
    order = feature_order(32, "pairs").reshape(2, 2, 8)
    assert np.array_equal(order[:, 1] - order[:, 0], np.ones((2, 8)))


def test_padding_stands_for_nothing() -> None:
    assert (feature_order(261, "pairs") >= 0).sum() == 261


def test_rounded_matrices_are_told_of_once(tmp_path, caplog) -> None:
    _say_once.cache_clear()
    path = tmp_path / "m.gguf"
    write_model(path, Tiny(kind="F32"))
    model = load_model(path)
    for name in ("attn_q", "attn_k"):
        encode(model.layer(0, name))
    assert [record.message for record in caplog.records if "float32" in record.message] == [
        "float32 matrices are rounded to halves with a scale for each block of 32"
    ]
