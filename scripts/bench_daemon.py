#!/usr/bin/env python3
"""Tokens a second of a running engine, over its socket, by the number of clients.

    strata-engine --device cuda --slots 8 &
    python scripts/bench_daemon.py --clients 1,8 --tokens 256

Every client sends one request at the same moment; the rate is all their tokens over the time from the first token to
the last. Answers run past end tokens, so all are equally long.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from arguments import UsageError, count, counts, out_file, run

from strata_engine.cli import DEFAULT_SOCKET

STARTING_S = 10  # within which an engine that was just started listens


@dataclass(slots=True)
class Figure:
    """One line of the table: medians over the rounds."""

    clients: int
    keys: str
    tokens_per_s: float
    first_ms: float  # to the first token
    ms_per_step: float  # of the engine's loop, by STATS


def prompt(client: int, length: int) -> str:
    return ",".join(str(3 + (client * 7919 + i * i * 31) % 997) for i in range(length))


def answer(path: str, line: str, barrier: threading.Barrier, stamps: list[float], refused: list[str]) -> None:
    """Send one request when all are connected; `stamps` takes the time of each token, `refused` what went wrong."""
    try:
        _answer(path, line, barrier, stamps, refused)
    except (OSError, threading.BrokenBarrierError) as error:
        barrier.abort()
        refused.append(f"the connection failed ({error})")
    if len(stamps) < 3:
        refused.append("no answer of two tokens came")


def _answer(path: str, line: str, barrier: threading.Barrier, stamps: list[float], refused: list[str]) -> None:
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as replies:
        connection.settimeout(120)
        connection.connect(path)
        replies.readline(), replies.readline()
        barrier.wait(60)
        stamps.append(time.perf_counter())
        connection.sendall(line.encode())
        for reply in replies:
            if reply.startswith(b"T "):
                stamps.append(time.perf_counter())
            elif reply.startswith((b"DONE", b"ERR")):
                if reply.startswith(b"ERR"):
                    refused.append(f"the engine refused: {reply.decode().strip()}")
                return


def await_ready(path: str) -> None:
    """Wait until the engine is ready to answer. UsageError if none listens at `path`."""
    until = time.monotonic() + STARTING_S
    while True:
        try:
            with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as replies:
                connection.settimeout(STARTING_S)
                connection.connect(path)
                if not replies.readline().startswith(b"ERR LOADING"):
                    return
                until = time.monotonic() + STARTING_S
        except OSError as error:
            if time.monotonic() > until:
                why = error.strerror or error
                raise UsageError(f"no engine answers at {path} ({why}): start it, or name its --socket") from None
        time.sleep(0.2)


def steps_and_seconds(path: str) -> tuple[int, float]:
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rb") as replies:
        connection.connect(path)
        replies.readline(), replies.readline()
        connection.sendall(b"STATS\n")
        pairs = dict(pair.split("=") for pair in replies.readline().decode().split()[1:])
    return int(pairs["steps"]), float(pairs["busy_s"])


def one_round(path: str, clients: int, tokens: int, length: int, keys: str) -> tuple[float, float]:
    """(tokens a second, milliseconds to the first token)."""
    barrier, refused = threading.Barrier(clients), list[str]()
    stamps: list[list[float]] = [[] for _ in range(clients)]
    lines = [f"GEN {tokens} ignore_eos=1 {keys} {prompt(n, length)}\n" for n in range(clients)]
    threads = [
        threading.Thread(target=answer, args=(path, line, barrier, stamp, refused))
        for line, stamp in zip(lines, stamps, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if refused:
        raise UsageError(refused[0])
    first, last = min(s[1] for s in stamps), max(s[-1] for s in stamps)
    return clients * (tokens - 1) / (last - first), statistics.median((s[1] - s[0]) * 1e3 for s in stamps)


def measure(path: str, clients: int, args: argparse.Namespace) -> Figure:
    one_round(path, clients, args.tokens, args.prompt, args.keys)  # warms up
    before = steps_and_seconds(path)
    rounds = [one_round(path, clients, args.tokens, args.prompt, args.keys) for _ in range(args.rounds)]
    steps, seconds = (b - a for a, b in zip(before, steps_and_seconds(path), strict=True))
    rate, first = (statistics.median(part) for part in zip(*rounds, strict=True))
    return Figure(clients, args.keys, rate, first, seconds / steps * 1e3)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", default=DEFAULT_SOCKET)
    parser.add_argument("--clients", type=counts(1, 1024), default="1,8", help="at once (default: %(default)s)")
    parser.add_argument("--tokens", type=count(2), default=256, help="length of an answer (default: %(default)s)")
    parser.add_argument("--prompt", type=count(), default=32, help="length of a prompt (default: %(default)s)")
    parser.add_argument(
        "--keys", default="draft=0", help="of the requests; without draft=0 they draft (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=count(), default=3, help="(default: %(default)s)")
    parser.add_argument("--json", type=out_file, help="write the figures here")
    args = parser.parse_args(arguments)
    await_ready(args.socket)
    figures = [measure(args.socket, clients, args) for clients in args.clients]
    for f in figures:
        print(f"{f.clients:3} clients, {f.keys}: {f.tokens_per_s:9,.0f} tok/s, first token {f.first_ms:7.1f} ms, "
              f"{f.ms_per_step:.3f} ms a step")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")


if __name__ == "__main__":
    run(main, OSError)
