"""Run the GPU sampler's kernels in numba's simulator, on tiny blocks, against the reference. Prints what differs.

    NUMBA_ENABLE_CUDASIM=1 python simulate_cuda.py SEED TRIALS VOCAB...

A process of its own, because the simulator has to be chosen before numba is imported.
"""

import sys

import numpy as np

from strata_engine.params import LOGPROBS_MAX
from strata_engine.rows import Choice
from strata_engine.sampling.fixtures import reference
from strata_engine.sampling.host import is_plain, pack, sorted_bias
from strata_engine.sampling.kernels import simulated
from strata_engine.sampling.reference import choose_reference
from strata_engine.sampling.tables import (
    CAPACITY,
    ENTRIES,
    HEAD,
    LISTS,
    RECORD,
    WINDOW_WORDS,
    WORDS,
    Outcome,
    Requests,
    Scratch,
    Shape,
)
from strata_engine.sampling.trials import difference, trial

SHAPE = Shape(threads=16, vectors=2, wide=False)  # segments of 128 logits
CANDIDATES, MERGE, ARG_MAX = (simulated(name, SHAPE) for name in ("candidates", "merge", "arg_max"))


def choose(logits, draws):
    """A `Choose` that runs in the simulator."""
    rows, vocab = logits.shape
    blocks, lists = SHAPE.blocks(vocab), []
    words, windows = np.zeros(rows * WORDS, np.int32), np.zeros(rows * WINDOW_WORDS, np.int32)

    def place(bias):
        lists.append(sorted_bias(bias))
        return tuple(values.ctypes.data for values in lists[-1])

    pack(draws, words.view(RECORD), windows, place)
    scratch = Scratch(
        np.zeros(rows * LISTS * blocks * CAPACITY, np.uint64),
        np.zeros(rows * LISTS * blocks, np.int32),
        np.zeros(rows * blocks * 2, np.float32),
        np.zeros(rows, np.int32),
    )
    heads, ids = np.zeros(rows * HEAD, np.int32), np.zeros(rows * LOGPROBS_MAX, np.int32)
    outcome = Outcome(np.full(rows, -1, np.int32), heads, ids, np.zeros(rows * ENTRIES))
    requests = Requests(words.view(np.float64), words.view(np.float32), words, windows)
    arguments = logits.ravel(), vocab, requests, scratch, outcome
    if is_plain(draws):
        ARG_MAX[(blocks, rows), SHAPE.threads](*arguments)
    else:
        CANDIDATES[(blocks, rows), SHAPE.threads](*arguments)
        MERGE[rows, SHAPE.merging.threads](*arguments)
    assert not scratch.tickets.any() and outcome.tokens.tolist() == heads[::HEAD].tolist()
    return [_choice(draw, row, outcome) for row, draw in enumerate(draws)]


def _choice(draw, row, outcome):
    token, choose.kept, filled = (int(v) for v in outcome.heads[HEAD * row : HEAD * row + 3])
    if draw.params.logprobs is None:
        return Choice(token)
    logprob, *values = outcome.logprobs[row * ENTRIES : row * ENTRIES + filled + 1].tolist()
    ids = outcome.ids[row * LOGPROBS_MAX : row * LOGPROBS_MAX + filled].tolist()
    return Choice(token, logprob, tuple(zip(ids, values, strict=True)))


def main(seed, trials, vocabs):
    """Compare `trials` rows at each vocabulary with the CPU's sampler; the number that differ."""
    faults = 0
    for vocab in vocabs:
        rng = np.random.default_rng(seed + vocab)
        for _ in range(trials):
            logits, draws = trial(rng, 1, vocab)
            wrong = difference(choose(logits, draws)[0], reference(logits, draws)[0])
            kept = choose_reference(logits[0], draws[0].params, draws[0].history, draws[0].index).kept
            wrong = wrong or ("" if choose.kept == kept else f"kept {choose.kept}, not {kept}")
            if wrong:
                print(f"vocabulary {vocab}: {wrong}: {draws[0].params}")
                faults += 1
    return faults


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(1 if main(int(sys.argv[1]), int(sys.argv[2]), [int(v) for v in sys.argv[3:]]) else 0)
