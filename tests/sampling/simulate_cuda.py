"""Run the GPU sampler's kernels in numba's simulator, on tiny blocks, against the reference. Prints what differs.

    NUMBA_ENABLE_CUDASIM=1 python simulate_cuda.py SEED TRIALS VOCAB...    (no trials: tokens of the step before)

A process of its own, because the simulator has to be chosen before numba is imported.
"""

import sys
from types import SimpleNamespace

import numpy as np

from strata_engine.params import LOGPROBS_MAX, GenParams
from strata_engine.rows import Choice, Draw
from strata_engine.sampling.fixtures import reference
from strata_engine.sampling.host import Packer
from strata_engine.sampling.kernels import simulated
from strata_engine.sampling.reference import choose_reference
from strata_engine.sampling.tables import CAPACITY, ENTRIES, HEAD, LISTS, Outcome, Requests, Scratch, Shape
from strata_engine.sampling.trials import difference, trial

SHAPE = Shape(threads=16, vectors=2, wide=False)  # segments of 128 logits
CANDIDATES, MERGE = (simulated(name, SHAPE) for name in ("candidates", "merge"))


class Host:
    """Bias lists stay where they are."""

    def upload(self, values):
        return SimpleNamespace(address=values.ctypes.data, values=values)

    def free(self, buffer):
        pass


def choose(logits, draws, ahead=()):
    """A `Choose` that runs in the simulator. `ahead`: the tokens of the step before."""
    rows, vocab = logits.shape
    blocks, packer = SHAPE.blocks(vocab), Packer(vocab, rows, SHAPE, Host())
    words = np.full(SHAPE.words(vocab, rows), -7, np.int32)
    packer.pack(draws, rows, words, first_place=rows)
    scratch = Scratch(
        np.zeros(rows * LISTS * blocks * CAPACITY, np.uint64),
        np.zeros(rows * LISTS * blocks, np.int32),
        np.zeros(rows * blocks * 2, np.float32),
    )
    heads, ids = np.zeros(2 * rows * HEAD, np.int32), np.zeros(2 * rows * LOGPROBS_MAX, np.int32)
    outcome = Outcome(heads, ids, np.zeros(2 * rows * ENTRIES))
    chosen = np.array([*ahead, *[-1] * rows], np.int32)[:rows]
    requests = Requests(words.view(np.float64), words.view(np.float32), words, packer.stride, chosen)
    arguments = logits.ravel(), vocab, requests, scratch, outcome
    CANDIDATES[(blocks, rows), SHAPE.threads](*arguments)
    MERGE[rows, SHAPE.merging.threads](*arguments)
    assert chosen.tolist() == heads[rows * HEAD :: HEAD].tolist()
    return [_choice(draw, rows + row, outcome) for row, draw in enumerate(draws)]


def late_cases():
    """What differs where the step before chose the window's last token and the choice hangs on its being counted."""
    logits = np.zeros((1, 130), np.float32)
    logits[0, [7, 9]] = 3.0, 2.0  # once -0.7 keeps token 7 ahead, twice does not
    for known in ([], [7], [129, 8]):
        for penalty in ({"penalty_freq": 0.7}, {"penalty_freq": 1.5}, {"penalty_present": 1.5}):
            for bias in ((), ((7, 0.1),)):
                params, history = GenParams(**penalty, logit_bias=bias), np.array([*known, 7], np.int32)
                draw = Draw(params, 0, np.array([*known, -1], np.int32))
                wrong = difference(choose(logits, [draw], (7,))[0], reference(logits, [Draw(params, 0, history)])[0])
                if wrong:
                    yield f"late token after {known}: {wrong}: {params}"


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
    for wrong in () if trials else late_cases():
        print(wrong)
        faults += 1
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
