"""The sampler on a real GPU."""

import numpy as np
import pytest

device = pytest.importorskip("strata_engine.gpu.device", reason="the CUDA packages are not installed")

from strata_engine.params import GenParams  # noqa: E402
from strata_engine.rows import Draw  # noqa: E402
from strata_engine.sampling.cuda import CudaSampler  # noqa: E402
from strata_engine.sampling.fixtures import reference  # noqa: E402
from strata_engine.sampling.reference import choose_reference  # noqa: E402
from strata_engine.sampling.trials import SIZES, difference, trial  # noqa: E402

pytestmark = pytest.mark.skipif(device.why_unavailable() is not None, reason=f"no GPU: {device.why_unavailable()}")
NOTHING = np.empty(0, np.int32)


@pytest.fixture(scope="module")
def gpu():
    return device.Device()


def differences(sampler, logits, draws):
    found = sampler.choose(logits.copy(), draws)
    return [text for a, b in zip(found, reference(logits, draws), strict=True) if (text := difference(a, b))]


@pytest.mark.parametrize("vocab", SIZES)
def test_random_rows_are_the_references(gpu, vocab):
    logits, draws = trial(np.random.default_rng(vocab), 32, vocab)
    assert differences(CudaSampler(vocab, 32, gpu), logits, draws) == []


def test_the_number_of_tokens_kept_is_the_references(gpu):
    logits, draws = trial(np.random.default_rng(1), 32, 5000)
    sampler = CudaSampler(5000, 32, gpu)
    sampler.choose(logits.copy(), draws)
    rows = zip(logits, draws, strict=True)
    assert sampler.kept.tolist() == [choose_reference(r, d.params, d.history, d.index).kept for r, d in rows]


def captured(sampler, logits, rows):
    """A graph of the chain on the sampler's own buffers."""
    requests, chosen = sampler.requests, sampler.chosen
    with sampler.device.capture() as graph:
        sampler.capture(logits, rows, requests, chosen)
    return graph


def test_a_replayed_graph_follows_what_was_staged(gpu):
    logits = np.random.default_rng(2).standard_normal((4, 9000)).astype(np.float32)
    sampler = CudaSampler(9000, 4, gpu)
    graph = captured(sampler, gpu.upload(logits), 4)
    for step in range(20):
        params = GenParams(temperature=1.0, seed=step % 3, top_k=64, penalty_present=1.0, logprobs=step % 4)
        draws = [Draw(params, 100 * step + row, np.arange(step * row, dtype=np.int32)) for row in range(4)]
        sampler.stage(draws, 4)
        graph.launch()
        gpu.synchronize()
        right = reference(logits, draws)
        assert [difference(a, b) for a, b in zip(sampler.read(draws), right, strict=True)] == [""] * 4


def test_steps_are_queued_before_the_one_ahead_is_read(gpu):
    logits = np.random.default_rng(5).standard_normal((2, 20_000)).astype(np.float32)
    sampler = CudaSampler(20_000, 2, gpu)
    graph = captured(sampler, gpu.upload(logits), 2)
    params = GenParams(temperature=1.0, seed=1, top_k=3, penalty_repeat=2.0, penalty_freq=0.5, penalty_last_n=100)
    histories, ahead = [[7], [8, 9]], None
    for step in range(20):
        unknown = [[-1 - row] if ahead else [] for row in range(2)]  # the token that the step ahead will have chosen
        pairs = zip(histories, unknown, strict=True)
        draws = [Draw(params, step, np.array(known + new, np.int32)) for known, new in pairs]
        sampler.stage(draws, 2, step % 2)
        graph.launch()
        if ahead:
            gpu.synchronize()
            for history, draw, choice in zip(histories, ahead, sampler.read(ahead, (step - 1) % 2), strict=True):
                asked = Draw(params, draw.index, np.array(history, np.int32))
                assert choice == reference(logits[int(history[0] == 8)][None], [asked])[0]
                history.append(choice.token)
        ahead = draws


def test_greedy_rows_beside_others_have_the_arg_max(gpu):
    logits = np.random.default_rng(4).integers(-5, 5, (32, 20_001)).astype(np.float32)
    draws = [Draw(GenParams(), 0, NOTHING)] * 32
    assert [c.token for c in CudaSampler(20_001, 32, gpu).choose(logits, draws)] == logits.argmax(1).tolist()


def test_rows_past_the_draws_are_left_alone(gpu):
    logits = np.random.default_rng(3).standard_normal((8, 1000)).astype(np.float32)
    sampler = CudaSampler(1000, 8, gpu)
    draws = [Draw(GenParams(temperature=1.0, seed=1), i, NOTHING) for i in range(3)]
    sampler.stage(draws, 8)
    sampler.capture(gpu.upload(logits), 8, sampler.requests, sampler.chosen)
    gpu.synchronize()
    assert [c.token for c in sampler.read(draws)] == [c.token for c in reference(logits[:3], draws)]


def test_many_bias_lists(gpu):
    sampler, logits = CudaSampler(300, 1, gpu), np.zeros((1, 300), np.float32)
    for token in range(100):
        bias = ((token, 1.0), (token + 1, 2.0), (token, 1.5))
        assert sampler.choose(logits.copy(), [Draw(GenParams(logit_bias=bias), 0, NOTHING)])[0].token == token


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -np.inf])
def test_rows_of_one_value(gpu, value):
    logits = np.full((2, 248_320), value, np.float32)
    draws = [Draw(GenParams(temperature=1.0, seed=i, top_k=64, logprobs=20), i, NOTHING) for i in range(2)]
    assert differences(CudaSampler(248_320, 2, gpu), logits, draws) == []


def test_too_many_draws_are_refused(gpu):
    with pytest.raises(ValueError, match="2 draws"):
        CudaSampler(10, 1, gpu).stage([Draw(GenParams(), 0, NOTHING)] * 2, 1)
