"""Reading texts into the slots of a backend in steps of any size, alone or beside others, for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from strata_engine.rows import Rows

Float32 = NDArray[np.float32]


@dataclass
class Text:
    """Tokens read into a slot from position `at` on, at most `chunk` a step."""

    slot: int
    tokens: Sequence[int]
    chunk: int = 512
    at: int = 0
    wanted: Sequence[int] | None = None  # positions whose logits are kept; all if None
    logits: list[Float32] = field(default_factory=list)

    def step(self) -> range:
        """The positions of the next step."""
        start, self.at = self.at, min(self.at + self.chunk, len(self.tokens))
        return range(start, self.at)


def read(backend, *texts: Text) -> list[Float32]:
    """Read all texts, side by side in each step; returns each one's wanted logits [wanted, vocab]."""
    while any(text.at < len(text.tokens) for text in texts):
        rows = [(text, position) for text in texts for position in text.step()]
        wanted = [i for i, (text, position) in enumerate(rows) if text.wanted is None or position in text.wanted]
        backend.forward(
            Rows(
                np.array([text.slot for text, _ in rows], np.int32),
                np.array([position for _, position in rows], np.int32),
                np.array([text.tokens[position] for text, position in rows], np.int32),
                np.array(wanted, np.int32),
            )
        )
        for i, row in zip(wanted, backend.logits(), strict=True):
            rows[i][0].logits.append(row)
    return [np.array(text.logits) for text in texts]


def random_tokens(count: int, vocab: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def others(vocab: int, chunks: Mapping[int, int], length: int) -> list[Text]:
    """Texts for other slots, {slot: chunk}, about `length` long, of other tokens; only the last logits are kept."""
    return [
        Text(slot, random_tokens(length + slot, vocab, seed=slot), chunk, wanted=[length + slot - 1])
        for slot, chunk in chunks.items()
    ]
