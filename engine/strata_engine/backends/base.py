"""The interface that every device implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..rows import Choice, Draw, Float32, Rows


class Backend(Protocol):
    """A loaded model on a device. Not thread-safe: one thread (the step loop) runs its steps.

    Its calls release the GIL while they wait or compute. A row's logits depend on the tokens before it and on nothing
    else: the same bits in any company and any chunking.
    """

    device: str  # "cpu" or "cuda"
    vocab: int
    context: int  # cells a slot: positions 0..context-1
    slots: int
    max_rows: int  # most rows a step
    feeds: bool  # True: it is a `Feeding`
    chunk: int  # prompt rows a step that read fast and yet keep other requests' tokens flowing

    def forward(self, rows: Rows) -> None:
        """Write the cells of `rows` and compute the logits of the wanted ones; they stay valid until the next call."""

    def choose(self, draws: Sequence[Draw]) -> list[Choice]:
        """One choice for each wanted row of the last forward, in order (len(draws) == len(rows.wanted))."""
        ...

    def logits(self) -> Float32:
        """The logits of the newest step, [wanted, vocab], a copy on the host."""
        ...

    def close(self) -> None:
        """Give memory and threads back. No call may follow."""


class Feeding(Backend, Protocol):
    """A backend on which a step can be queued before the choices of the one ahead are taken.

    Its rows, and the last token of its penalty windows, may then be tokens that the host does not know yet: -1 - i
    stands for the choice for wanted row i of the step ahead.
    """

    def queue(self, rows: Rows, draws: Sequence[Draw]) -> None:
        """Begin a step: the forward over `rows`, a choice by each of `draws`, one a wanted row. Does not wait.

        At most two steps may be under way. Draws and rows are read before this returns.
        """

    def take(self) -> list[Choice]:
        """Wait for the oldest step under way; its choices. It is not under way any more, also where this raises."""
        ...
