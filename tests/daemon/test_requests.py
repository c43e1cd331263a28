"""Requests and their replies on one connection."""

import shutil
import subprocess
import time

import pytest


def test_speaks_first(start, connect):
    start()
    info, ready = connect().greeting
    assert info == (
        "INFO protocol=1 engine=strata/0.1.0 model=/models/model.gguf arch=llama vocab=49152 context=8192"
        " bos=1 eos=2 device=cpu slots=4"
    )
    assert ready == "READY 8192 stop"


def test_gen_gives_tokens_then_done(start, connect):
    start()
    client = connect()
    client.send("GEN 3 10,11")
    assert client.answer() == ["PP 2 2 1.0 1000.0", "T 12", "T 13", "T 14", "DONE 3 2 1.0 2.0 length 0 0 0"]


def test_logprobs_and_seed(start, connect):
    start()
    client = connect()
    client.send("GEN 1 logprobs=2 10", "GEN 1 temperature=1 seed=7 10")
    assert "T 11 lp=-0.5 top=11:-0.5,12:-1.5" in client.answer()
    assert client.answer()[-1].endswith(" seed=7")


def test_gens_of_one_connection_run_in_order(start, connect):
    daemon = start()
    client = connect()
    client.send("GEN 2 10", "GEN 2 20", "GEN 2 30")
    assert [client.tokens() for _ in range(3)] == [[11, 12], [21, 22], [31, 32]]
    assert [t.request.prompt for t in daemon.scheduler.submitted] == [(10,), (20,), (30,)]


def test_connections_run_side_by_side(start, connect):
    start()
    slow, quick = connect(), connect()
    slow.send("GEN 1000 10")
    quick.send("GEN 2 20")
    assert quick.tokens() == [21, 22]
    slow.send("STOP")
    assert slow.answer()[-1].split()[5] == "cancel"


def test_a_line_may_come_in_pieces(start, connect):
    start()
    client = connect()
    for piece in (b"GE", b"N 2 1", b"0,1", b"1\r", b"\nPING\n"):
        client.socket.sendall(piece)
        time.sleep(0.01)
    lines = [client.line() for _ in range(5)]
    assert "PONG" in lines
    assert [line for line in lines if line[0] == "T"] == ["T 12", "T 13"]


@pytest.mark.parametrize(
    "line", [b"\xff\xfe\x00", b"", b"GET / HTTP/1.1", b"GEN", b"GEN 5 top_k=0 1", b"GEN 5 1,x", b"\xd9\xa1", b"G\tEN"]
)
def test_in_step_after_a_refused_line(start, connect, line):
    start()
    client = connect()
    client.socket.sendall(line + b"\nPING\nGEN 1 10\n")
    assert client.line().startswith("ERR ")
    assert client.line() == "PONG"
    assert client.tokens() == [11]


def test_a_refusal_waits_for_the_answer_before_it(start, connect):
    start()
    client = connect()
    client.send("GEN 2 10", "GEN 2 oops=1 10", "nonsense", "GEN 1 30")
    assert client.answer()[-1].startswith("DONE 2")
    assert client.answer() == ["ERR BAD_KEY no key 'oops'"]
    assert client.answer()[0].startswith("ERR BAD_LINE")
    assert client.tokens() == [31]


def test_ping_does_not_wait_for_a_gen(start, connect):
    start(step=0.01)
    client = connect()
    client.send("GEN 100 10", "PING", "STATS", "STOP")
    lines = client.answer()
    assert lines[0] == "PONG"
    assert lines[1].startswith("STATS uptime_s=")


def test_too_long_is_told_and_closes(start, connect):
    start()
    client = connect()
    client.send("GEN 1 10")
    client.socket.sendall(b"GEN 1 " + b"1," * (6 * 2**20))
    assert client.tokens() == [11]
    assert client.rest() == ["ERR TOO_LONG a line has at most 8388608 bytes"]


def test_the_longest_line_is_taken(start, connect):
    start()
    client = connect()
    line = b"GEN 1 10".ljust(8 * 2**20)
    client.socket.sendall(line + b"\r\n")
    assert client.tokens() == [11]


def test_a_long_prompt_over_the_context_is_refused_soon(start, connect):
    start()
    client, other = connect(), connect()
    client.socket.sendall(b"GEN 1 " + b"123," * 2_000_000 + b"1\n")
    began = time.monotonic()
    other.send("PING")
    assert other.line() == "PONG"
    assert client.line().startswith("ERR CONTEXT_FULL")
    assert time.monotonic() - began < 2


def test_quit_closes_after_what_is_queued(start, connect):
    start()
    client = connect()
    client.send("GEN 2 10", "QUIT", "GEN 2 20")
    lines = client.rest()
    assert [line for line in lines if line[0] == "T"] == ["T 11", "T 12"]
    assert lines[-1].startswith("DONE 2")


def test_quit_and_half_close_still_answers(start, connect):
    start()
    client = connect()
    client.send("GEN 2 10", "QUIT")
    client.half_close()
    assert client.rest()[-1].startswith("DONE 2")


def test_half_close_answers_everything(start, connect):
    start(step=0.0005)
    client = connect()
    client.send(*[f"GEN 2 {i}" for i in range(10, 310)])
    client.half_close()
    assert sum(line.startswith("DONE 2") for line in client.rest()) == 300


def test_half_close_inside_a_line_runs_nothing(start, connect):
    daemon = start()
    client = connect()
    client.socket.sendall(b"GEN 2 10,1")
    client.half_close()
    assert client.rest() == ["ERR BAD_LINE the last line has no line ending"]
    assert not daemon.scheduler.submitted


@pytest.mark.skipif(not shutil.which("nc"), reason="nc is not installed")
def test_netcat_gets_its_whole_answer(start, socket_path):
    start()
    command = f"printf 'GEN 3 10\\n' | nc -N -U {socket_path}"
    output = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=10, check=True).stdout
    assert output.splitlines()[3:6] == ["T 11", "T 12", "T 13"]


def test_busy_past_the_queue(start, connect, until):
    daemon = start(slots=1, queue=1)
    clients = [connect() for _ in range(3)]
    for count, client in enumerate(clients[:2], 1):
        client.send("GEN 5000 10")
        until(lambda count=count: daemon.scheduler.active() == count)
    clients[2].send("GEN 1 10")
    assert clients[2].line() == "ERR BUSY all 1 slots are taken and 1 requests wait"
    assert daemon.scheduler.active() == 2


def test_a_fault_of_the_scheduler_is_told(start, connect, monkeypatch):
    daemon = start()
    monkeypatch.setattr(daemon.scheduler, "submit", lambda *_: 1 / 0)
    client = connect()
    client.send("GEN 1 10")
    assert client.line() == "ERR INTERNAL ZeroDivisionError; the engine's log says more"
    client.send("PING")
    assert client.line() == "PONG"
