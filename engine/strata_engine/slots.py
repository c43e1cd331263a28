"""Slots: which tokens the cells of each slot hold, and which free slot a prompt should take."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .rows import Int32

_EMPTY = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Slot:
    """One sequence's worth of cells. `record` is what a free slot holds: the token of cell i is record[i]."""

    index: int
    record: Int32 = field(default_factory=lambda: _EMPTY)
    used: int = 0  # when it was last given back; 0: never

    def common(self, prompt: Int32) -> int:
        """How many leading tokens of `prompt` the cells hold; never all of them, the last one has to be run."""
        return common_prefix(self.record, prompt[:-1])


class Slots:
    """The free slots of a backend. Not thread-safe: the step loop owns it."""

    def __init__(self, count: int) -> None:
        self._free = [Slot(index) for index in range(count)]
        self._clock = 0

    def __len__(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def take(self, prompt: Int32) -> tuple[Slot, int]:
        """Remove a free slot; returns it and how many leading tokens of `prompt` (not empty) its cells hold.

        The longest common prefix wins, then the shortest record. A prefix that is shorter than the rest of its
        record is left alone, so that a shared greeting does not cost somebody a long conversation, and the least
        recently used slot serves instead; except where it spares the whole prompt, which is the same question again.
        Raises IndexError if no slot is free.
        """
        if not self._free:
            raise IndexError("no slot is free")
        common = {slot.index: slot.common(prompt) for slot in self._free}
        best = max(self._free, key=lambda slot: (common[slot.index], -len(slot.record), -slot.used))
        shared = common[best.index]
        if shared < len(best.record) - shared and shared < len(prompt) - 1:
            best = min(self._free, key=lambda slot: slot.used)
        self._free.remove(best)
        return best, common[best.index]

    def give_back(self, slot: Slot, record: Int32) -> None:
        """Free `slot`; its cells 0..len(record)-1 hold `record`, which may be a view that no one writes to again."""
        self._clock += 1
        slot.record, slot.used = record, self._clock
        self._free.append(slot)

    def drop(self, slot: Slot) -> None:
        """Free `slot` whose cells may hold anything."""
        self.give_back(slot, _EMPTY)


def common_prefix(a: Int32, b: Int32) -> int:
    """Length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n
