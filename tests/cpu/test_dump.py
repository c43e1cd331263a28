"""STRATA_DUMP_FIRST_LOGITS: the first logits of each request."""

import numpy as np
import pytest
from feeding import Text, random_tokens, read

from strata_engine.backends import BackendError
from strata_engine.backends.dump import VARIABLE, FirstLogitsDump, dumping
from strata_engine.params import GenParams
from strata_engine.rows import Draw

pytestmark = pytest.mark.xdist_group("cpu")
NOTHING = np.empty(0, np.int32)


def test_only_first_tokens_are_dumped(tiny, start, tmp_path):
    model = tiny(vocab=33, width=32, ff=32, layers=1)
    file = tmp_path / "logits"
    backend = FirstLogitsDump(start(model), str(file))
    for index in (0, 1, 0):
        logits = read(backend, Text(0, random_tokens(3 + index, 33), wanted=[2 + index]))[0]
        backend.choose([Draw(GenParams(), index, NOTHING)])
    dumped = np.fromfile(file, np.float32).reshape(-1, 33)
    assert len(dumped) == 2 and np.array_equal(dumped[1], logits[0])


def test_without_the_variable_nothing_is_wrapped(tiny, start, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    backend = start(tiny())
    assert dumping(backend) is backend


def test_a_file_that_cannot_be_written_stops_the_start(tiny, monkeypatch):
    from strata_engine.backends import open_backend
    from strata_engine.progress import NoProgress

    monkeypatch.setenv(VARIABLE, "/proc/nowhere/file")
    with pytest.raises(BackendError, match="/proc/nowhere/file"):
        open_backend(tiny(), device="cpu", context=64, slots=1, threads=1, progress=NoProgress())
