"""Random rows and parameters for a device's sampler, and how its choices differ from another's."""

from __future__ import annotations

import numpy as np

from ..params import GenParams
from ..rows import Choice, Draw, Float32

SIZES = (1, 31, 32, 33, 1000, 49_152, 131_072, 248_320, 262_144)  # vocabularies
TOLERANCE = 1e-5  # of a log-probability


def random_row(rng: np.random.Generator, vocab: int) -> Float32:
    """Logits [vocab] with duplicates, and sometimes NaN, infinities, few values, one value, or in order."""
    logits = rng.standard_normal(vocab, np.float32) * np.float32(rng.choice([0.1, 1.0, 5.0]))
    logits[rng.integers(0, vocab, vocab // 4)] = logits[rng.integers(0, vocab, vocab // 4)]
    match rng.integers(0, 12):
        case 0:
            logits[rng.random(vocab) < rng.choice([0.3, 0.999, 1.0])] = np.nan
        case 1:
            logits[rng.random(vocab) < rng.choice([0.3, 0.999, 1.0])] = -np.inf
        case 2:
            logits = np.round(logits)  # has 0.0 and -0.0
        case 3:
            logits[:] = rng.choice([0.0, -1.0, 3.0])
        case 4:
            logits[rng.integers(0, vocab, 2)] = np.inf
        case 5:
            logits.sort()
        case 6:
            logits += np.float32(rng.choice([-1000.0, 1000.0]))
    return logits


def random_draw(rng: np.random.Generator, row: Float32) -> Draw:
    """Parameters, draw index and a history for a row [vocab]; the history likes the row's largest logits."""
    vocab = len(row)
    likely = np.argpartition(row, -min(vocab, 40))[-min(vocab, 40) :]
    pool = np.concatenate([likely, rng.integers(0, vocab, 40)])
    last_n = int(rng.choice([0, 1, 4, 64, 1000, 4096]))
    biases = int(rng.choice([1, 3, 300])) if rng.random() < 0.25 else 0
    params = GenParams(
        temperature=float(rng.choice([0.0, 1e-9, 0.1, 0.7, 1.0, 1e6])),
        top_p=float(rng.choice([0.0, 0.3, 0.95, 1.0])),
        top_k=int(rng.integers(1, 65)),
        min_p=float(rng.choice([0.0, 1e-6, 0.05, 0.5, 1.0])),
        penalty_repeat=float(rng.choice([0.5, 1.0, 1.0, 1.3, 1e-50])),
        penalty_freq=float(rng.choice([0.0, 0.0, -0.5, 0.3])),
        penalty_present=float(rng.choice([0.0, 0.0, 0.7])),
        penalty_last_n=last_n,
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        logprobs=int(rng.integers(0, 21)) if rng.random() < 0.4 else None,
        logit_bias=tuple((int(i), float(rng.normal())) for i in rng.choice(pool, biases)),
    )
    if rng.random() < 0.1:
        params = GenParams()
    history = rng.choice(pool, rng.integers(0, last_n + 1)) if rng.random() < 0.8 else rng.integers(0, vocab, last_n)
    return Draw(params, int(rng.integers(0, 2**64, dtype=np.uint64)), history.astype(np.int32))


def trial(rng: np.random.Generator, rows: int, vocab: int) -> tuple[Float32, list[Draw]]:
    """Logits [rows, vocab] and as many draws."""
    logits = np.stack([random_row(rng, vocab) for _ in range(rows)])
    return logits, [random_draw(rng, row) for row in logits]


def difference(found: Choice, right: Choice, tolerance: float = TOLERANCE) -> str:
    """How `found` differs from `right`; "" if only log-probabilities do, by no more than `tolerance`."""
    if found.token != right.token:
        return f"token {found.token}, not {right.token}"
    if (found.logprob is None) != (right.logprob is None):
        return f"log-probability {found.logprob}, not {right.logprob}"
    if [i for i, _ in found.top] != [i for i, _ in right.top]:
        return f"alternatives {[i for i, _ in found.top]}, not {[i for i, _ in right.top]}"
    pairs = [*zip(found.top, right.top, strict=True)]
    values = (
        [(found.logprob, right.logprob), *((a, b) for (_, a), (_, b) in pairs)] if right.logprob is not None else []
    )
    wrong = [f"{a}, not {b}" for a, b in values if a != b and not abs((a or 0.0) - (b or 0.0)) <= tolerance]
    return f"log-probability {wrong[0]}" if wrong else ""
