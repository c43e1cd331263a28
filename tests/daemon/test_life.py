"""Start, second start, end: the socket file and the states around serving."""

import os
import socket
import stat
import threading
import time

import pytest

from strata_engine import listener
from strata_engine.daemon import Engine
from strata_engine.listener import ListenError, listen


def test_mode_is_0600_and_the_umask_is_left_alone(socket_path):
    mask = os.umask(0)
    try:
        listening = listen(socket_path)
        assert stat.S_IMODE(os.stat(socket_path).st_mode) == 0o600
        assert os.umask(0) == 0
    finally:
        os.umask(mask)
    listening.remove()


def test_a_dead_socket_file_is_replaced(socket_path):
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(socket_path)
    dead.close()
    listening = listen(socket_path)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(socket_path)
    listening.remove()


def test_a_live_socket_is_refused_and_keeps_working(start, connect, socket_path):
    start()
    with pytest.raises(ListenError, match="an engine is already listening on"):
        listen(socket_path)
    client = connect()
    client.send("PING")
    assert client.line() == "PONG"


def test_a_file_that_is_no_socket_is_refused_and_kept(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    with pytest.raises(ListenError, match="is not a socket"):
        listen(str(path))
    assert path.read_text() == "precious"


@pytest.mark.parametrize("path", ["missing-folder/s", "x" * 200])
def test_an_impossible_path_is_refused_clearly(tmp_path, path):
    with pytest.raises(ListenError, match="cannot listen on"):
        listen(str(tmp_path / path))


def test_of_many_started_at_once_one_listens(socket_path, monkeypatch):
    alive = listener._alive
    monkeypatch.setattr(listener, "_alive", lambda path: (alive(path), time.sleep(0.02))[0])  # a window to race in
    listeners, errors = [], []
    barrier = threading.Barrier(8)

    def begin():
        barrier.wait(10)
        try:
            listeners.append(listen(socket_path))
        except ListenError as error:
            errors.append(str(error))

    dead = socket.socket(socket.AF_UNIX)
    dead.bind(socket_path)
    dead.close()
    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (len(listeners), len(errors)) == (1, 7)
    listeners[0].remove()


def test_the_file_goes_at_the_end(start, socket_path):
    daemon = start()
    daemon.stop()
    assert not os.path.exists(socket_path)


def test_somebody_elses_file_stays_at_the_end(start, socket_path):
    daemon = start()
    os.unlink(socket_path)
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(socket_path)
        daemon.stop()
        assert os.path.exists(socket_path)


def test_the_end_cancels_running_requests_and_refuses_later_ones(start, connect, until):
    daemon = start()
    client, idle = connect(), connect()
    client.send("GEN 5000 10", "GEN 5 20", "GEN 5 oops 1")
    client.line()
    daemon.stop()
    lines = [line for line in client.rest() if not line.startswith(("T", "PP"))]
    assert lines[0].split()[5] == "cancel"
    assert lines[1] == "ERR SHUTDOWN the engine is ending"
    assert len(lines) == 3
    assert idle.rest() == []


def test_loading_is_told_and_closes(start, connect, until):
    gate = threading.Event()
    daemon = start(load=lambda: gate.wait(10) and None)
    client = connect(greet=False)
    client.send("GEN 5 10")
    assert client.rest() == ["ERR LOADING the model is being loaded; connect again in a moment"]
    gate.set()
    daemon.stop()


def test_a_load_that_fails_ends_the_daemon_and_the_file(start, until, socket_path):
    def load() -> Engine:
        raise ValueError("damaged")

    daemon = start(load=load)
    until(lambda: daemon.error is not None)
    assert str(daemon.error) == "damaged"
    assert not os.path.exists(socket_path)


def test_stopping_while_loading_ends_at_once(start, socket_path):
    gate = threading.Event()
    daemon = start(load=lambda: gate.wait(10) and None)
    began = time.monotonic()
    daemon.stop()
    assert time.monotonic() - began < 1
    assert not os.path.exists(socket_path)
    gate.set()
