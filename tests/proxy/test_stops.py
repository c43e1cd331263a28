"""Stop strings against every way of cutting the text into pieces."""

from __future__ import annotations

import itertools

import pytest

from strata_proxy.stops import StopStrings


def fed(stops, pieces):
    matcher = StopStrings(stops)
    shown = "".join(matcher.push(piece) for piece in pieces)
    return shown + matcher.flush(), matcher.hit


def cuts(text):
    for marks in itertools.product([False, True], repeat=len(text) - 1):
        piece = text[0]
        pieces = []
        for mark, char in zip(marks, text[1:], strict=True):
            if mark:
                pieces.append(piece)
                piece = ""
            piece += char
        yield [*pieces, piece]


@pytest.mark.parametrize(
    ("stops", "text", "shown"),
    [
        (["END"], "abENDcd", "ab"),
        (["END"], "ENENDx", "EN"),
        (["aab"], "aaab", "a"),
        (["xx"], "abcdEN", "abcdEN"),
        (["END", "\n\n"], "a\n\nEND", "a"),
        (["a"], "a", ""),
        ([], "abc", "abc"),
    ],
)
def test_same_text_however_it_is_cut(stops, text, shown):
    for pieces in cuts(text):
        assert fed(stops, pieces)[0] == shown, pieces


def test_nothing_is_held_without_need():
    matcher = StopStrings(["END"])
    assert matcher.push("abE") == "ab" and matcher.held == 1
    assert matcher.push("x") == "Ex" and matcher.held == 0


def test_the_earliest_stop_wins():
    assert fed(["later", "soon"], ["a soon later"]) == ("a ", "soon")


def test_nothing_comes_after_a_hit():
    matcher = StopStrings(["!"])
    assert matcher.push("a!b") == "a"
    assert matcher.push("c") == "" and matcher.flush() == ""
