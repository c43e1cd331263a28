"""Text to ids and back, against the ids that llama.cpp gives for the same files."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import gguf
import pytest

from strata_proxy.metadata import ModelFileError, read_metadata
from strata_proxy.spm import SPACE, ScoreMerger
from strata_proxy.vocab import BATCH, TextStream, Vocab

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strata"
MODEL = CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
CASES = json.loads((Path(__file__).parents[1] / "data/smollm2_tokenizer.json").read_text(encoding="utf-8"))["cases"]


@pytest.fixture(scope="module")
def smollm2() -> Vocab:
    if not MODEL.exists():
        pytest.skip(f"the default model is not in {CACHE} (make model)")
    return Vocab.load(MODEL)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:20])
def test_ids_are_those_of_the_cases(smollm2, case):
    assert smollm2.encode(case["text"], special=True) == case["ids_special"]
    assert smollm2.encode(case["text"], special=False) == case["ids_plain"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:20])
def test_text_comes_back_through_the_stream(smollm2, case):
    stream = TextStream()
    pieces = [stream.push(smollm2.piece(token, special=True)) for token in case["ids_special"]]
    assert "".join(pieces) + stream.flush() == case["text"]
    assert not any("�" in piece for piece in pieces)


def test_every_id_has_a_piece(smollm2):
    assert len(smollm2) == 49152 and all(isinstance(smollm2.piece(i, special=True), bytes) for i in range(len(smollm2)))


def test_a_text_of_many_special_tokens_is_encoded_in_batches(smollm2, monkeypatch):
    """One large call would keep every other thread waiting while it makes its results."""
    calls, encode = [], smollm2._bpe.encode_batch_fast

    class Counted:
        def encode_batch_fast(self, texts, **options):
            calls.append(len(texts))
            return encode(texts, **options)

    monkeypatch.setattr(smollm2, "_bpe", Counted())
    assert smollm2.encode("a<|im_end|>" * 5000, special=True) == [81, 2] * 5000
    assert sum(calls) == 5001 and max(calls) <= BATCH


def test_control_tokens_are_no_text(smollm2):
    assert smollm2.piece(2) == b"" and smollm2.piece(2, special=True) == b"<|im_end|>"


def test_ids_past_the_vocabulary_are_no_text(smollm2):
    assert smollm2.piece(len(smollm2) + 5) == b""


def test_metadata_is_what_the_gguf_library_reads(model):
    found, reader = read_metadata(model), gguf.GGUFReader(model)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            assert found[name] == field.contents(), name


@pytest.mark.parametrize("cut", [0, 3, 4, 20, 23, 100, 2000])
def test_truncated_files_are_refused(tmp_path, model, cut):
    file = tmp_path / "cut.gguf"
    file.write_bytes(model.read_bytes()[:cut])
    with pytest.raises(ModelFileError, match=r"cut\.gguf"):
        Vocab.load(file)


@pytest.mark.parametrize(
    "data",
    [
        b"GGML" + bytes(100),
        b"GGUF" + struct.pack("<IQQ", 99, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60),
        b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63),
        b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 4, 2**62) + bytes(64),
        b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 99),
    ],
)
def test_damaged_files_are_refused(tmp_path, data):
    file = tmp_path / "bad.gguf"
    file.write_bytes(data)
    with pytest.raises(ModelFileError):
        read_metadata(file)


def bpe(**changes):
    tokens = ["a", "b", "ab", "<x>", "<user>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 4],
        "tokenizer.ggml.merges": ["a b"],
    } | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def test_user_defined_tokens_count_always_and_control_tokens_when_asked():
    vocab = Vocab(bpe())
    assert vocab.encode("ab<user>", special=False) == [2, 4]
    assert vocab.encode("ab<x>", special=True) == [2, 3]
    assert vocab.encode("ab<x>", special=False) == [2]


def test_bos_is_added_once():
    vocab = Vocab(bpe(bos_token_id=3, add_bos_token=True))
    assert vocab.encode_prompt("ab") == [3, 2]
    assert vocab.encode_prompt("<x>ab") == [3, 2]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model": "bert"}, "bert"),
        ({"model": None}, "model"),
        ({"pre": "klingon"}, "klingon"),
        ({"merges": ["a c"]}, "damaged"),
        ({"merges": ["ab"]}, "merges"),
        ({"merges": None}, "merges"),
        ({"tokens": ["a", "a"]}, "damaged"),
        ({"token_type": [1]}, "damaged"),
        ({"model": "llama", "scores": [0.0]}, "score"),
        ({"bos_token_id": 99}, "bos_token_id"),
    ],
)
def test_vocabularies_that_cannot_be_served_are_refused(changes, word):
    with pytest.raises(ModelFileError, match=word):
        Vocab(bpe(**changes))


def spm(**changes):
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = {"▁": -9.0, "a": -8.0, "b": -7.0, "▁a": -2.0, "ab": -1.0, "▁ab": -3.0, "aa": -4.0, "aaa": -0.5, "▁▁": -5.0}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts + list(words),
        "tokenizer.ggml.scores": [0.0] * len(texts) + list(words.values()),
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(words)],
    } | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def texts_of(vocab, ids):
    return [vocab.tokens[i] for i in ids]


def test_best_score_merges_first():
    vocab = Vocab(spm())
    assert texts_of(vocab, vocab.encode("ab", special=False)) == ["▁ab"]
    assert texts_of(vocab, vocab.encode("b a", special=False)) == ["▁", "b", "▁a"]


def test_equal_texts_merge_leftmost_first():
    vocab = Vocab(spm(add_space_prefix=False))
    assert texts_of(vocab, vocab.encode("aaaaa", special=False)) == ["aaa", "aa"]


def test_unknown_characters_become_bytes():
    vocab = Vocab(spm(add_space_prefix=False))
    ids = vocab.encode("é", special=False)
    assert texts_of(vocab, ids) == ["<0xC3>", "<0xA9>"]
    assert b"".join(map(vocab.piece, ids)).decode() == "é"


def test_space_prefix_and_bos_of_score_vocabularies():
    vocab = Vocab(spm(add_bos_token=True))
    assert texts_of(vocab, vocab.encode_prompt("a</s>a")) == ["<s>", "▁a", "</s>", "▁a"]
    assert b"".join(map(vocab.piece, vocab.encode_prompt("a b"))) == b" a b"


def test_words_stand_alone_only_where_no_token_crosses_them():
    crossing = {"a": 0, SPACE: 1, f"a{SPACE}": 2}
    assert ScoreMerger(crossing, [0.0, 0.0, 1.0], [0] * 256).encode(f"a{SPACE}") == [2]


def test_incomplete_characters_wait():
    stream, data = TextStream(), "né👩".encode()
    pieces = [stream.push(bytes([byte])) for byte in data]
    assert [piece for piece in pieces if piece] == ["n", "é", "👩"] and stream.flush() == ""


def test_a_character_left_incomplete_is_replaced():
    stream = TextStream()
    assert stream.push("👩".encode()[:3]) == "" and stream.flush() == "�"


def test_bytes_that_are_no_text_are_replaced_at_once():
    assert TextStream().push(b"a\xffb") == "a�b"
