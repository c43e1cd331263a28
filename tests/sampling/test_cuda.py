"""The GPU sampler without a GPU: its kernels compile, and run right in numba's simulator; what the host writes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the CUDA packages are not installed")

from strata_engine.gpu.compiled import compile_spec, link
from strata_engine.params import GenParams
from strata_engine.rows import Draw
from strata_engine.sampling.host import Packer, is_plain, record_of, sorted_bias
from strata_engine.sampling.kernels import KERNELS, kernel_spec
from strata_engine.sampling.tables import COUNT_SHIFT, RECORD, WORDS, Shape

NOTHING = np.empty(0, np.int32)
VOCAB, SMALL = 100, Shape(threads=4, vectors=1)  # segments of 16 tokens


PRESENT = GenParams(penalty_present=1.0)


class NoMemory:
    def upload(self, values):
        raise AssertionError("no bias was given")


@pytest.fixture
def packer():
    return Packer(VOCAB, 3, SMALL, NoMemory())


def records(packer, words, rows):
    lines = words[: rows * packer.stride].reshape(rows, packer.stride)
    return np.ascontiguousarray(lines[:, :WORDS]).view(RECORD)[:, 0], lines[:, WORDS:]


def counted(packer, words, row):
    """{token: how often} as a row's entries have it."""
    starts = records(packer, words, row + 1)[1][row]
    blocks = [words[a:b] for a, b in zip(starts[:7], starts[1:8], strict=True)]
    pairs = [(16 * i + (e & 0xFFFF), e >> COUNT_SHIFT) for i, entries in enumerate(blocks) for e in entries.tolist()]
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0), (12, 0)], ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles(name, cc):
    ptx = compile_spec(kernel_spec(name, Shape()), cc)
    assert len(link(ptx, cc)) > 1000


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_for_unaligned_rows_compiles(name):
    assert "ld.global.L1::no_allocate.v4" not in compile_spec(kernel_spec(name, Shape(wide=False)), (9, 0))


@pytest.mark.parametrize(("seed", "rows", "vocab"), [(9, 8, 33), (2, 4, 300), (0, 0, 1)])
def test_kernels_match_the_reference_in_the_simulator(seed, rows, vocab):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("simulate_cuda.py"), *map(str, (seed, rows, vocab))],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_windows_are_counted_and_sorted_by_block(packer):
    words = np.full(SMALL.words(VOCAB, 3), -7, np.int32)
    histories = np.array([5, 99, 5, 16, 5], np.int32), NOTHING, np.arange(0, 100, 3, dtype=np.int32)
    used = packer.pack([Draw(PRESENT, 0, history) for history in histories], 3, words)
    assert used == 3 * packer.stride + 3 + 34
    found = [counted(packer, words, row) for row in range(3)]
    assert found == [{5: 3, 99: 1, 16: 1}, {}, dict.fromkeys(range(0, 100, 3), 1)]


def test_counts_do_not_stay(packer):
    words = np.zeros(SMALL.words(VOCAB, 1), np.int32)
    for _ in range(2):
        packer.pack([Draw(PRESENT, 0, np.array([7, 7], np.int32))], 1, words)
        assert counted(packer, words, 0) == {7: 2}


def test_only_the_tail_of_a_history_is_sent(packer):
    words = np.zeros(SMALL.words(VOCAB, 1), np.int32)
    params = GenParams(penalty_present=1.0, penalty_last_n=2)
    packer.pack([Draw(params, 0, np.arange(9, dtype=np.int32))], 1, words)
    assert counted(packer, words, 0) == {7: 1, 8: 1}


def test_a_history_without_penalties_is_not_sent(packer):
    draw = Draw(GenParams(temperature=1.0, seed=1), 0, np.arange(9, dtype=np.int32))
    words = np.full(SMALL.words(VOCAB, 1), -7, np.int32)
    assert packer.pack([draw], 1, words) == packer.stride
    assert counted(packer, words, 0) == {}


def test_a_token_that_is_not_known_yet_is_pointed_to(packer):
    words = np.zeros(SMALL.words(VOCAB, 1), np.int32)
    packer.pack([Draw(PRESENT, 0, np.array([4, -3], np.int32))], 1, words)
    assert counted(packer, words, 0) == {4: 1}
    assert records(packer, words, 1)[0]["late"].tolist() == [3]  # 1 + its row


def test_two_unknown_tokens_are_refused(packer):
    with pytest.raises(ValueError, match="more than one token"):
        packer.pack([Draw(PRESENT, 0, np.array([-1, -1], np.int32))], 1, np.zeros(SMALL.words(VOCAB, 1), np.int32))


def test_rows_past_the_draws_stand_for_no_row(packer):
    words = np.full(SMALL.words(VOCAB, 3), 9, np.int32)
    packer.pack([Draw(GenParams(), 0, NOTHING)], 3, words, first_place=5)
    found, starts = records(packer, words, 3)
    assert (found["keep"].tolist(), found["place"][0]) == ([1, 0, 0], 5)
    assert not starts.any()


def test_what_changes_from_step_to_step_is_written_anew(packer):
    params, words = GenParams(temperature=1.0, seed=2**64 - 1), np.zeros(SMALL.words(VOCAB, 1), np.int32)
    for index in (0, 2**64 - 1):
        packer.pack([Draw(params, index, NOTHING)], 1, words)
        record = records(packer, words, 1)[0][0]
        assert (int(record["seed"]), int(record["index"])) == (2**64 - 1, index)


def test_parameters_of_many_requests_are_let_go(packer):
    words = np.zeros(SMALL.words(VOCAB, 1), np.int32)
    for _ in range(200):
        packer.pack([Draw(GenParams(), 0, NOTHING)], 1, words)
    assert len(packer._kept) <= 3 + 64


@pytest.mark.parametrize(
    ("params", "keep", "lists"),
    [
        (GenParams(logprobs=7), 7, 1),
        (GenParams(logprobs=7, temperature=1.0, seed=1), 20, 1),
        (GenParams(logprobs=7, logit_bias=((1, 1.0),)), 1, 2),
        (GenParams(logprobs=0, logit_bias=((1, 1.0),)), 1, 1),
    ],
)
def test_alternatives_take_a_list_of_their_own_if_logits_are_adjusted(params, keep, lists):
    record = np.frombuffer(record_of(params), RECORD)[0]
    assert (record["keep"], record["lists"]) == (keep, lists)


def test_a_sampled_row_without_a_seed_is_refused():
    with pytest.raises(ValueError, match="seed"):
        record_of(GenParams(temperature=1.0))


def test_biases_are_sorted_and_repeated_ids_keep_their_order():
    ids, values = sorted_bias(((9, 1.0), (2, 2.0), (9, 3.0)))
    assert (ids.tolist(), values.tolist()) == ([2, 9, 9], [2.0, 1.0, 3.0])


@pytest.mark.parametrize(
    ("params", "plain"),
    [
        (GenParams(seed=1, top_p=0.5), True),
        (GenParams(temperature=0.1, seed=1), False),
        (GenParams(penalty_freq=0.1), False),
        (GenParams(penalty_freq=0.1, penalty_last_n=0), True),
        (GenParams(logit_bias=((1, 0.0),)), False),
        (GenParams(logprobs=0), False),
    ],
)
def test_only_greedy_rows_without_extras_are_plain(params, plain):
    assert is_plain([Draw(GenParams(), 0, NOTHING), Draw(params, 0, NOTHING)]) is plain
