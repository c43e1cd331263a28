"""Which free slot a prompt takes, and how much of it is there already."""

from __future__ import annotations

import numpy as np
import pytest

from strata_engine.slots import Slots, common_prefix


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def filled(*records: np.ndarray) -> Slots:
    """Slots that were given back in this order."""
    slots = Slots(len(records))
    taken = [slots.take(tokens(1))[0] for _ in records]
    for slot, record in zip(taken, records, strict=True):
        slots.give_back(slot, record)
    return slots


@pytest.mark.parametrize(
    ("a", "b", "right"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 9, 3], 1), ([5], [6], 0)]
)
def test_common_prefix(a, b, right):
    assert common_prefix(tokens(*a), tokens(*b)) == common_prefix(tokens(*b), tokens(*a)) == right


def test_the_longest_prefix_wins():
    slots = filled(tokens(1, 2, 3), tokens(1, 2, 3, 4), tokens(1, 2))
    slot, reused = slots.take(tokens(1, 2, 3, 4, 5))
    assert (slot.record.tolist(), reused) == ([1, 2, 3, 4], 4)


def test_the_last_prompt_token_is_always_run():
    assert filled(tokens(1, 2, 3)).take(tokens(1, 2, 3))[1] == 2


def test_without_a_prefix_the_least_recently_used_goes():
    slots = filled(tokens(7), tokens(8), tokens(9))
    assert [slots.take(tokens(1, 2))[0].record.tolist() for _ in range(3)] == [[7], [8], [9]]


def test_an_unused_slot_goes_before_a_used_one():
    slots = Slots(2)
    slots.give_back(slots.take(tokens(1))[0], tokens(7))
    assert len(slots.take(tokens(1))[0].record) == 0


def test_a_short_prefix_does_not_cost_a_long_conversation():
    talk = np.arange(100, dtype=np.int32)
    slots = filled(tokens(50), talk)
    slot, reused = slots.take(np.r_[talk[:10], tokens(7, 7, 7)].astype(np.int32))
    assert (slot.record.tolist(), reused) == ([50], 0)


def test_the_same_question_again_takes_the_slot_of_its_long_answer():
    talk = np.arange(100, dtype=np.int32)
    assert filled(tokens(50), talk).take(talk[:10])[1] == 9


def test_a_dropped_slot_is_never_reused():
    slots = filled(tokens(1, 2, 3))
    slots.drop(slots.take(tokens(1, 2, 3))[0])
    assert slots.take(tokens(1, 2, 3))[1] == 0


def test_no_free_slot_is_an_error():
    slots = Slots(1)
    slots.take(tokens(1))
    with pytest.raises(IndexError, match="free"):
        slots.take(tokens(1))
