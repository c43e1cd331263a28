"""The default model on the GPU against the stored float64 forward: first logits, greedy tokens, margins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from exactness import CASES, check_every_step, check_first_logits, check_greedy_tokens

from strata_engine.model import load_model
from strata_engine.paths import default_model
from strata_engine.progress import NoProgress

pytestmark = [
    pytest.mark.xdist_group("gpu-real"),
    pytest.mark.skipif(not default_model().is_file(), reason=f"no model at {default_model()}: make model"),
    pytest.mark.parametrize("case", CASES, ids=[f"case{i}" for i in range(len(CASES))]),
]


@contextmanager
def opened(cells: str) -> Iterator:
    from strata_engine.backends.cuda.backend import CudaBackend

    backend = CudaBackend(load_model(default_model()), context=512, slots=4, kv=cells, progress=NoProgress())
    yield backend
    backend.close()


@pytest.fixture(scope="module")
def backend() -> Iterator:
    with opened("f32") as found:
        yield found


@pytest.fixture(scope="module")
def half_cells() -> Iterator:
    with opened("f16") as found:
        yield found


def test_first_logits(backend, case) -> None:
    """Far nearer than the hundredth that they must be: what a change of the kernels would lose first."""
    check_first_logits(backend, case, error=5e-4)


def test_first_logits_with_half_cells(half_cells, case) -> None:
    check_first_logits(half_cells, case)


def test_greedy_tokens(backend, case) -> None:
    check_greedy_tokens(backend, case)


def test_every_step_of_a_given_text(backend, case) -> None:
    check_every_step(backend, case)
