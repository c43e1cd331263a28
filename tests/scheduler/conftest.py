from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# The tests import by importlib mode, which puts no folder on sys.path: name the shared module once, here.
_spec = importlib.util.spec_from_file_location("scheduler_fake", Path(__file__).with_name("fake.py"))
assert _spec and _spec.loader
_fake = importlib.util.module_from_spec(_spec)
sys.modules["scheduler_fake"] = _fake
_spec.loader.exec_module(_fake)

from strata_engine.scheduler import Scheduler  # noqa: E402


@pytest.fixture(params=["waits", "feeds"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Scheduler]]:
    """Start a scheduler on a fake backend, with that backend's clock; closed after the test.

    Once as the backend is, once made into one that feeds.
    """
    running: list[Scheduler] = []

    def build(backend, *, eos=frozenset(), run=True, **options) -> Scheduler:
        device = _fake.Fed(backend) if request.param == "feeds" else backend
        scheduler = Scheduler(device, eos=frozenset(eos), clock=backend.clock, **options)
        running.append(scheduler)
        if run:
            scheduler.start()
        return scheduler

    yield build
    for scheduler in running:
        scheduler.close()
