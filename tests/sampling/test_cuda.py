"""The GPU sampler without a GPU: its kernels compile, and run right in numba's simulator; what the host writes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the CUDA packages are not installed")

from strata_engine.backends.cuda.device import compile_spec, link
from strata_engine.params import GenParams
from strata_engine.rows import Draw
from strata_engine.sampling.host import is_plain, pack, sorted_bias
from strata_engine.sampling.kernels import KERNELS, kernel_spec
from strata_engine.sampling.tables import RECORD, Shape

NOTHING = np.empty(0, np.int32)


def no_bias(bias):
    raise AssertionError("no bias was given")


@pytest.mark.parametrize("cc", [(7, 5), (8, 0), (9, 0), (12, 0)], ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_compiles(name, cc):
    ptx = compile_spec(kernel_spec(name, Shape()), cc)
    assert len(link(ptx, cc)) > 1000


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_for_unaligned_rows_compiles(name):
    assert "ld.global.L1::no_allocate.v4" not in compile_spec(kernel_spec(name, Shape(wide=False)), (9, 0))


@pytest.mark.parametrize(("seed", "rows", "vocab"), [(9, 8, 33), (2, 4, 300)])
def test_kernels_match_the_reference_in_the_simulator(seed, rows, vocab):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).with_name("simulate_cuda.py"), *map(str, (seed, rows, vocab))],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_windows_stand_end_to_end_in_fours():
    records, windows = np.zeros(3, RECORD), np.zeros(100, np.int32)
    params = GenParams(penalty_present=1.0)
    draws = [Draw(params, 0, np.arange(n, dtype=np.int32)) for n in (5, 0, 4)]
    assert pack(draws, records, windows, no_bias) == 12
    assert windows[:12].tolist() == [0, 1, 2, 3, 4, -1, -1, -1, 0, 1, 2, 3]
    assert (records["window"].tolist(), records["length"].tolist()) == ([0, 8, 8], [5, 0, 4])


def test_only_the_tail_of_a_history_is_sent():
    records, windows = np.zeros(1, RECORD), np.zeros(100, np.int32)
    draw = Draw(GenParams(penalty_present=1.0, penalty_last_n=2), 0, np.arange(9, dtype=np.int32))
    pack([draw], records, windows, no_bias)
    assert windows[: records["length"][0]].tolist() == [7, 8]


def test_a_history_without_penalties_is_not_sent():
    draw = Draw(GenParams(temperature=1.0, seed=1), 0, np.arange(9, dtype=np.int32))
    assert pack([draw], np.zeros(1, RECORD), np.zeros(100, np.int32), no_bias) == 0


def test_records_past_the_draws_stand_for_no_row():
    records = np.zeros(3, RECORD)
    records["keep"] = 9
    pack([Draw(GenParams(), 0, NOTHING)], records, np.zeros(100, np.int32), no_bias)
    assert records["keep"].tolist() == [1, 0, 0]


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
    records = np.zeros(1, RECORD)
    pack([Draw(params, 0, NOTHING)], records, np.zeros(100, np.int32), lambda bias: (1, 2))
    assert (records["keep"][0], records["lists"][0]) == (keep, lists)


def test_a_sampled_row_without_a_seed_is_refused():
    with pytest.raises(ValueError, match="seed"):
        pack([Draw(GenParams(temperature=1.0), 0, NOTHING)], np.zeros(1, RECORD), np.zeros(100, np.int32), no_bias)


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
