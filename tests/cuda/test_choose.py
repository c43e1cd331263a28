"""How a step is divided into graphs, and its draws between the arg-max and the sampling chain, without a GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the cuda extra")
pytest.importorskip("numba.cuda", reason="needs the cuda extra")

from cuda_recorder import Recorder, queueing

from strata_engine.backends.cuda.inputs import CHAINED, MOST_WORDS, PLACE
from strata_engine.gpu.device import DeviceError
from strata_engine.params import GenParams
from strata_engine.rows import Choice, Draw, Rows

GREEDY = Draw(GenParams(), 0, np.empty(0, np.int32))
SAMPLED = Draw(GenParams(temperature=1.0, seed=1), 0, np.empty(0, np.int32))
SCORED = Draw(GenParams(logprobs=0), 0, np.empty(0, np.int32))


def decoding(count: int) -> Rows:
    each = np.arange(count, dtype=np.int32)
    return Rows(each, np.zeros(count, np.int32), each, each)


def reading(count: int, wanted: int) -> Rows:
    each = np.arange(count, dtype=np.int32)
    return Rows(np.zeros(count, np.int32), each, each, each[count - wanted :])


def launched(recorder: Recorder) -> list[str]:
    return [call for call in recorder.calls if call.split()[0] not in ("copy", "wait", "raise")]


@pytest.mark.parametrize(
    ("rows", "draws", "graphs"),
    [
        (decoding(3), [GREEDY] * 3, ["greedy 4"]),
        (decoding(3), [SAMPLED, GREEDY, SCORED], ["chained 4"]),
        (reading(8, 0), [], ["layers 8"]),
        (reading(8, 1), [GREEDY], ["layers 8", "head 1"]),
        (reading(7, 3), [GREEDY, GREEDY, SCORED], ["layers 8", "head 4", "chain 4"]),
    ],
)
def test_a_step_is_as_few_graphs_as_can_be(rows, draws, graphs) -> None:
    recorder = Recorder()
    queueing(recorder).queue(rows, draws)
    assert launched(recorder) == graphs
    assert recorder.calls.count("copy") == 1


def test_greedy_rows_alone_take_the_arg_max() -> None:
    backend = queueing(Recorder())
    backend.queue(decoding(3), [GREEDY] * 3)
    assert backend.take() == [Choice(0), Choice(1), Choice(2)]


def test_one_row_that_is_not_plain_takes_the_step_through_the_chain() -> None:
    recorder = Recorder()
    backend = queueing(recorder)
    backend.queue(decoding(3), [SAMPLED, GREEDY, SCORED])
    assert backend.take() == [Choice(100), Choice(101), Choice(102)]
    assert recorder.packed == [(3, 4, 0)]


def test_two_steps_under_way_keep_apart_what_they_read_and_write() -> None:
    recorder = Recorder()
    backend = queueing(recorder)
    backend.queue(decoding(2), [GREEDY] * 2)
    backend.queue(decoding(2), [SAMPLED] * 2)
    assert [words[PLACE] for words in backend._inputs] == [0, backend.max_rows]
    assert [words[CHAINED] for words in backend._inputs] == [0, 1]
    assert backend.take() == [Choice(0), Choice(1)]
    backend.queue(decoding(1), [GREEDY])
    assert backend.take() == [Choice(200), Choice(201)]
    assert backend.take() == [Choice(0)]
    with pytest.raises(RuntimeError, match="under way"):
        for _ in range(3):
            backend.queue(decoding(1), [GREEDY])


def test_a_step_that_is_refused_takes_no_turn() -> None:
    recorder = Recorder()
    backend = queueing(recorder)
    backend.queue(decoding(1), [GREEDY])
    packing = recorder.pack
    recorder.pack = refuse  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="not known"):
        backend.queue(decoding(1), [SAMPLED])
    recorder.pack = packing  # type: ignore[method-assign]
    backend.queue(decoding(1), [SAMPLED])
    assert [backend.take(), backend.take()] == [[Choice(0)], [Choice(200)]]


def refuse(draws, rows, out, turn) -> int:
    raise ValueError("two tokens are not known")


def test_a_step_is_awaited_by_its_own_flag() -> None:
    recorder = Recorder()
    backend = queueing(recorder)
    backend.queue(decoding(1), [GREEDY])
    backend.queue(decoding(1), [GREEDY])
    backend.take()
    assert recorder.calls[-1] == "wait even"
    backend.take()
    assert recorder.calls[-1] == "wait odd"


def test_the_requests_of_a_step_in_parts_stand_where_every_graph_finds_them() -> None:
    recorder = Recorder()
    backend = queueing(recorder)
    starts = []
    backend._sampler.pack = lambda draws, rows, out, turn: starts.append(len(out)) or 4  # type: ignore[method-assign]
    backend.queue(decoding(4), [SAMPLED] * 4)
    backend.queue(reading(4, 1), [SAMPLED])
    whole = len(backend._inputs[0])
    assert starts == [whole - backend._layouts[4].words, whole - MOST_WORDS]


def test_a_choice_after_a_forward_runs_the_chain_apart() -> None:
    recorder = Recorder()
    backend = queueing(recorder)
    backend.forward(decoding(3))
    assert backend.choose([GREEDY] * 3) == [Choice(0), Choice(1), Choice(2)]
    assert backend.choose([SAMPLED] * 3) == [Choice(100), Choice(101), Choice(102)]
    assert launched(recorder) == ["greedy 4", "chain 4"]


def test_a_fault_ends_the_process_whichever_call_meets_it(monkeypatch, capfd) -> None:
    def fail(flag: str) -> None:
        raise DeviceError("CUDA: CUDA_ERROR_ILLEGAL_ADDRESS")

    def leave(code: int) -> None:
        raise SystemExit(code)

    recorder = Recorder()
    backend = queueing(recorder)
    backend.queue(decoding(1), [GREEDY])
    recorder.wait_for = fail  # type: ignore[method-assign]
    monkeypatch.setattr(os, "_exit", leave)
    with pytest.raises(SystemExit, match="70"):
        backend.take()
    assert capfd.readouterr().err == "strata-engine: the GPU failed: CUDA: CUDA_ERROR_ILLEGAL_ADDRESS\n"


@pytest.mark.parametrize(("rows", "graphs"), [(4, ["greedy 4"]), (7, ["layers 8", "head 8"])])
def test_a_step_is_timed_by_its_graphs(rows: int, graphs: list[str]) -> None:
    recorder = Recorder()
    backend = queueing(recorder)
    del backend._graphs["greedy", 8]  # as for more rows than one graph serves
    assert backend.graph_ms(rows, repeats=3) == 2.0
    assert recorder.calls == 3 * graphs
