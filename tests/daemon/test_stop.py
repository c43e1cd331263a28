"""STOP: which GEN it ends."""

import asyncio

from strata_engine.connection import Turn
from strata_engine.params import GenParams
from strata_engine.request import Request


def reason(done: str) -> str:
    return done.split()[5]


def test_stop_right_behind_gen_cancels_it(start, connect):
    start()
    client = connect()
    client.socket.sendall(b"GEN 1000 10,11\nSTOP\n")
    assert client.answer() == ["DONE 0 2 0.0 0.0 cancel 0 0 0"]


def test_stop_ends_a_running_gen(start, connect):
    daemon = start()
    client = connect()
    client.send("GEN 5000 10")
    while not client.line().startswith("T"):
        pass
    client.send("STOP")
    assert reason(client.answer()[-1]) == "cancel"
    assert len(daemon.scheduler.ended) == 1


def test_stop_with_nothing_to_stop_is_silent(start, connect):
    start()
    client = connect()
    client.send("STOP", "PING")
    assert client.line() == "PONG"


def test_stop_does_not_reach_a_later_gen(start, connect):
    start()
    client = connect()
    client.socket.sendall(b"STOP\nGEN 2 10\n")
    assert client.tokens() == [11, 12]


def test_stop_ends_the_oldest_and_leaves_the_next(start, connect):
    start()
    client = connect()
    client.socket.sendall(b"GEN 1000 10\nGEN 2 20\nSTOP\n")
    assert reason(client.answer()[-1]) == "cancel"
    assert client.tokens() == [21, 22]


def test_each_stop_ends_one(start, connect):
    start()
    client = connect()
    client.socket.sendall(b"GEN 1000 10\nGEN 1000 20\nSTOP\nSTOP\nGEN 1 30\n")
    assert [reason(client.answer()[-1]) for _ in range(3)] == ["cancel", "cancel", "length"]


def test_a_refused_gen_does_not_use_up_a_stop(start, connect):
    start()
    client = connect()
    client.send("GEN 1000 10")
    while not client.line().startswith("T"):
        pass
    client.socket.sendall(b"GEN 5 oops=1 1\nGEN 1000 20\nSTOP\nSTOP\n")
    assert reason(client.answer()[-1]) == "cancel"
    assert client.answer() == ["ERR BAD_KEY no key 'oops'"]
    assert reason(client.answer()[-1]) == "cancel"


def test_a_stop_handed_on_by_a_refused_gen_does_not_reach_a_later_gen(start, connect):
    start()
    client = connect()
    client.send("GEN 1000 10")
    while not client.line().startswith("T"):
        pass
    client.socket.sendall(b"STOP\nGEN 5 oops=1 1\nSTOP\nGEN 2 30\n")
    client.answer()
    assert client.answer() == ["ERR BAD_KEY no key 'oops'"]
    assert client.tokens() == [31, 32]


async def test_a_finished_gen_whose_turn_is_not_over_yet_is_no_longer_stoppable():
    turn = Turn(1, request=Request(1, GenParams(), (10,)), finished=asyncio.get_running_loop().create_future())
    assert turn.stoppable
    turn.finished.set_result(None)
    assert not turn.stoppable


def test_stop_after_done_does_not_reach_the_next_gen(start, connect):
    start()
    client = connect()
    for _ in range(20):
        client.send("GEN 1 10")
        client.answer()
        client.send("STOP")
    client.send("GEN 2 20")
    assert client.tokens() == [21, 22]


def test_stop_touches_its_own_connection_only(start, connect):
    start()
    one, other = connect(), connect()
    one.send("GEN 100 10")
    other.send("STOP", "PING")
    assert other.line() == "PONG"
    assert len(one.tokens()) == 100


def test_stop_while_waiting_for_a_slot(start, connect, until):
    daemon = start(slots=1)
    holder, waiter = connect(), connect()
    holder.send("GEN 5000 10")
    until(lambda: daemon.scheduler.active() == 1)
    waiter.send("GEN 5000 20")
    until(lambda: daemon.scheduler.active() == 2)
    waiter.send("STOP")
    assert waiter.answer()[-1].startswith("DONE 0 1 ")
    assert daemon.scheduler.active() == 1
