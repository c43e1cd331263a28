"""What goes into a step and what comes out: rows, draws, choices.

A *row* is (slot, position, token). A prompt chunk, a verify window and eight requests decoding are all rows of
one forward; logits are computed only for the rows that are *wanted*.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .params import GenParams
from .request import Choice as Choice

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclass(slots=True)
class Rows:
    """The rows of one step. Rows of one slot stand in ascending position, without gaps."""

    slot: Int32  # [n] 0..slots-1
    position: Int32  # [n] 0..context-1: the cell that the row's keys and values are written to
    token: Int32  # [n] 0..vocab-1; -1 - i: the token chosen for wanted row i of the step before (base.Feeding)
    wanted: Int32  # [m] ascending indexes of the rows whose logits are needed

    def __len__(self) -> int:
        return len(self.token)


@dataclass(slots=True)
class Draw:
    """What the sampler needs besides the logits of one wanted row."""

    params: GenParams  # .seed is never None on a sampled request
    index: int  # draw index: the position of the token in the output
    # [<= penalty_last_n] the penalty window, oldest first; empty if params.penalised is False. The last may be below 0
    # as in Rows.token.
    history: Int32
