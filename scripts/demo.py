"""Start engine and proxy, ask one question over HTTP, print the answer as it streams, stop both.

python scripts/demo.py [QUESTION]
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

QUESTION = "Why is the sky blue? Answer in two sentences."
BIN = Path(sys.executable).parent
EXIT_INTERRUPTED = 130  # as a shell has it: 128 + SIGINT


def main() -> int:
    question = " ".join(sys.argv[1:]) or QUESTION
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # or both programs would outlive this one
    try:
        _demonstrate(question)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def _demonstrate(question: str) -> None:
    with tempfile.TemporaryDirectory(prefix="strata-") as folder:
        path, port = os.path.join(folder, "engine.sock"), _free_port()
        with (
            _running("strata-engine", "--socket", path, "--log-level", "warning") as engine,
            _running("strata-proxy", "--engine", path, "--port", str(port), "--log-level", "warning") as proxy,
        ):
            _wait_until_healthy(port, engine, proxy)
            print(f"\n> {question}\n")
            _ask(port, question)


@contextmanager
def _running(*command: str) -> Iterator[subprocess.Popen[bytes]]:
    """The program for as long as the block runs; it is asked to end, and killed only if it does not."""
    process = subprocess.Popen([str(BIN / command[0]), *command[1:]])
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_healthy(port: int, *processes: subprocess.Popen[bytes]) -> None:
    """However long compiling takes, which the engine tells; a program that ends has said why."""
    while all(process.poll() is None for process in processes):
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.2)
    raise SystemExit("demo: the engine and the proxy could not start")


def _ask(port: int, question: str) -> None:
    body = {
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 200,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise SystemExit(f"demo: HTTP {response.status}: {response.read().decode()}")
    begun = time.monotonic()
    usage: dict[str, int] = {}
    for event in _events(response):
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            print(choice["delta"].get("content") or "", end="", flush=True)
    seconds = time.monotonic() - begun
    tokens = usage.get("completion_tokens", 0)
    print(f"\n\n{tokens} tokens in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s (prompt reading included)")


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event up to [DONE]."""
    for line in response:
        if line.startswith(b"data: "):
            data = line[6:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if "error" in event:
                raise SystemExit(f"demo: {event['error']['message']}")
            yield event


if __name__ == "__main__":
    sys.exit(main())
