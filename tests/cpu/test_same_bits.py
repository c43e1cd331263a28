"""A row's logits depend on the tokens before it and on nothing else, compared with ==."""

import itertools

import numpy as np
import pytest
from feeding import Text, others, random_tokens, read

pytestmark = pytest.mark.xdist_group("cpu")
QUANTISED = {"kind": "Q4_1", "heads": 6, "kv_heads": 2, "layers": 2}
LENGTH = 150


def bits(backend, chunk, company=False, slot=0, length=LENGTH, wanted=None):
    tokens = random_tokens(length, backend.vocab)
    text = Text(slot, tokens, chunk, wanted=wanted)
    beside = others(backend.vocab, {1: 5, 2: 64, 3: 1}, length) if company else []
    return read(backend, *beside[:1], text, *beside[1:])[-3 if company else 0]


@pytest.fixture(scope="module")
def expected():
    return {}


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize(
    ("chunk", "company", "threads"), list(itertools.product([1, 7, 32, 512], [False, True], [1, 2]))
)
def test_chunks_company_and_threads(tiny, start, expected, chunk, company, threads, kv):
    backend = start(tiny(**QUANTISED), threads=threads, kv=kv, max_rows=700)
    found = bits(backend, chunk, company)
    assert found.shape == (LENGTH, backend.vocab)
    assert np.array_equal(found, expected.setdefault(kv, found))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_formats(tiny, start, kind):
    backend = start(tiny(kind=kind))
    assert np.array_equal(bits(backend, 1), bits(backend, 512, slot=1))


def test_over_the_edge_of_a_segment(tiny, start):
    backend = start(tiny(layers=1, heads=2, kv_heads=1), context=2112, max_rows=600)
    wanted = range(2040, 2100)
    found = [bits(backend, chunk, slot=slot, length=2100, wanted=wanted) for slot, chunk in enumerate([512, 33, 1])]
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_beside_a_longer_context(tiny, start):
    backend = start(tiny(layers=1, heads=2, kv_heads=1), context=2112, max_rows=600)
    read(backend, *others(backend.vocab, {1: 512}, 2090))
    alone = bits(backend, 8)
    tokens = random_tokens(LENGTH, backend.vocab)
    longer = others(backend.vocab, {1: 1}, 2090)[0]
    longer.at = 2080
    assert np.array_equal(read(backend, Text(0, tokens, 16), longer)[0], alone)


def test_in_a_slot_that_held_another_text(tiny, start):
    backend = start(tiny(**QUANTISED))
    fresh = bits(backend, 32)
    read(backend, *others(backend.vocab, {0: 64}, 200))
    assert np.array_equal(bits(backend, 32), fresh)


def test_behind_a_reused_prefix(tiny, start):
    backend = start(tiny(**QUANTISED))
    whole = bits(backend, 32)
    again = read(backend, Text(0, random_tokens(LENGTH, backend.vocab), 7, at=100))[0]
    assert np.array_equal(again, whole[100:])


def test_after_drafts_that_were_refused(tiny, start):
    backend = start(tiny(**QUANTISED))
    whole, tokens = bits(backend, 32), random_tokens(LENGTH, backend.vocab)
    found = []
    for position in range(60, 70):
        window = [*tokens[: position + 1], *random_tokens(7, backend.vocab, seed=position)]
        found.append(read(backend, Text(0, window, at=position))[0][0])
    assert np.array_equal(found, whole[60:70])


def test_again(tiny, start):
    backend = start(tiny(**QUANTISED), threads=2)
    first = bits(backend, 13, company=True)
    assert all(np.array_equal(bits(backend, 13, company=True), first) for _ in range(5))
