"""The NumPy reference against the stored cases, and at the edges of its parameters."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from strata_engine.params import GenParams
from strata_engine.sampling.fixtures import Case
from strata_engine.sampling.reference import choose_reference, log_softmax, top_logprobs

CASES = json.loads((Path(__file__).parents[1] / "data" / "sampler.json").read_text())["cases"]
NOTHING = np.empty(0, np.int32)


def row(*logits):
    return np.array(logits, np.float32)


def choose(logits, **params):
    return choose_reference(logits, GenParams(seed=1, **params), NOTHING, 0)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_stored_case(index):
    case = Case.parse(CASES[index])
    found = choose_reference(case.logits, case.draw.params, case.draw.history, case.draw.index)
    assert (found.token, found.kept) == (case.token, case.kept or 1)
    assert case.u is None or f"{found.u:.8f}" == f"{case.u:.8f}"


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-9])
def test_tiny_temperatures_give_the_arg_max(temperature):
    assert choose(row(1, 3, 2), temperature=temperature).token == 1


def test_a_huge_temperature_is_nearly_uniform():
    picked = {choose_reference(row(0, 9), GenParams(1e6, seed=s), NOTHING, 0).token for s in range(20)}
    assert picked == {0, 1}


@pytest.mark.parametrize("top_p", [0.0, 1e-9])
def test_top_p_keeps_the_head(top_p):
    assert choose(row(1, 3, 2), temperature=1.0, top_p=top_p).kept == 1


def test_top_p_cuts_where_equal_shares_reach_it():
    assert choose(np.zeros(10, np.float32), temperature=1.0, top_p=0.9).kept == 9


def test_min_p_1_keeps_what_equals_the_head():
    assert choose(row(2, 1, 2), temperature=1.0, min_p=1.0).kept == 2


def test_tokens_at_minus_infinity_are_not_kept():
    assert choose(row(-np.inf, 1, np.nan, 0), temperature=1.0).kept == 2


@pytest.mark.parametrize("value", [-np.inf, np.nan])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_number_gives_the_lowest_id(value, temperature):
    found = choose(np.full(5, value, np.float32), temperature=temperature, top_p=0.5, min_p=0.5)
    assert (found.token, found.kept) == (0, 1)


def test_bias_comes_before_the_penalties():
    params = GenParams(penalty_repeat=2.0, logit_bias=((0, 4.0),))
    assert choose_reference(row(0, 2.5), params, np.array([0], np.int32), 0).token == 1


def test_log_softmax_is_normalised():
    logprobs = log_softmax(row(1, 2, np.nan, 3, -np.inf))
    assert np.exp(logprobs).sum() == pytest.approx(1.0, abs=1e-15)
    assert logprobs[3] - logprobs[0] == pytest.approx(2.0, abs=1e-15)


def test_log_softmax_of_infinite_heads_shares_evenly():
    assert log_softmax(row(np.inf, 0, np.inf)).tolist() == [-math.log(2), -math.inf, -math.log(2)]


def test_top_logprobs_breaks_ties_by_id_and_leaves_out_the_impossible():
    found = top_logprobs(row(0, 1, -np.inf, 1), 4)
    assert [token for token, _ in found] == [1, 3, 0]
