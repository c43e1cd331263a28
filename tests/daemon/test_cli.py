"""strata-engine as a process: options, exit codes, signals, second starts."""

import contextlib
import fcntl
import os
import pty
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from strata_engine import backends, cli
from strata_engine.rows import Choice

FAKE = Path(__file__).with_name("fake_engine.py")


def command(*arguments: str, script: str | None = None) -> list[str]:
    return [sys.executable, *([script] if script else ["-m", "strata_engine.cli"]), *arguments]


@pytest.fixture
def environment(tmp_path):
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "XDG_CACHE_HOME": str(tmp_path)}


@pytest.fixture
def run(environment):
    def run(*arguments, **options):
        return subprocess.run(
            command(*arguments, **options), env=environment, capture_output=True, text=True, timeout=20
        )

    return run


@pytest.fixture
def spawn(environment, socket_path, tmp_path, until):
    """spawn(*options) -> a running fake engine that listens on socket_path."""
    processes = []
    (tmp_path / "m.gguf").write_bytes(b"")

    def spawn(*options):
        arguments = ("--socket", socket_path, "--model", str(tmp_path / "m.gguf"), *options)
        process = subprocess.Popen(
            command(*arguments, script=str(FAKE)),
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        wanted = b"ERR" if "--slow-load" in options else b"INFO"
        until(lambda: process.poll() is not None or first_word(socket_path) == wanted)
        return process

    yield spawn
    for process in processes:
        process.kill()
        process.communicate()


def first_word(path: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        try:
            client.connect(path)
            return client.recv(100).split(b" ")[0]
        except OSError:
            return b""


def test_help_explains_every_option(run):
    done = run("--help")
    assert done.returncode == 0
    options = ("socket", "model", "device", "max-context", "slots", "queue", "threads", "kv", "chunk", "draft")
    assert [option for option in (*options, "log-level", "version") if f"--{option}" not in done.stdout] == []


def test_version(run):
    assert run("--version").stdout == "strata-engine 0.1.0\n"


@pytest.mark.parametrize(
    "option, value",
    [
        ("--slots", "0"),
        ("--threads", "0"),
        ("--slots", "x"),
        ("--slots", "513"),
        ("--threads", "1025"),
        ("--threads", "9" * 5000),
        ("--chunk", "4097"),
        ("--queue", "100001"),
        ("--draft", "8"),
        ("--max-context", "-1"),
        ("--device", "tpu"),
        ("--kv", "q8"),
    ],
)
def test_a_bad_option_is_named(run, option, value):
    done = run(option, value)
    assert done.returncode == 2
    assert option in done.stderr and value in done.stderr


def test_the_missing_default_model_says_how_to_get_it(run, tmp_path):
    done = run("--socket", str(tmp_path / "s"))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "make model" in done.stderr and str(tmp_path / "strata") in done.stderr


def test_a_missing_model_is_named(run, tmp_path):
    done = run("--socket", str(tmp_path / "s"), "--model", "/nowhere/x.gguf")
    assert (done.returncode, done.stderr) == (2, "strata-engine: no model file /nowhere/x.gguf\n")


def test_a_whole_number_that_is_too_small_is_told_the_least(run):
    assert "argument --max-context: must be at least 1, got 0" in run("--max-context", "0").stderr


def test_a_whole_number_outside_its_range_is_told_the_range(run):
    assert "argument --slots: must be in 1..512, got 600" in run("--slots", "600").stderr


def test_an_empty_model_name_is_not_the_default_model(run, tmp_path):
    assert run("--socket", str(tmp_path / "s"), "--model", "").stderr == (
        "strata-engine: . is a directory, not a model file\n"
    )


@pytest.mark.parametrize("ending", ["2>&-", "2>&1 | head -1", "<&- >&- 2>&-", "2>/dev/full"])
def test_nobody_reads_what_it_says(environment, socket_path, tmp_path, until, ending):
    (tmp_path / "m.gguf").write_bytes(b"")
    arguments = command("--talk", "--socket", socket_path, "--model", str(tmp_path / "m.gguf"), script=str(FAKE))
    script = f"({shlex.join(arguments)}; echo $? >{shlex.quote(str(tmp_path))}/code) {ending}"
    shell = subprocess.Popen(["sh", "-c", script], env=environment, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        until(lambda: shell.poll() is not None or first_word(socket_path) == b"INFO")
        os.kill(peer(socket_path), signal.SIGTERM)
        shell.wait(10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()
    assert (tmp_path / "code").read_text() == "0\n"


def peer(path: str) -> int:
    """The process that listens on a socket."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        return struct.unpack("3i", client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


def test_a_folder_is_no_model(run, tmp_path):
    done = run("--socket", str(tmp_path / "s"), "--model", str(tmp_path))
    assert (done.returncode, done.stderr) == (2, f"strata-engine: {tmp_path} is a directory, not a model file\n")


@pytest.mark.parametrize("part", ["_parser", "_run"])
def test_ctrl_c_before_it_listens_is_quiet(monkeypatch, capsys, part):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, part, interrupted)
    assert cli.main([]) == 130
    assert capsys.readouterr().err == ""


def test_ctrl_c_under_a_bar_leaves_a_good_terminal(environment, socket_path, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"")
    arguments = command("--slow-load", "--socket", socket_path, "--model", str(tmp_path / "m.gguf"), script=str(FAKE))
    terminal, side = pty.openpty()
    process = subprocess.Popen(arguments, env={**environment, "TERM": "xterm"}, stdout=side, stderr=side)
    os.close(side)
    try:
        shown = until_shown(terminal, b"compiling kernels")
        process.send_signal(signal.SIGINT)
        shown += until_shown(terminal, None)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    ending = next(line for line in shown.split(b"\r\n") if b"SIGINT: ending" in line)
    assert b"compiling" not in ending.replace(b"\r\x1b[2K", b"\n").split(b"\n")[-1]
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l") and shown.endswith(b"\r\n")


def until_shown(terminal: int, words: bytes | None) -> bytes:
    """What the terminal got up to `words`, or to its end, which Linux reports as an error."""
    shown = b""
    with contextlib.suppress(OSError):
        while words is None or words not in shown:
            assert select.select([terminal], [], [], 20)[0], f"nothing more came after {shown!r}"
            part = os.read(terminal, 4096)
            if not part:
                break
            shown += part
    return shown


def test_a_second_start_is_refused_at_once(spawn, run, socket_path):
    first = spawn()
    began = time.monotonic()
    second = run("--socket", socket_path, "--model", str(FAKE))
    assert time.monotonic() - began < 3
    assert second.returncode == 2
    assert second.stderr == (
        f"strata-engine: an engine is already listening on {socket_path}; stop it or choose another --socket\n"
    )
    assert first.poll() is None and first_word(socket_path) == b"INFO"


def test_a_second_start_is_refused_while_the_first_loads(spawn, run, socket_path):
    spawn("--slow-load")
    assert run("--socket", socket_path, "--model", str(FAKE)).returncode == 2


def test_a_killed_engines_socket_is_replaced(spawn, socket_path):
    first = spawn()
    first.kill()
    first.wait()
    assert os.path.exists(socket_path)
    spawn()
    assert first_word(socket_path) == b"INFO"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(spawn, connect, socket_path, number):
    process = spawn()
    client = connect()
    client.send("GEN 5000 10")
    client.line()
    process.send_signal(number)
    assert client.rest()[-1].split()[5] == "cancel"
    stdout, stderr = process.communicate(timeout=10)
    assert (process.returncode, stdout) == (0, "")
    assert "Traceback" not in stderr
    assert not os.path.exists(socket_path)


def test_a_second_signal_of_another_kind_ends_it_at_once(spawn, connect, until):
    process = spawn()
    client = connect()
    client.send(*["STATS"] * 4000)  # more than the socket holds: the engine waits for this client to read
    seen = [0]

    def full():
        time.sleep(0.05)
        seen.append(unread(client.socket))
        return seen[-1] == seen[-2] > 0

    until(full)
    process.send_signal(signal.SIGTERM)
    for line in process.stderr:
        if "SIGTERM: ending" in line:
            break
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == -signal.SIGINT


def unread(client: socket.socket) -> int:
    """Bytes that a socket has received."""
    return struct.unpack("i", fcntl.ioctl(client, termios.FIONREAD, bytes(4)))[0]


def test_a_signal_while_loading_ends_it_cleanly(spawn, socket_path):
    process = spawn("--slow-load")
    process.terminate()
    assert process.wait(5) == 0
    assert not os.path.exists(socket_path)


# ---- loading


class Model:
    path, arch, vocab, bos, eos, context_length = "/m.gguf", "llama", 100, 1, frozenset({3, 2}), 512


class Backend:
    device, feeds, vocab, context, slots, max_rows, chunk = "cpu", False, 100, 512, 4, 64, 16

    def forward(self, rows):
        pass

    def choose(self, draws):
        return [Choice(0)] * len(draws)

    def close(self):
        pass


@pytest.fixture
def load(monkeypatch):
    """load(*options) with a made-up model and backend; .asked is what open_backend was asked for."""
    from strata_engine import model

    asked = {}
    monkeypatch.setattr(model, "load_model", lambda path: Model(), raising=False)
    monkeypatch.setattr(backends, "BackendError", type("BackendError", (Exception,), {}), raising=False)
    monkeypatch.setattr(
        backends, "open_backend", lambda model, **given: asked.update(given) or Backend(), raising=False
    )
    engines = []

    def load(*options):
        engines.append(cli._load("/m.gguf", cli._parser().parse_args(options)))
        return engines[-1]

    load.asked = asked
    yield load
    for engine in engines:
        engine.scheduler.close()


def test_load_describes_the_model(load):
    info = load().info
    assert (info.model, info.arch, info.vocab, info.context) == ("/m.gguf", "llama", 100, 512)
    assert (info.bos, info.eos, info.device, info.slots) == (1, (2, 3), "cpu", 4)


def test_load_hands_the_options_on(load):
    load("--slots", "2", "--threads", "1", "--kv", "f16", "--device", "cpu", "--max-context", "100", "--chunk", "8")
    asked = {name: load.asked[name] for name in ("slots", "threads", "kv", "device", "context")}
    assert asked == {"slots": 2, "threads": 1, "kv": "f16", "device": "cpu", "context": 100}


@pytest.mark.parametrize(("options", "chunk"), [((), 16), (("--chunk", "8"), 8)])
def test_the_chunk_is_the_devices_unless_given(load, options, chunk):
    assert load(*options).scheduler._chunk == chunk


def test_a_context_over_the_models_is_refused(load):
    with pytest.raises(cli.StartError, match="--max-context 513: the model was made for at most 512"):
        load("--max-context", "513")


def test_a_damaged_model_is_one_line(monkeypatch, load):
    from strata_engine import model

    def damaged(path):
        raise model.ModelError("/m.gguf: cut off\nin the middle")

    monkeypatch.setattr(model, "load_model", damaged)
    with pytest.raises(cli.StartError, match="^/m.gguf: cut off in the middle$"):
        load()
