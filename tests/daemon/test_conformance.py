"""Replays every example of protocol.md, so that the text cannot rot.

Against the scripted scheduler always, against a real engine on the default model where that is there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "protocol.md").read_text()
START_SECONDS = 180.0  # a first start compiles

PLACEHOLDERS = {
    "n": r"\d+",
    "x": r"-?(?:\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf)",
    "ms": r"\d+\.\d",
    "rate": r"\d+\.\d",
    "word": r"\S+",
    "rest": r".*",
}


def blocks(kind: str) -> list[list[str]]:
    return [block.splitlines() for block in re.findall(rf"^```{kind}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)]


SESSIONS, CONSOLES = blocks("session"), blocks("console")


class Matcher:
    """Compares lines with patterns; a named placeholder keeps the value it first met."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self._seen: dict[str, str] = {}
        self._held: str | None = None

    def _regex(self, pattern: str) -> str:
        parts = re.split(r"\{([a-z]+)(?::([a-z]+))?\}", pattern)
        out = re.escape(parts[0])
        for kind, name, literal in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
            if name in self._seen:
                out += re.escape(self._seen[name])
            elif name and f"(?P<{name}>" in out:
                out += f"(?P={name})"
            else:
                out += f"(?P<{name}>{PLACEHOLDERS[kind]})" if name else f"(?:{PLACEHOLDERS[kind]})"
            out += re.escape(literal)
        return out

    def _next(self) -> str:
        if self._held is None:
            self._held = next(self._lines)
        return self._held

    def take(self, pattern: str) -> bool:
        """Take the next line if it matches."""
        match = re.fullmatch(self._regex(pattern), self._next())
        if match:
            self._seen |= match.groupdict()
            self._held = None
        return bool(match)

    def expect(self, mark: str, pattern: str) -> None:
        if mark == "<":
            assert self.take(pattern), f"expected {pattern!r}, got {self._next()!r}"
        elif mark == "<?":
            self.take(pattern)
        else:
            while self.take(pattern):
                pass

    def nothing_left(self) -> bool:
        return self._held is None and next(self._lines, None) is None


def lines_of(client: socket.socket) -> Iterator[str]:
    with client.makefile("rb") as file:
        for line in file:
            yield line.decode("ascii").removesuffix("\n")


def replay(session: list[str], path: str) -> None:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(path)
        matcher = Matcher(lines_of(client))
        sent: list[str] = []
        for step in session:
            mark, _, text = step.partition(" ")
            if sent and mark != ">":
                client.sendall("".join(f"{line}\n" for line in sent).encode())
                sent = []
            if mark == ">":
                sent.append(text)
            elif mark == ">|":
                client.shutdown(socket.SHUT_WR)
            elif mark == "<|":
                assert matcher.nothing_left()
            else:
                matcher.expect(mark, text)


@pytest.fixture(scope="module", params=["scripted", "engine"])
def engine_socket(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The socket of a running engine."""
    path = str(tmp_path_factory.mktemp("conformance") / "s")
    starter = request.getfixturevalue("scripted_daemon") if request.param == "scripted" else real_engine
    yield from starter(path)


@pytest.fixture(scope="module")
def scripted_daemon(running_daemon, fake_scheduler):
    def begin(path: str) -> Iterator[str]:
        scheduler = fake_scheduler()
        for case in json.loads((ROOT / "tests/data/smollm2_greedy.json").read_text())["cases"]:
            scheduler.script[tuple(case["prompt_ids"])] = case["exact_greedy_ids"]
        daemon = running_daemon(path, scheduler)
        wait_for_greeting(path)
        yield path
        daemon.stop()

    return begin


def real_engine(path: str) -> Iterator[str]:
    from strata_engine import cli

    if not cli.default_model().is_file():
        pytest.skip("the default model is missing: make model")
    command = [sys.executable, "-m", "strata_engine.cli", "--socket", path, "--device", "cpu", "--log-level", "warning"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for_greeting(path, process)
            yield path
        finally:
            process.terminate()
            _, log = process.communicate(timeout=20)
    assert process.returncode == 0, log


def wait_for_greeting(path: str, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process and process.poll() is not None:
            pytest.fail(f"the engine ended: {process.communicate()[1]}")
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(10)
            try:
                client.connect(path)
                if client.recv(5) == b"INFO ":
                    return
            except (FileNotFoundError, ConnectionError):
                pass
        time.sleep(0.05)
    pytest.fail("the engine did not get ready")


@pytest.mark.parametrize("session", SESSIONS, ids=[str(i) for i in range(len(SESSIONS))])
def test_session(engine_socket, session):
    replay(session, engine_socket)


@pytest.mark.skipif(not shutil.which("nc"), reason="nc is not installed")
@pytest.mark.parametrize("console", CONSOLES, ids=[str(i) for i in range(len(CONSOLES))])
def test_console(engine_socket, console):
    command = console[0].removeprefix("$ ").replace("/tmp/strata.sock", engine_socket)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=30)
    matcher = Matcher(iter(done.stdout.splitlines()))
    for line in console[1:]:
        mark, _, text = line.partition(" ")
        matcher.expect(mark, text)
    assert matcher.nothing_left()


def test_there_are_examples():
    assert len(SESSIONS) >= 8 and CONSOLES


def test_every_request_and_reply_has_an_example():
    words = {line.split(" ")[1] for session in SESSIONS for line in session if len(line.split(" ")) > 1}
    assert {
        "INFO",
        "READY",
        "GEN",
        "STOP",
        "PING",
        "PONG",
        "STATS",
        "QUIT",
        "T",
        "PP",
        "REUSED",
        "DONE",
        "ERR",
    } <= words


def test_the_tables_are_up_to_date():
    script = ROOT / "scripts" / "gen_protocol_tables.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
