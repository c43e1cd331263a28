"""scripts/demo.py: whatever ends it, neither program is left behind. Both are stand-ins here."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "scripts" / "demo.py"
WITH_PROGRAMS_OF = """
import importlib.util, pathlib, sys
spec = importlib.util.spec_from_file_location("demo", sys.argv.pop(1))
demo = importlib.util.module_from_spec(spec)
spec.loader.exec_module(demo)
demo.BIN = pathlib.Path(sys.argv.pop(1))
sys.exit(demo.main())
"""


@pytest.fixture
def programs(tmp_path):
    """Write a stand-in for one of the two programs: it notes its process id, then does what the shell script says."""

    def write(name: str, script: str) -> None:
        path = tmp_path / name
        path.write_text(f'#!/bin/sh\necho $$ > "{tmp_path}/pid-$(basename "$0")"\n{script}\n')
        path.chmod(0o755)

    return write


@contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """The demo, with the programs in `folder`."""
    command = [sys.executable, "-c", WITH_PROGRAMS_OF, str(DEMO), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as demo:
        try:
            yield demo
        finally:
            demo.kill()


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def started(folder: Path) -> list[int]:
    """The process ids of both stand-ins, once they have noted them."""
    notes = [folder / f"pid-strata-{name}" for name in ("engine", "proxy")]
    deadline = time.monotonic() + 30
    while not all(note.is_file() and note.read_text().strip() for note in notes):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(note.read_text()) for note in notes]


def test_an_engine_that_cannot_start_ends_it_at_once(programs, tmp_path):
    programs("strata-engine", "echo 'strata-engine: no model' >&2; sleep 0.3; exit 2")
    programs("strata-proxy", "exec sleep 40")
    with running(tmp_path) as demo:
        pids = started(tmp_path)
        _, errors = demo.communicate(timeout=30)
    assert (demo.returncode, errors.splitlines()[0]) == (1, "strata-engine: no model")
    assert "could not start" in errors and not any(map(runs, pids))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_quietly_and_both_programs_too(programs, tmp_path, number):
    for name in ("strata-engine", "strata-proxy"):
        programs(name, "exec sleep 40")
    with running(tmp_path) as demo:
        pids = started(tmp_path)
        demo.send_signal(number)
        _, errors = demo.communicate(timeout=30)
    assert (demo.returncode, errors) == (128 + number, "")
    assert not any(map(runs, pids))
