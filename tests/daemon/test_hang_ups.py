"""Clients that go away, that do not read, that flood."""

import threading
import time

import pytest

from strata_engine.protocol import LINE_MAX


def test_full_close_cancels_a_running_request(start, connect, until):
    daemon = start()
    client = connect()
    client.send("GEN 5000 10")
    client.line()
    client.close()
    until(lambda: daemon.scheduler.active() == 0, 2)
    assert daemon.scheduler.ended[0][1].reason == "cancel"


def test_full_close_cancels_while_the_prompt_is_read(start, connect, until):
    daemon = start(chunk=1)
    client = connect()
    client.send("GEN 10 " + ",".join(["7"] * 8000))
    assert client.line().startswith("PP")
    client.close()
    until(lambda: daemon.scheduler.active() == 0, 2)
    assert daemon.scheduler.ended[0][1].generated == 0


def test_a_queued_hang_up_touches_its_own_request_only(start, connect, until):
    daemon = start(slots=1)
    holder, leaver, waiter = connect(), connect(), connect()
    for count, client in enumerate((holder, leaver, waiter), 1):
        client.send(f"GEN 5000 {count}0")
        until(lambda count=count: daemon.scheduler.active() == count)
    leaver.close()
    until(lambda: daemon.scheduler.ended != [], 2)
    assert [request.prompt for request, _ in daemon.scheduler.ended] == [(20,)]
    holder.send("STOP")
    holder.answer()
    assert [waiter.line().split()[0] for _ in range(3)] == ["PP", "T", "T"]


def test_hang_up_with_pipelined_requests_starts_none_of_them(start, connect, until):
    daemon = start()
    client = connect()
    client.send("GEN 5000 10", *["GEN 5 20"] * 50)
    client.line()
    client.close()
    until(lambda: daemon.scheduler.active() == 0, 2)
    until(lambda: not daemon.daemon._connections)
    assert len(daemon.scheduler.submitted) == 1


def test_hang_up_after_a_half_close(start, connect, until):
    daemon = start()
    client = connect()
    client.send("GEN 5000 10")
    client.half_close()
    client.line()
    assert daemon.scheduler.active() == 1
    client.close()
    until(lambda: daemon.scheduler.active() == 0, 2)


def test_hang_up_of_a_client_that_does_not_read(start, connect, until):
    daemon = start(step=0.0005)
    client = connect()
    client.send("GEN 8000 logprobs=20 10")
    time.sleep(0.5)
    client.close()
    until(lambda: daemon.scheduler.active() == 0, 2)


def test_a_client_that_does_not_read_is_dropped_past_the_bound(start, connect, until, monkeypatch):
    monkeypatch.setattr("strata_engine.connection.OUTPUT_MAX", 100_000)
    daemon = start(step=0.0005)
    stalled, other = connect(), connect()
    stalled.send("GEN 8000 logprobs=20 10")
    until(lambda: daemon.scheduler.submitted != [] and daemon.scheduler.active() == 0)
    assert daemon.scheduler.ended[0][1].reason == "cancel"
    other.send("GEN 1 10")
    assert other.tokens() == [11]


def test_replies_that_nobody_reads_stop_the_reading(start, connect):
    """A flood of PING without reading: the engine stops taking lines instead of storing replies."""
    daemon = start()
    client = connect()
    client.socket.settimeout(0.5)
    with pytest.raises(TimeoutError):
        for _ in range(1000):
            client.socket.sendall(b"PING\n" * 10_000)
    (connection,) = daemon.daemon._connections
    assert connection._transport.get_write_buffer_size() < 300_000
    assert len(connection._input) < 1_000_000


def test_a_flood_of_gens_waits_in_the_socket(start, connect):
    daemon = start(step=0.02)
    client = connect()
    client.socket.settimeout(0.5)
    with pytest.raises(TimeoutError):
        for _ in range(100):
            client.socket.sendall(b"GEN 100 10\n" * 10_000)
    (connection,) = daemon.daemon._connections
    assert len(connection._turns) <= 256
    assert len(connection._input) < 1_000_000


def test_a_flood_does_not_slow_others(start, connect):
    start()
    flood, other = connect(), connect()
    flood.socket.setblocking(False)
    took = []
    for _ in range(30):
        try:
            flood.socket.send(b"BAD LINE\n" * 20_000)
            flood.socket.recv(1 << 20)
        except BlockingIOError:
            pass
        began = time.perf_counter()
        other.send("PING")
        assert other.line() == "PONG"
        took.append(time.perf_counter() - began)
    assert sorted(took)[-4] < 0.05, "and a few late ones, on a machine that others use too"
    assert max(took) < 0.5


def test_long_lines_that_are_no_gen_do_not_slow_others(start, connect):
    start()
    flood, other = connect(), connect()
    took = []
    for _ in range(5):
        sender = threading.Thread(target=flood.socket.sendall, args=(b"x" * LINE_MAX + b"\n",))
        sender.start()
        while sender.is_alive():
            began = time.perf_counter()
            other.send("PING")
            assert other.line() == "PONG"
            took.append(time.perf_counter() - began)
        sender.join()
        assert flood.line().startswith("ERR BAD_LINE a line of 8388608 bytes that is no GEN")
    assert sorted(took)[-2] < 0.05, "and one late one, on a machine that others use too"


def test_a_hundred_connections(start, connect):
    start(step=0.001)
    clients = [connect() for _ in range(100)]
    for i, client in enumerate(clients):
        if i < 60:
            client.send(f"GEN 5 {i + 10}")
        else:
            client.send("PING")
    for i, client in enumerate(clients):
        if i < 60:
            assert client.tokens() == [i + 11 + n for n in range(5)]
        else:
            assert client.line() == "PONG"


def test_connections_that_come_and_go(start, connect, until):
    daemon = start()
    for i in range(200):
        client = connect(greet=i % 2 == 0)
        if i % 3:
            client.send("GEN 100 10")
        client.close()
    until(lambda: not daemon.daemon._connections and daemon.scheduler.active() == 0)
