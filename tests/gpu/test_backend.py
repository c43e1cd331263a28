"""The whole backend: near the CPU's float32 forward, and the same bits in any company and chunking."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_model import Tiny, write_model

from strata_engine.backends.cpu.backend import CpuBackend
from strata_engine.model import load_model
from strata_engine.params import GenParams
from strata_engine.progress import NoProgress
from strata_engine.rows import Draw, Rows

TOKENS = 150
SHAPE = Tiny(layers=2, width=128, ff=192, heads=6, kv_heads=2, head_dim=32, kind="Q4_1", kinds={"attn_v": "Q8_0"})


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_model(path, SHAPE)
    return load_model(path)


@pytest.fixture(scope="module")
def backend(model):
    from strata_engine.backends.cuda.backend import CudaBackend

    opened = CudaBackend(model, context=512, slots=8, kv="f32", progress=NoProgress())
    yield opened
    opened.close()


def tokens() -> np.ndarray:
    return (np.arange(TOKENS, dtype=np.int32) * 37 + 5) % SHAPE.vocab


def rows(slot: int, first: int, end: int) -> Rows:
    count = end - first
    where = np.arange(count, dtype=np.int32)
    return Rows(np.full(count, slot, np.int32), first + where, tokens()[first:end], where)


def read_in_chunks(backend, slot: int, chunk: int) -> np.ndarray:
    """The logits of every token, read `chunk` rows a step."""
    out = []
    for first in range(0, TOKENS, chunk):
        backend.forward(rows(slot, first, min(first + chunk, TOKENS)))
        out.append(backend.logits())
    return np.concatenate(out)


def test_logits_are_the_cpu_backends(model, backend) -> None:
    cpu = CpuBackend(model, context=512, slots=1, kv="f32", progress=NoProgress())
    expected = read_in_chunks(cpu, 0, TOKENS)
    cpu.close()
    assert np.abs(read_in_chunks(backend, 0, TOKENS) - expected).max() < 1e-3


@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 31, 33, 64, 100])
def test_the_same_bits_in_any_chunking(backend, chunk: int) -> None:
    assert np.array_equal(read_in_chunks(backend, 1, chunk), read_in_chunks(backend, 0, TOKENS))


def test_the_same_bits_among_others(backend) -> None:
    alone = read_in_chunks(backend, 0, 1)
    slot = np.arange(8, dtype=np.int32)
    for at in range(40):
        token = np.where(slot == 3, tokens()[at], (slot * 31 + at) % SHAPE.vocab).astype(np.int32)
        backend.forward(Rows(slot, np.full(8, at, np.int32), token, slot))
        assert np.array_equal(backend.logits()[3], alone[at])


def test_a_greedy_choice_is_the_largest_logit(backend) -> None:
    backend.forward(rows(0, 0, 12))
    chosen = [choice.token for choice in backend.choose([Draw(GenParams(), 0, np.empty(0, np.int32))] * 12)]
    assert chosen == backend.logits().argmax(1).tolist()


def test_a_step_without_wanted_rows(backend) -> None:
    backend.forward(Rows(*(np.zeros(1, np.int32) for _ in range(3)), np.empty(0, np.int32)))
    assert backend.choose([]) == []


def test_too_much_is_refused_with_advice(model) -> None:
    from strata_engine.backends import BackendError
    from strata_engine.backends.cuda.backend import CudaBackend

    with pytest.raises(BackendError, match="lower --slots or --max-context"):
        CudaBackend(model, context=1 << 20, slots=1 << 14, progress=NoProgress())
