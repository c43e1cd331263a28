"""`strata-engine --device cuda` as its clients see it: the default model, one process, everything over its socket."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from strata_engine.paths import default_model

pytestmark = pytest.mark.skipif(not default_model().is_file(), reason=f"no model at {default_model()}: make model")
CASES = json.loads((Path(__file__).parents[1] / "data/smollm2_greedy.json").read_text())["cases"]
SLOTS = 8
START_SECONDS = 300  # of a first start, which compiles
MARGIN = 0.01  # below, the float64 forward itself is undecided
LENGTH = 64
REPEATING = CASES[1]["prompt_ids"][:24] * 4
KINDS = {
    "greedy": "logprobs=3",
    "sampled": "temperature=0.9 top_p=0.95 min_p=0.02 seed=5 logprobs=2",
    "penalised": "temperature=0.7 seed=18446744073709551615 penalty_repeat=1.1 penalty_freq=0.1",
    "greedy, penalised": "penalty_present=0.6 penalty_last_n=300 logprobs=0",
}


class Client:
    """One connection."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        self.socket.connect(path)
        self._lines = self.socket.makefile()
        self.greeting = [self.line(), self.line()]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._lines.close()
        self.socket.close()

    def send(self, *lines: str) -> None:
        self.socket.sendall("".join(f"{line}\n" for line in lines).encode())

    def line(self) -> str:
        return self._lines.readline().rstrip("\n")

    def until(self, *words: str) -> list[str]:
        """The lines up to the first that begins with one of `words`."""
        lines = [self.line()]
        while not lines[-1].startswith(words):
            assert lines[-1], f"the engine hung up after {lines[-4:]}"
            lines.append(self.line())
        return lines

    def generate(self, count: int, keys: str, prompt: Sequence[int]) -> list[str]:
        self.send(f"GEN {count} {keys} {','.join(map(str, prompt))}")
        return self.until("DONE", "ERR")

    def stats(self) -> dict[str, str]:
        self.send("STATS")
        return dict(pair.split("=") for pair in self.until("STATS")[-1].split()[1:])


def tokens(lines: Sequence[str]) -> list[str]:
    """The T lines: ids and log-probabilities as the engine wrote them."""
    assert lines[-1].startswith("DONE"), lines[-1]
    return [line for line in lines if line.startswith("T ")]


def ids(lines: Sequence[str]) -> list[int]:
    return [int(line.split()[1]) for line in tokens(lines)]


@dataclass(slots=True)
class Running:
    process: subprocess.Popen
    path: str


