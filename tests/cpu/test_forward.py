"""The whole forward on tiny models against the float64 reference."""

import numpy as np
import pytest
from feeding import Text, random_tokens, read
from tiny_model import AFFINE

from strata_engine.model.reference import reference_logits
from strata_engine.params import GenParams
from strata_engine.rows import Draw
from strata_engine.sampling.cpu import CpuSampler

pytestmark = pytest.mark.xdist_group("cpu")
TOLERANCE = 1e-4  # float32 leaves up to 4e-5 at logits of up to 20


def largest_error(model, backend, tokens):
    found = read(backend, Text(0, tokens))[0]
    return np.abs(found - reference_logits(model, tokens)).max()


@pytest.mark.parametrize("kind", [*AFFINE, "IQ4_XS", "Q2_K"])
def test_every_type(tiny, start, kind):
    model = tiny(kind=kind, width=256, ff=256, heads=4, kv_heads=2, head_dim=64)
    assert largest_error(model, start(model), random_tokens(70, model.vocab)) < TOLERANCE


def test_types_mixed_in_one_model(tiny, start):
    kinds = {"token_embd": "Q6_K", "attn_v": "Q8_0", "ffn_down": "Q5_1", "output": "BF16", "attn_k": "F16"}
    model = tiny(kind="Q4_K", kinds=kinds, width=256, ff=256, heads=4, kv_heads=2, head_dim=64, tied=False)
    assert largest_error(model, start(model), random_tokens(20, model.vocab)) < TOLERANCE


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (9, 3), (8, 1)])
def test_every_ratio_of_heads(tiny, start, heads, kv_heads):
    model = tiny(heads=heads, kv_heads=kv_heads)
    assert largest_error(model, start(model), random_tokens(70, model.vocab)) < TOLERANCE


@pytest.mark.parametrize("head_dim", [8, 32, 80, 96, 128])
def test_every_head_size(tiny, start, head_dim):
    model = tiny(heads=3, kv_heads=1, head_dim=head_dim)
    assert largest_error(model, start(model), random_tokens(70, model.vocab)) < TOLERANCE


@pytest.mark.parametrize(("width", "ff", "vocab"), [(1, 1, 1), (33, 31, 33), (70, 130, 100), (100, 20, 1025)])
@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_sizes_that_fill_no_block(tiny, start, width, ff, vocab, kind):
    model = tiny(width=width, ff=ff, vocab=vocab, kind=kind)
    assert largest_error(model, start(model), random_tokens(10, vocab)) < TOLERANCE


@pytest.mark.parametrize(
    "spec",
    [
        {"rope_dims": 8},
        {"rope_freqs": True},
        {"scaling": {"factor": 4.0}},
        {"scaling": {"type": "yarn", "factor": 8.0, "original_context_length": 32}},
        {"tied": False},
    ],
    ids=str,
)
def test_every_option(tiny, start, spec):
    model = tiny(**spec)
    assert largest_error(model, start(model), random_tokens(130, model.vocab)) < TOLERANCE


def test_a_text_over_many_chunks_and_segments(tiny, start):
    model = tiny(layers=1, heads=2, kv_heads=1)
    tokens = random_tokens(2100, model.vocab)
    assert largest_error(model, start(model, context=2200), tokens) < TOLERANCE


def test_cells_of_halves_are_near(tiny, start):
    model = tiny()
    tokens = random_tokens(130, model.vocab)
    error = largest_error(model, start(model, kv="f16"), tokens)
    assert TOLERANCE < error < 0.1


def test_logits_are_those_of_the_wanted_rows(tiny, start):
    model = tiny()
    tokens, backend = random_tokens(40, model.vocab), start(model)
    everything = read(backend, Text(0, tokens))[0]
    some = read(backend, Text(1, tokens, wanted=[0, 17, 39]))[0]
    assert np.array_equal(some, everything[[0, 17, 39]])


def test_a_step_may_want_nothing(tiny, start):
    model = tiny()
    backend = start(model)
    assert read(backend, Text(0, [1, 2, 3], wanted=[]))[0].size == 0
    assert backend.logits().shape == (0, model.vocab)


def test_logits_are_a_copy(tiny, start):
    model = tiny()
    backend = start(model)
    first = read(backend, Text(0, [5]))[0]
    kept = backend.logits()
    read(backend, Text(0, [6]))
    assert np.array_equal(kept, first)


@pytest.mark.parametrize("vocab", [1, 31, 33, 100])
def test_tokens_are_chosen_for_many_rows_of_any_vocabulary(tiny, start, vocab):
    model = tiny(width=32, ff=32, vocab=vocab, layers=1)
    backend = start(model)
    logits = read(backend, Text(0, random_tokens(5, vocab)))[0]
    params = [GenParams(), GenParams(temperature=1.0, seed=3), GenParams(logprobs=2), GenParams(penalty_present=1.0)]
    draws = [Draw(p, 0, np.zeros(1, np.int32)) for p in (*params, GenParams())]
    assert backend.choose(draws) == CpuSampler(vocab).choose(logits, draws)
    assert np.array_equal(backend.logits(), logits), "patched logits are restored"
