"""What a backend of the default model must agree on with the stored float64 forward, case by case."""

import json
from pathlib import Path

import numpy as np
import pytest
from feeding import Text, read

CASES = json.loads((Path(__file__).parent / "data/smollm2_greedy.json").read_text())["cases"]
MARGIN = 0.01  # below, the float64 forward itself is undecided
ERROR = 0.01


def logsumexp(logits):
    highest = logits.astype(np.float64).max()
    return highest + np.log(np.exp(logits - highest).sum())


def first_logits(backend, case):
    prompt = case["prompt_ids"]
    return read(backend, Text(0, prompt, wanted=[len(prompt) - 1]))[0][0]


def check_first_logits(backend, case, error=ERROR):
    logits = first_logits(backend, case)
    ids, expected = zip(*case["exact_first_top20"], strict=True)
    assert logits[list(ids)] == pytest.approx(np.array(expected), abs=error)
    assert logsumexp(logits) == pytest.approx(case["exact_first_logsumexp"], abs=error)


def check_greedy_tokens(backend, case):
    """The same ids, up to a step that the float64 forward leaves undecided."""
    tokens, token = list(case["prompt_ids"]), None
    for position, (expected, margin) in enumerate(
        zip(case["exact_greedy_ids"], case["exact_greedy_margins"], strict=True)
    ):
        start = 0 if token is None else len(tokens) - 1
        token = int(read(backend, Text(1, tokens, at=start, wanted=[len(tokens) - 1]))[0][0].argmax())
        if token != expected:
            assert margin < MARGIN, f"step {position}"
            return
        tokens.append(token)


def check_every_step(backend, case):
    """Arg-max and margin at each step of another engine's text, read as one prompt."""
    fed, prompt = case["greedy_ids"], case["prompt_ids"]
    tokens = [*prompt, *fed][:-1]
    logits = read(backend, Text(2, tokens, wanted=range(len(prompt) - 1, len(tokens))))[0]
    two = np.sort(logits, axis=1)[:, -2:]
    margins = np.array(case["exact_margins"])
    assert two[:, 1] - two[:, 0] == pytest.approx(margins, abs=2 * ERROR)
    decided = margins >= MARGIN
    assert np.array_equal(logits.argmax(axis=1)[decided], np.array(case["exact_argmax"])[decided])
