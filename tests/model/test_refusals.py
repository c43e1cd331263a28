"""Files that cannot be served: one line that says why, never another exception, a hang or a flood of memory."""

import os
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from tiny_model import Tiny, write_model

from strata_engine.model import ModelError, load_model
from strata_engine.model.header import check_header

SMALL = Tiny(vocab=20, layers=1, width=16, ff=16, heads=2, kv_heads=1, head_dim=8)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> bytes:
    return write_model(tmp_path_factory.mktemp("model") / "m.gguf", SMALL).read_bytes()


def header_size(data: bytes) -> int:
    return data.rindex(b".weight") + 64


@pytest.fixture
def refuse(tmp_path):
    """Load bytes, or a model with changes, that must be refused; returns the message."""
    path = tmp_path / "m.gguf"

    def check(data: bytes | None = None, change=None, **spec) -> str:
        if data is None:
            write_model(path, Tiny(**{"vocab": 20, "layers": 1} | spec), change)
        else:
            path.write_bytes(data)
        with pytest.raises(ModelError) as caught:
            load_model(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: ") and "\n" not in message
        return message

    return check


def test_a_whole_model_loads(tmp_path, whole):
    (tmp_path / "m.gguf").write_bytes(whole)
    assert load_model(tmp_path / "m.gguf").vocab == 20


def test_no_file(tmp_path):
    with pytest.raises(ModelError, match="No such file"):
        load_model(tmp_path / "none.gguf")


def test_a_directory(tmp_path):
    with pytest.raises(ModelError, match="directory"):
        load_model(tmp_path)


@pytest.mark.parametrize("data", [b"", b"GGU", b"PK\x03\x04" + bytes(100), b"ggml" + bytes(100)])
def test_not_gguf(refuse, data):
    assert "not a GGUF file" in refuse(data)


def test_unknown_version(refuse, whole):
    assert "version 9" in refuse(whole[:4] + struct.pack("<I", 9) + whole[8:])


def test_other_byte_order(refuse, whole):
    assert "version" in refuse(whole[:4] + struct.pack(">I", 3) + whole[8:])


def test_unknown_architecture(refuse, whole):
    assert "'gemma' is not supported" in refuse(whole.replace(b"llama", b"gemma", 1))


@pytest.mark.parametrize("name", ["token_embd", "output_norm", "blk.0.attn_k", "blk.0.ffn_norm"])
def test_missing_tensor(refuse, name):
    assert f"'{name}.weight' is missing" in refuse(change=lambda tensors: tensors.pop(f"{name}.weight"))


def test_missing_layer(refuse):
    assert "'blk.1." in refuse(metadata={"llama.block_count": 2})


def test_a_huge_number_of_layers_is_a_missing_tensor(refuse):
    assert "is missing" in refuse(metadata={"llama.block_count": 2**31 - 1})


@pytest.mark.parametrize("name", ["output.weight", "blk.0.attn_v.weight", "output_norm.weight"])
def test_wrong_shape(refuse, name):
    def cut(tensors):
        tensors[name] = tensors[name][0][..., :-1], tensors[name][1]

    assert f"'{name}' has shape" in refuse(change=cut, tied=False)


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.1.attn_norm.weight", "blk.0.ffn_gate_inp.weight"])
def test_extra_tensor(refuse, name):
    vector = np.ones(64, np.float32), gguf.GGMLQuantizationType.F32
    assert f"'{name}'" in refuse(change=lambda tensors: tensors.update({name: vector}))


def test_a_type_that_holds_no_weights(refuse):
    data = np.zeros((20, 64), np.int8)
    change = {"token_embd.weight": (data, gguf.GGMLQuantizationType.I8)}
    assert "type I8" in refuse(change=lambda tensors: tensors.update(change))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("embedding_length", 0), ("attention.head_count", 0), ("attention.head_count", 2**31), ("block_count", 0),
        ("attention.head_count_kv", 3), ("rope.dimension_count", 5), ("rope.dimension_count", 18),
        ("context_length", 0),
    ],
)  # fmt: skip
def test_numbers_that_fit_no_model(refuse, key, value):
    refuse(metadata={f"llama.{key}": value})


def test_keys_and_values_of_other_lengths(refuse):
    assert "value_length differ" in refuse(metadata={"llama.attention.value_length": 8})


def test_a_fraction_where_a_whole_number_belongs(refuse):
    assert "whole number" in refuse(scaling={"type": "yarn", "original_context_length": 512.5})


def test_unknown_rope_scaling(refuse):
    assert "'longrope' is not supported" in refuse(scaling={"type": "longrope"})


@pytest.mark.parametrize("key", ["llama.attention.head_count_kv", "tokenizer.ggml.eos_token_id"])
def test_a_list_where_a_number_belongs(refuse, key):
    assert f"'{key}' is a list" in refuse(metadata={key: [2, 2]})


def test_missing_metadata(refuse, whole):
    assert "'llama.block_count' is missing" in refuse(whole.replace(b"llama.block_count", b"llama.block_caunt"))


def test_truncated_at_any_byte(refuse, whole):
    edge = header_size(whole)
    places = {*range(4, edge, 37), *np.linspace(edge, len(whole) - 1, 40).astype(int).tolist(), len(whole) - 1}
    for length in sorted(places):
        refuse(whole[:length])


def test_tensors_that_overlap(refuse, whole):
    at = whole.index(b"blk.0.attn_k.weight") + len("blk.0.attn_k.weight") + 4 + 16 + 4
    assert "lies on another" in refuse(whole[:at] + struct.pack("<Q", 0) + whole[at + 8 :])


@pytest.mark.parametrize("block", range(4))
def test_damaged_bytes_in_the_header(tmp_path, whole, block):
    """A flipped header loads, if the flip hit a name or a harmless number, or is refused; within bounds either way."""
    rng, path = np.random.default_rng(block), tmp_path / "m.gguf"
    tracemalloc.start()
    for _ in range(75):
        data = bytearray(whole)
        for at in rng.integers(4, header_size(whole), rng.integers(1, 4)):
            data[at] ^= 1 << int(rng.integers(0, 8)) if rng.random() < 0.7 else int(rng.integers(0, 256))
        path.write_bytes(data)
        try:
            model = load_model(path)
        except ModelError as error:
            assert "\n" not in str(error)
        else:
            model.layer(0, "attn_q"), model.rope(8), model.head()
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


@pytest.mark.parametrize("count", [2**20, 2**40, 2**63, 2**64 - 1])
@pytest.mark.parametrize("place", ["tensors", "keys", "array", "string"])
def test_huge_counts(refuse, whole, place, count):
    at = {
        "tensors": 8,
        "keys": 16,
        "array": whole.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8,
        "string": whole.index(b"tokenizer.chat_template") + len("tokenizer.chat_template") + 4,
    }[place]
    assert "damaged" in refuse(whole[:at] + struct.pack("<Q", count) + whole[at + 8 :])


def test_the_header_of_a_whole_model_holds_together(whole):
    check_header(whole)


def test_a_fifo_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "m.gguf")
    with pytest.raises(ModelError, match="is not a file"):
        load_model(tmp_path / "m.gguf")
