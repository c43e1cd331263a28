"""The CPU kernels against the NumPy reference."""

import numpy as np
import pytest

from strata_engine.params import GenParams
from strata_engine.rows import Draw
from strata_engine.sampling.cpu import CpuSampler, choose_rows
from strata_engine.sampling.reference import choose_reference, log_softmax, top_logprobs

VOCABULARIES = [1, 31, 32, 33, 1000, 1023, 1024, 1025, 49152]


def random_row(rng, vocab):
    """Logits [vocab] with duplicates, and sometimes NaN, infinities, few values or one value only."""
    logits = (rng.standard_normal(vocab) * rng.choice([0.1, 1.0, 5.0])).astype(np.float32)
    logits[rng.integers(0, vocab, vocab // 4)] = logits[rng.integers(0, vocab, vocab // 4)]
    match rng.integers(0, 8):
        case 0:
            logits[rng.random(vocab) < rng.choice([0.3, 0.999, 1.0])] = np.nan
        case 1:
            logits[rng.random(vocab) < rng.choice([0.3, 0.999, 1.0])] = -np.inf
        case 2:
            logits[:] = np.round(logits)  # has 0.0 and -0.0
        case 3:
            logits[:] = rng.choice([0.0, -1.0, 3.0])
        case 4:
            logits[rng.integers(0, vocab, 2)] = np.inf
        case 5:
            logits.sort()
    return logits


def random_draw(rng, vocab):
    pool = rng.integers(0, vocab, 30)  # few ids, so that they come again
    last_n = int(rng.choice([0, 1, 4, 64, 4096]))
    history = rng.choice(pool, rng.integers(0, last_n + 1)).astype(np.int32)
    bias = [(int(i), float(rng.normal())) for i in rng.choice(pool, 3)] if rng.random() < 0.2 else []
    params = GenParams(
        temperature=float(rng.choice([0.0, 1e-9, 0.1, 0.7, 1.0, 1e6])),
        top_p=float(rng.choice([0.0, 0.3, 0.95, 1.0])),
        top_k=int(rng.integers(1, 65)),
        min_p=float(rng.choice([0.0, 1e-6, 0.05, 0.5, 1.0])),
        penalty_repeat=float(rng.choice([0.5, 1.0, 1.3, 1e-50])),
        penalty_freq=float(rng.choice([0.0, -0.5, 0.3])),
        penalty_present=float(rng.choice([0.0, 0.7])),
        penalty_last_n=last_n,
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        logit_bias=tuple(bias),
    )
    return Draw(params, int(rng.integers(0, 2**64, dtype=np.uint64)), history)


def batch(rng, rows, vocab, make_draw=random_draw):
    logits = np.stack([random_row(rng, vocab) for _ in range(rows)])
    return logits, [make_draw(rng, vocab) for _ in range(rows)]


def plain_row(logits, **params):
    row = np.array([logits], np.float32)
    return CpuSampler(row.shape[1]).choose(row, [Draw(GenParams(**params), 0, np.empty(0, np.int32))])[0]


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_token_and_number_kept_are_the_references(vocab):
    logits, draws = batch(np.random.default_rng(vocab), 40 if vocab > 2000 else 300, vocab)
    sampler = CpuSampler(vocab)
    found = sampler.choose(logits.copy(), draws)
    wanted = [choose_reference(row, d.params, d.history, d.index) for row, d in zip(logits, draws, strict=True)]
    assert [c.token for c in found] == [r.token for r in wanted]
    assert sampler.kept.tolist() == [r.kept for r in wanted]


@pytest.mark.parametrize("vocab", [1, 33, 1000])
def test_logits_are_as_before(vocab):
    logits, draws = batch(np.random.default_rng(1), 50, vocab)
    before = logits.tobytes()
    CpuSampler(vocab).choose(logits, draws)
    assert logits.tobytes() == before


def test_a_batch_of_32_is_32_singles_is_a_repeat():
    logits, draws = batch(np.random.default_rng(2), 32, 1000)
    for draw in draws[::2]:
        draw.params = GenParams(temperature=0.8, seed=3, logprobs=5)
    sampler = CpuSampler(1000)
    together = sampler.choose(logits, draws)
    assert together == [sampler.choose(logits[i : i + 1], [draws[i]])[0] for i in range(32)]
    assert together == sampler.choose(logits, draws)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_log_probabilities_are_those_of_the_raw_logits(vocab):
    def make_draw(rng, vocab):
        params = GenParams(logprobs=int(rng.integers(0, 21)), logit_bias=((0, 9.0),))
        return Draw(params, 0, np.empty(0, np.int32))

    logits, draws = batch(np.random.default_rng(vocab), 20, vocab, make_draw)
    for choice, row, draw in zip(CpuSampler(vocab).choose(logits, draws), logits, draws, strict=True):
        top = top_logprobs(row, draw.params.logprobs)
        assert choice.logprob == pytest.approx(log_softmax(row)[choice.token], abs=1e-12)
        assert [i for i, _ in choice.top] == [i for i, _ in top]
        assert [lp for _, lp in choice.top] == pytest.approx([lp for _, lp in top], abs=1e-12)


def test_the_chosen_token_has_the_same_log_probability_as_an_alternative():
    choice = plain_row([0.5, 2.0, -1.0], logprobs=3)
    assert dict(choice.top)[choice.token] == choice.logprob


def test_no_log_probability_unless_asked_for():
    choice = plain_row([0.5, 2.0])
    assert (choice.logprob, choice.top) == (None, ())


def test_a_window_longer_than_the_history_needed_is_its_tail():
    draw = Draw(GenParams(penalty_present=2.0, penalty_last_n=1), 0, np.array([1, 0], np.int32))
    assert CpuSampler(2).choose(np.array([[0.0, 1.0]], np.float32), [draw])[0].token == 1


def test_no_rows_no_choices():
    assert CpuSampler(4).choose(np.empty((0, 4), np.float32), []) == []


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\[1, 4\]"):
        CpuSampler(4).choose(np.zeros((1, 3), np.float32), [Draw(GenParams(), 0, np.empty(0, np.int32))])


def test_logits_with_gaps_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        CpuSampler(4).choose(np.zeros((1, 8), np.float32)[:, ::2], [Draw(GenParams(), 0, np.empty(0, np.int32))])


def test_one_compiled_signature_serves_every_request():
    CpuSampler(33).warm_up()
    CpuSampler(1000).choose(*batch(np.random.default_rng(4), 20, 1000))
    assert len(choose_rows.signatures) == 1


def test_a_sampled_row_without_a_seed_is_refused():
    with pytest.raises(ValueError, match="seed"):
        plain_row([1.0, 2.0], temperature=1.0)