@contextmanager
def started(path: str, *options: str) -> Iterator[Running]:
    command = [sys.executable, "-m", "strata_engine.cli", "--socket", path, "--slots", str(SLOTS), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_until_ready(path, process)
            yield Running(process, path)
        finally:
            process.kill()


def wait_until_ready(path: str, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        try:
            with Client(path) as client:
                if client.greeting[0].startswith("INFO "):
                    return
        except (FileNotFoundError, ConnectionError):
            pass
        time.sleep(0.1)
    pytest.fail("the engine did not get ready")


@pytest.fixture(scope="module", params=["--device cuda --kv f32", "--device auto --kv f16"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with started(str(tmp_path_factory.mktemp("s") / "s"), *request.param.split()) as running:
        yield running


@contextmanager
def company(path: str, count: int = SLOTS - 1) -> Iterator[None]:
    """`count` clients whose requests are being decoded, each with another prompt."""
    with ExitStack() as stack:
        clients = [stack.enter_context(Client(path)) for _ in range(count)]
        for n, client in enumerate(clients):
            prompt = ",".join(str((n * 7919 + i * i * 31) % 49000) for i in range(20 + 9 * n))
            sampling = "temperature=1 penalty_freq=0.2" if n % 2 else ""
            client.send(f"GEN 6000 ignore_eos=1 {sampling} {prompt}")
        for client in clients:
            client.until("T ")
        yield


def test_the_greeting_names_the_device(engine: Running) -> None:
    with Client(engine.path) as client:
        assert " device=cuda " in client.greeting[0] and f"slots={SLOTS}" in client.greeting[0]
        assert client.greeting[1].startswith("READY 8192")


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_greedy_answer(engine: Running, number: int) -> None:
    """The float64 reference's ids, where those are decided."""
    case = CASES[number]
    right, margins = case["exact_greedy_ids"], case["exact_greedy_margins"]
    decided = next((i for i, margin in enumerate(margins) if margin < MARGIN), len(right))
    with Client(engine.path) as client:
        found = ids(client.generate(len(right), "", case["prompt_ids"]))
    assert found[:decided] == right[:decided]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [*range(len(CASES)), None])
def test_the_same_in_every_company_and_with_drafts(engine: Running, kind: str, number: int | None) -> None:
    prompt = REPEATING if number is None else CASES[number]["prompt_ids"]
    with Client(engine.path) as client:

        def answer(draft: int) -> list[str]:
            return tokens(client.generate(LENGTH, f"ignore_eos=1 draft={draft} {KINDS[kind]}", prompt))

        right = answer(0)
        assert len(right) == LENGTH
        assert answer(7) == right
        with company(engine.path):
            assert answer(0) == right
            assert answer(7) == right


def test_without_log_probabilities_the_ids_are_the_same(engine: Running) -> None:
    with Client(engine.path) as client:
        for case in CASES:
            found = [ids(client.generate(LENGTH, keys, case["prompt_ids"])) for keys in ("logprobs=0", "", "draft=0")]
            assert found[0] == found[1] == found[2]


def test_drafts_are_accepted_where_text_repeats(engine: Running) -> None:
    """On one try of several: how many are offered follows the clock, and other tests may share the GPU."""
    with Client(engine.path) as client:
        tries = (client.generate(200, "ignore_eos=1 draft=7", REPEATING)[-1].split() for _ in range(5))
        assert any(int(done[6]) > 20 for done in tries)


def test_requests_of_all_kinds_at_once(engine: Running) -> None:
    asked = [(f"ignore_eos=1 {KINDS[kind]}", case["prompt_ids"]) for kind in KINDS for case in CASES]

    def answer(one: tuple[str, list[int]]) -> list[str]:
        with Client(engine.path) as client:
            return tokens(client.generate(48, *one))

    alone = [answer(one) for one in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        assert list(pool.map(answer, asked)) == alone


def test_a_prefix_is_reused_and_changes_nothing(engine: Running) -> None:
    prompt = [(i * 7919 + 13) % 49000 for i in range(700)]
    with Client(engine.path) as client:
        first = client.generate(32, "logprobs=2 ignore_eos=1", prompt)
        again = client.generate(32, "logprobs=2 ignore_eos=1", prompt)
        longer = [*prompt, *ids(first), 5, 6]
        third = client.generate(32, "logprobs=2 ignore_eos=1", longer)
    assert again[0] == f"REUSED {len(prompt) - 1}" and tokens(again) == tokens(first)
    assert third[0] == f"REUSED {len(prompt) + 31}"
    with company(engine.path, SLOTS):
        pass  # every slot's cells are others' now
    with Client(engine.path) as client:
        cold = client.generate(32, "logprobs=2 ignore_eos=1", longer)
    assert not cold[0].startswith("REUSED")
    assert tokens(cold) == tokens(third)


def test_a_long_prompt_is_read_and_reported(engine: Running) -> None:
    with Client(engine.path) as client:
        lines = client.generate(4, "", [(i * 31) % 49000 for i in range(6000)])
    progress = [line.split() for line in lines if line.startswith("PP")]
    assert progress[-1][1:3] == ["6000", "6000"] and len(progress) > 4
    assert len(tokens(lines)) == 4


def test_ping_is_answered_under_load(engine: Running) -> None:
    with company(engine.path, SLOTS), Client(engine.path) as client:
        worst = 0.0
        for _ in range(100):
            begun = time.perf_counter()
            client.send("PING")
            assert client.line() == "PONG"
            worst = max(worst, time.perf_counter() - begun)
            time.sleep(0.003)
    assert worst < 0.05


def test_stop_ends_a_request_and_the_next_is_served(engine: Running) -> None:
    with Client(engine.path) as client:
        client.send(f"GEN 6000 ignore_eos=1 {','.join(map(str, REPEATING))}")
        client.until("T ")
        client.send("STOP")
        done = client.until("DONE")[-1].split()
        assert done[5] == "cancel" and int(done[1]) < 3000
        assert len(tokens(client.generate(5, "ignore_eos=1", REPEATING))) == 5


def test_a_hang_up_frees_the_slots(engine: Running) -> None:
    with company(engine.path, SLOTS), Client(engine.path) as client:
        assert client.stats()["running"] == str(SLOTS)
    deadline = time.monotonic() + 2
    with Client(engine.path) as client:
        while client.stats()["running"] != "0" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.stats()["running"] == "0"


def test_sigterm_ends_requests_and_the_process(engine: Running) -> None:
    """The last test of each engine."""
    with Client(engine.path) as client:
        client.send(f"GEN 6000 ignore_eos=1 {','.join(map(str, REPEATING))}")
        client.until("T ")
        engine.process.send_signal(signal.SIGTERM)
        assert client.until("DONE")[-1].split()[5] == "cancel"
    assert engine.process.wait(20) == 0
    assert not Path(engine.path).exists()


def test_too_many_cells_are_refused_with_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "strata_engine.cli", "--socket", str(tmp_path / "s"), "--device", "cuda"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [*command, "--slots", "512"], env=environment, capture_output=True, text=True, timeout=START_SECONDS
    )
    assert done.returncode == 2
    assert "lower --slots or --max-context" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
