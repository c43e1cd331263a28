"""Progress: lines in a log, a bar on a terminal."""

import io

from strata_engine.progress import BarProgress, LineProgress, NoProgress, open_progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_plain_lines_begin_and_end_a_stage():
    stream = io.StringIO()
    with open_progress(stream).stage("compiling kernels", total=12) as stage:
        stage.advance(1, "matmul")
    first, last = stream.getvalue().splitlines()
    assert first == "compiling kernels: started"
    assert last.startswith("compiling kernels: done in ")


def test_plain_lines_come_now_and_then(monkeypatch):
    monkeypatch.setattr("strata_engine.progress.LINE_SECONDS", 0.0)
    stream = io.StringIO()
    with LineProgress(stream).stage("compiling kernels", total=12) as stage:
        stage.advance(2, "matmul")
    assert "compiling kernels: 2/12 matmul" in stream.getvalue().splitlines()


def test_a_terminal_gets_a_bar():
    stream = Terminal()
    progress = open_progress(stream)
    assert isinstance(progress, BarProgress)
    with progress.stage("loading", total=4) as stage:
        stage.advance(4, "weights")
    assert "loading" in stream.getvalue()


def test_no_progress_is_silent(capfd):
    with NoProgress().stage("loading") as stage:
        stage.advance()
    assert capfd.readouterr() == ("", "")
