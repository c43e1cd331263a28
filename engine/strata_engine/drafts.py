"""Drafts: guesses at the next tokens by prompt lookup, and the policy of how many of them a window should carry.

Prompt lookup: where the last tokens stood earlier in prompt + output, what followed them there is the draft. A draft
is only ever compared with the target's own choice, so nothing here can change an answer, only its speed. That is
why the policy may look at the clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

LENGTHS = (8, 4, 2)  # suffix lengths that are looked up, longest first
_PRIORS = {8: 0.9, 4: 0.65, 2: 0.4}  # accept rates before anything is known, as chats of all kinds have them
_PRIOR_WEIGHT = 2  # how many drafts a prior counts for: the first few of a request tell more than it does
_LEARN = 0.08  # least weight of one accepted or rejected draft in its accept rate
_WORTH = 1.06  # drafts have to promise this much more than none


class PromptLookup:
    """Finds the latest earlier place of the longest matching suffix; O(1) a token, nothing is scanned again.

    For every length in `LENGTHS` a table maps the last n tokens, packed into one exact integer key, to the index of
    the token that followed them last. A suffix enters the tables when its next token arrives, hence a lookup never
    finds the suffix itself.
    """

    __slots__ = ("_bits", "_mask", "_tables", "_tail", "_tokens")

    def __init__(self, vocab: int) -> None:
        self._bits = vocab.bit_length()  # ids are packed as id + 1: 0 means that there is no token yet
        self._mask = (1 << self._bits * max(LENGTHS)) - 1
        self._tables: list[tuple[int, int, dict[int, int]]] = [(n, (1 << self._bits * n) - 1, {}) for n in LENGTHS]
        self._tail = 0
        self._tokens: list[int] = []

    def __len__(self) -> int:
        """How many tokens were read."""
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Read the next tokens of prompt + output."""
        tail, bits, mask, known = self._tail, self._bits, self._mask, self._tokens
        for token in tokens:
            following = len(known)
            for _, part, table in self._tables:
                table[tail & part] = following
            known.append(token)
            tail = (tail << bits | token + 1) & mask
        self._tail = tail

    def draft(self, most: int) -> tuple[int, list[int]]:
        """Length of the longest suffix that stood before (0: none) and the `most` tokens that followed it there.

        Where the place is so near that its continuation runs into the end of the text, it goes on as a loop.
        """
        tail = self._tail
        for length, part, table in self._tables:
            place = table.get(tail & part)
            if place is not None:
                return length, self._continue(place, most)
        return 0, []

    def _continue(self, place: int, most: int) -> list[int]:
        found = self._tokens[place : place + most]
        if len(found) < most:
            period = len(found)
            found = (found * (most // period + 1))[:most]
        return found


class AcceptRates:
    """How likely a draft is accepted, by the length of the match before it; learnt from every token of a request.

    Proposals that were not put into a window count too: the token that came is compared with them. So a request
    notices at no cost that its text has begun, or ceased, to repeat.
    """

    __slots__ = ("_rate", "_seen")

    def __init__(self) -> None:
        longest = max(LENGTHS)
        self._seen = [_PRIOR_WEIGHT] * (longest + 1)
        self._rate = [0.0] * (longest + 1)  # [match length]; only the entries of LENGTHS are used
        for length, rate in _PRIORS.items():
            self._rate[length] = rate

    def learn(self, length: int, proposed: Sequence[int], came: Sequence[int]) -> None:
        """`proposed` was the draft after a match of `length`; the tokens that came instead are `came`."""
        rate, seen = self._rate, self._seen
        for i, (guess, token) in enumerate(zip(proposed, came, strict=False)):
            known = _CLASS[length + i]
            seen[known] += 1
            rate[known] += max(_LEARN, 1.0 / seen[known]) * ((guess == token) - rate[known])
            if guess != token:
                return

    def chance(self, length: int) -> float:
        """How likely the first draft after a match of `length` is accepted."""
        return self._rate[_CLASS[length]]

    def width(self, length: int, most: int, tokens: float, cost: Sequence[float], rows: int) -> tuple[int, float]:
        """How many of `most` drafts to offer and how many of them to expect accepted.

        The step has `rows` rows without them, `tokens` tokens are expected of it, and r rows take cost[r].
        """
        best, best_gain, gain, chance = 0, 0.0, 0.0, 1.0
        bar = tokens / cost[rows] * _WORTH
        for i in range(most):
            chance *= self._rate[_CLASS[length + i]]
            gain += chance
            speed = (tokens + gain) / cost[rows + i + 1]
            if speed > bar:
                best, best_gain, bar = i + 1, gain, speed
        return best, best_gain


# _CLASS[n]: the longest looked-up length that a match of n tokens contains; an accepted draft lengthens the match.
_CLASS = [max((length for length in LENGTHS if length <= n), default=min(LENGTHS)) for n in range(max(LENGTHS) + 64)]


class StepTimes:
    """What a step of r rows takes, measured as the steps go by, interpolated in between.

    Noise only ever slows a step down, and more rows never take less time: so a time falls faster than it rises, and
    no row count is dearer than a larger one. A count that was not seen for `_STALE` steps is forgotten, else one slow
    step could stop a width from ever being tried again.
    """

    _EXACT = 16  # counts up to here have a measurement of their own, larger ones share one for each half octave
    _REFRESH = 16
    _STALE = 1024
    _GUESS = 0.1  # what a further row costs, in parts of the first, until larger steps were seen

    def __init__(self, max_rows: int) -> None:
        self.cost: list[float] = (1.0 + self._GUESS * np.arange(-1, max_rows)).tolist()  # [rows]: seconds
        self._rows = np.arange(max_rows + 1)
        self._seen: dict[int, tuple[float, int]] = {}  # row count -> (seconds, step)
        self._steps = 0
        self.host = 0.0  # seconds of the host for each token that a step gives, before it queues the next step

    def record_host(self, tokens: int, seconds: float) -> None:
        """Between taking a step that gave `tokens` and queueing the next one `seconds` went by."""
        new = seconds / tokens
        self.host += (0.4 if new < self.host else 0.1) * (new - self.host)

    def record(self, rows: int, seconds: float) -> None:
        """A step of `rows` rows took `seconds`."""
        self._steps += 1
        knot = rows if rows <= self._EXACT else self._round(rows)
        known = self._seen.get(knot)
        if known is None:
            self._seen[knot] = (seconds, self._steps)
            self._refresh()
            return
        old = known[0]
        new = old + (0.4 * (seconds - old) if seconds < old else 0.1 * (min(seconds, 2 * old) - old))
        self._seen[knot] = (new, self._steps)
        if self._steps % self._REFRESH == 0:
            self._refresh()

    def _round(self, rows: int) -> int:
        octave = 1 << (rows.bit_length() - 1)
        knot = octave if rows < octave * 5 // 4 else octave * 3 // 2 if rows < octave * 7 // 4 else octave * 2
        return min(knot, len(self._rows) - 1)

    def _refresh(self) -> None:
        oldest = self._steps - self._STALE
        self._seen = {knot: seen for knot, seen in sorted(self._seen.items()) if seen[1] > oldest}
        knots = list(self._seen)
        times = np.array([seconds for seconds, _ in self._seen.values()])
        times = np.minimum.accumulate(times[::-1])[::-1]
        first = times[0] / (1 + self._GUESS * (knots[0] - 1))  # a guess unless one row was seen
        beyond = times[-1] + first * self._GUESS * (len(self._rows) - knots[-1])
        cost = np.interp(self._rows, [1, *knots, len(self._rows)], [first, *times, beyond])
        self.cost = np.maximum(cost, 1e-9).tolist()
