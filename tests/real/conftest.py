"""The default model on the CPU backend, and the engine as a process; skipped where the model is not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata_engine.backends.cpu.backend import CpuBackend
from strata_engine.model import Model, load_model
from strata_engine.paths import default_model
from strata_engine.progress import NoProgress

CASES = json.loads((Path(__file__).parents[1] / "data/smollm2_greedy.json").read_text())["cases"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case`: every case of smollm2_greedy.json."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=[f"case{i}" for i in range(len(CASES))])


@pytest.fixture(scope="session")
def model_path() -> Path:
    path = default_model()
    if not path.is_file():
        pytest.skip(f"the default model is missing at {path}: make model")
    return path


@pytest.fixture(scope="session")
def model(model_path: Path) -> Model:
    return load_model(model_path)


@pytest.fixture(scope="session")
def backend(model: Model) -> Iterator[CpuBackend]:
    """One for all tests: what a slot held before changes nothing."""
    backend = CpuBackend(model, context=512, slots=4, threads=2, progress=NoProgress())
    yield backend
    backend.close()
