from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tiny_model import Tiny, write_model

from strata_engine.backends.cpu.backend import CpuBackend
from strata_engine.model import Model, load_model
from strata_engine.progress import NoProgress


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Callable[..., Model]:
    """Write and load a model of random weights; the same one where it was asked for before."""
    folder, models = tmp_path_factory.mktemp("models"), {}

    def build(**spec) -> Model:
        name = repr(sorted(spec.items(), key=str))
        if name not in models:
            path: Path = write_model(folder / f"{len(models)}.gguf", Tiny(**spec))
            models[name] = load_model(path)
        return models[name]

    return build


@pytest.fixture
def start() -> Iterator[Callable[..., CpuBackend]]:
    """Open a CPU backend; closed after the test."""
    running: list[CpuBackend] = []

    def build(model: Model, *, context: int = 256, slots: int = 4, threads: int = 1, **options) -> CpuBackend:
        backend = CpuBackend(model, context=context, slots=slots, threads=threads, progress=NoProgress(), **options)
        running.append(backend)
        return backend

    yield build
    for backend in running:
        backend.close()
