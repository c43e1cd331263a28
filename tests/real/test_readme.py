"""The README's `nc` session, replayed against the real engine."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata_engine.paths import default_model

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
SESSION = re.search(r"```console\n\$ nc -U \S+\n(.*?)```", README, re.DOTALL)
REQUESTS = ("GEN ", "QUIT")
START_SECONDS = 180.0


@pytest.fixture
def client(tmp_path: Path) -> Iterator[socket.socket]:
    """A connection to a fresh engine, before its greeting."""
    if not default_model().is_file():
        pytest.skip("the default model is missing: make model")
    path = str(tmp_path / "s")
    command = [sys.executable, "-m", "strata_engine.cli", "--socket", path, "--device", "cpu", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            with _connected(path) as connection:
                yield connection
        finally:
            process.terminate()


def _connected(path: str) -> socket.socket:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(20)
        try:
            connection.connect(path)
            if connection.recv(5, socket.MSG_PEEK) == b"INFO ":
                return connection
        except OSError:
            pass
        connection.close()
        time.sleep(0.1)
    pytest.fail("the engine did not get ready")


def _times_left_out(line: str) -> str:
    return (
        re.sub(r"\d+\.\d\b", "#", re.sub(r"model=\S+/", "model=", line))
        if line.startswith(("PP", "DONE", "INFO"))
        else line
    )


def test_the_session_is_what_the_engine_says(client: socket.socket) -> None:
    assert SESSION is not None
    replies = client.makefile("r", encoding="ascii", newline="\n")
    for line in SESSION.group(1).splitlines():
        if line.startswith(REQUESTS):
            client.sendall(line.encode() + b"\n")
        else:
            assert _times_left_out(replies.readline().rstrip("\n")) == _times_left_out(line)
    assert replies.readline() == "", "the engine closes after QUIT"
