"""The default model on the CPU against the stored float64 forward: first logits, greedy tokens, margins."""

import numpy as np
import pytest
from exactness import check_every_step, check_first_logits, check_greedy_tokens, logsumexp

from strata_engine.model.reference import reference_logits

pytestmark = pytest.mark.xdist_group("real")


def test_first_logits(backend, case):
    check_first_logits(backend, case)


def test_float32_cells_are_far_nearer_than_they_must_be(backend, case):
    """What a change of the kernels would lose first."""
    check_first_logits(backend, case, error=5e-4)


def test_greedy_tokens(backend, case):
    check_greedy_tokens(backend, case)


def test_every_step_of_a_given_text(backend, case):
    check_every_step(backend, case)


def test_the_reference_is_what_was_stored(model, case):
    if len(case["prompt_ids"]) > 10:
        pytest.skip("seconds a case in float64: the short ones do")
    logits = reference_logits(model, case["prompt_ids"])[-1]
    ids, expected = zip(*case["exact_first_top20"], strict=True)
    assert logits[list(ids)] == pytest.approx(np.array(expected), abs=1e-4)
    assert logsumexp(logits) == pytest.approx(case["exact_first_logsumexp"], abs=1e-4)
