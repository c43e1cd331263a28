"""The whole backend: near the CPU's float32 forward, and the same bits in any company and chunking."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tiny_model import Tiny, write_model

from strata_engine.backends.cpu.backend import CpuBackend
from strata_engine.model import load_model
from strata_engine.params import GenParams
from strata_engine.progress import NoProgress
from strata_engine.rows import Choice, Draw, Rows
from strata_engine.sampling.cpu import CpuSampler
from strata_engine.sampling.trials import difference, random_draw

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


def test_another_thread_than_the_loading_one_may_run_the_steps(backend) -> None:
    here = read_in_chunks(backend, 0, 64)
    with ThreadPoolExecutor(1) as steps:
        there = steps.submit(read_in_chunks, backend, 1, 64).result(60)
    assert np.array_equal(here, there)


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


def choose_both(backend, draws: list[Draw]) -> tuple[list[Choice], list[Choice]]:
    """The backend's choices of the last forward, and the CPU sampler's on the same logits."""
    chosen = backend.choose(draws)
    return chosen, CpuSampler(SHAPE.vocab).choose(backend.logits(), draws)


@pytest.mark.parametrize("count", [1, 3, 8, 33, 100])
def test_random_draws_are_the_cpu_samplers(backend, count: int) -> None:
    rng = np.random.default_rng(count)
    for _ in range(6):
        backend.forward(rows(0, 0, count))
        draws = [random_draw(rng, row) for row in backend.logits()]
        assert [difference(a, b) for a, b in zip(*choose_both(backend, draws), strict=True)] == [""] * count


def window_draws(request: int) -> list[Draw]:
    """The draws of a window of 8 rows: histories grow row by row, as if every draft before had been accepted."""
    kinds = (
        GenParams(),
        GenParams(temperature=0.9, top_p=0.95, min_p=0.05, penalty_repeat=1.2, seed=7, logprobs=5),
        GenParams(penalty_present=1.5, penalty_freq=0.5),
        GenParams(logprobs=3),
        GenParams(temperature=1.5, top_k=64, seed=2**64 - 1, logit_bias=((3, 2.5), (9, -4.0), (3, 1.0))),
    )
    params = kinds[request % len(kinds)]
    seen = tokens()[: 60 + 8] if params.penalised else np.empty(0, np.int32)
    return [Draw(params, 40 + i, seen[max(0, i - 4) : 60 + i]) for i in range(8)]


def test_windows_of_mixed_requests_are_the_cpu_samplers(backend) -> None:
    for slot in range(5):
        backend.forward(rows(slot, 0, 20))
    parts = [rows(slot, 20, 28) for slot in range(5)]
    backend.forward(
        Rows(*(np.concatenate([getattr(p, f) for p in parts]) for f in ("slot", "position", "token")),
             np.arange(40, dtype=np.int32))
    )  # fmt: skip
    draws = [draw for slot in range(5) for draw in window_draws(slot)]
    chosen, right = choose_both(backend, draws)
    assert [difference(a, b) for a, b in zip(chosen, right, strict=True)] == [""] * 40
    assert chosen[:8] == [Choice(int(token)) for token in backend.logits()[:8].argmax(1)]


def test_a_row_is_chosen_alike_alone_and_in_its_window(backend) -> None:
    backend.forward(rows(0, 0, 20))
    backend.forward(rows(0, 20, 28))
    together = backend.choose(window_draws(1))
    for i, draw in enumerate(window_draws(1)):
        backend.forward(rows(0, 20 + i, 21 + i))
        assert backend.choose([draw]) == [together[i]]


def test_draws_of_one_step_do_not_stay_for_the_next(backend) -> None:
    sampled = [Draw(GenParams(temperature=1.0, top_k=64, seed=5), i, np.empty(0, np.int32)) for i in range(8)]
    greedy = [Draw(GenParams(), 0, np.empty(0, np.int32))] * 4
    for draws in (sampled, greedy, sampled[:3], greedy[:1] + sampled[:1], greedy):
        backend.forward(rows(0, 0, len(draws)))
        chosen, right = choose_both(backend, draws)
        assert chosen == right


def decoded(backend, fed: bool, steps: int = 30) -> list[list[Choice]]:
    """What eight requests of all kinds choose, each from its own prompt, in another order of rows in every step.

    fed: the host takes a step's choices after it has queued the next.
    """
    slots, kinds = 8, [window_draws(kind)[0].params for kind in range(5)]
    texts = [tokens()[slot : slot + 20].tolist() for slot in range(slots)]
    choices: list[list[Choice]] = [[] for _ in range(slots)]
    under_way: list[np.ndarray] = []

    def take() -> None:
        for slot, choice in zip(under_way.pop(0), backend.take(), strict=True):
            choices[slot].append(choice)
            texts[slot][20 + len(choices[slot]) - 1] = choice.token

    def draw(slot: int, step: int) -> Draw:
        params = kinds[slot % len(kinds)]
        return Draw(params, step, np.array(texts[slot][-params.penalty_last_n :] if params.penalised else [], np.int32))

    for slot in range(slots):
        text = np.array(texts[slot][:-1], np.int32)
        where = np.arange(len(text), dtype=np.int32)
        backend.forward(Rows(np.full(len(text), slot, np.int32), where, text, where[:0]))
    for step in range(steps):
        order = np.roll(np.arange(slots, dtype=np.int32), 3 * step)
        token = np.array([texts[slot][-1] for slot in order], np.int32)
        draws = [draw(slot, step) for slot in order]
        backend.queue(Rows(order, np.full(slots, 19 + step, np.int32), token, np.arange(slots, dtype=np.int32)), draws)
        under_way.append(order)
        for row, slot in enumerate(order):
            texts[slot].append(-1 - row)
        if len(under_way) == 2 or not fed:
            take()
    while under_way:
        take()
    return choices


def test_tokens_fed_on_the_device_are_those_the_host_would_send(backend) -> None:
    fed, sent = decoded(backend, True), decoded(backend, False)
    assert fed == sent
    assert len({choice.token for row in fed for choice in row}) > 20


def test_fed_rows_beside_a_prompt(backend) -> None:
    """Steps that are not all wanted are several graphs."""
    nothing = np.empty(0, np.int32)
    for params in (GenParams(), GenParams(temperature=1.0, seed=3, penalty_present=1.0, logprobs=1)):

        def run(fed: bool, params: GenParams = params) -> list[Choice]:
            history = tokens()[:20] if params.penalised else nothing
            backend.forward(rows(0, 0, 19))
            backend.queue(rows(0, 19, 20), [Draw(params, 0, history)])
            first = [] if fed else backend.take()
            token = -1 if fed else first[0].token
            part = rows(1, 0, 40)
            both = Rows(
                np.concatenate([np.zeros(1, np.int32), part.slot]),
                np.concatenate([np.full(1, 20, np.int32), part.position]),
                np.concatenate([np.full(1, token, np.int32), part.token]),
                np.array([0, 40], np.int32),
            )
            history = np.append(history, np.int32(token)) if params.penalised else nothing
            draws = [Draw(params, 1, history), Draw(GenParams(), 0, nothing)]
            backend.queue(both, draws)
            return (backend.take() if fed else first) + backend.take()

        assert run(True) == run(False)


def test_a_step_without_wanted_rows(backend) -> None:
    backend.forward(Rows(*(np.zeros(1, np.int32) for _ in range(3)), np.empty(0, np.int32)))
    assert backend.choose([]) == []


def test_too_much_is_refused_with_advice(model) -> None:
    from strata_engine.backends import BackendError
    from strata_engine.backends.cuda.backend import CudaBackend

    with pytest.raises(BackendError, match="lower --slots or --max-context"):
        CudaBackend(model, context=1 << 20, slots=1 << 14, progress=NoProgress())
