"""The default model's logits compared with == over chunks and company."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from feeding import Text, others, read

pytestmark = pytest.mark.xdist_group("real")
CASE = json.loads((Path(__file__).parents[1] / "data/smollm2_greedy.json").read_text())["cases"][1]
TOKENS = [*CASE["prompt_ids"], *CASE["greedy_ids"]]
WANTED = range(len(TOKENS) - 8, len(TOKENS))


@pytest.fixture(scope="module")
def expected(backend):
    return read(backend, Text(0, TOKENS, wanted=WANTED))[0]


@pytest.mark.parametrize(("chunk", "company"), list(itertools.product([1, 7, 32, 512], [False, True])))
def test_chunks_and_company(backend, expected, chunk, company):
    beside = others(backend.vocab, {1: 5, 2: 40, 3: 1}, 60) if company else []
    found = read(backend, *beside, Text(0, TOKENS, chunk, wanted=WANTED))[-1]
    assert np.array_equal(found, expected)


def test_a_window_of_drafts(backend, expected):
    read(backend, Text(3, TOKENS[:-8], wanted=[]))
    assert np.array_equal(read(backend, Text(3, TOKENS, at=len(TOKENS) - 8))[0], expected)
