"""One running request: its tokens, the rows it needs next, and what becomes of the choices made for them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .drafts import AcceptRates, PromptLookup
from .params import DRAFT_MAX
from .request import Done, Event, PromptProgress, Reason, Request
from .rows import Choice, Draw, Int32
from .slots import Slot, Slots

Sink = Callable[[Event], None]

_NO_HISTORY = np.empty(0, np.int32)
_INDEX_TOKENS = 1024  # most tokens that a step enters into a lookup: a long reused prefix must not hold a step up


@dataclass(frozen=True, slots=True)
class Model:
    """What a request has to know of the model and the engine's defaults."""

    vocab: int
    eos: frozenset[int]
    draft: int  # most drafts a window where the request does not say


class Generation:
    """A request in a slot.

    tokens[:size] is prompt + output; cells 0..cells-1 of the slot hold tokens[:cells]. What lies between, and the
    drafts that stand in tokens[size:], are the next rows. A penalty history is a slice of `tokens`, drafts included,
    so nothing is copied. `tokens` is never written below `size`.

    While a step with rows of it is under way (`sent`), the next rows are those behind them: `ahead` cells are being
    written, and where the step gives a token, what stands for it (rows.Rows) holds its place in tokens[size].
    """

    __slots__ = (
        "_end", "_history", "_limit", "_lookup", "_most", "_params", "_proposal", "_rates", "_started",
        "_switched", "accepted", "ahead", "cells", "drafts", "expected", "offered", "prompt", "reused", "size", "slot",
        "tokens",
    )  # fmt: skip

    slot: Slot

    def __init__(self, request: Request, model: Model, now: float) -> None:
        params = request.params
        if params.sampled and params.seed is None:
            params = replace(params, seed=secrets.randbits(64))
        self._params = params
        self._end = frozenset(params.stop) | (frozenset() if params.ignore_eos else model.eos)
        self._history = params.penalty_last_n if params.penalised else 0
        self.prompt = self.size = len(request.prompt)
        self._most = self.prompt + request.max_new  # size at which it ends
        self.tokens: Int32 = np.empty(self._most + DRAFT_MAX + 1, np.int32)
        self.tokens[: self.prompt] = request.prompt
        self.cells = self.reused = 0
        self.ahead = self.expected = 0  # rows under way, and how many tokens they are sure to give
        self._limit = min(model.draft if params.draft is None else params.draft, DRAFT_MAX)
        self._lookup = PromptLookup(model.vocab) if self._limit else None
        self._rates = AcceptRates()
        self._proposal: tuple[int, list[int]] = (0, [])
        self.drafts = 0  # how many drafts stand in tokens[size:]
        self.offered = self.accepted = 0
        self._started = now
        self._switched: float | None = None  # when the prompt was read

    def take(self, slots: Slots) -> None:
        """Move into the best of the free slots."""
        self.slot, self.reused = slots.take(self.tokens[: self.prompt])
        self.cells = self.reused

    @property
    def reading(self) -> bool:
        """True until the prompt is read."""
        return self._switched is None

    @property
    def to_read(self) -> int:
        """How many prompt tokens are in no step yet."""
        return max(0, self.prompt - self.next_cell)

    @property
    def next_cell(self) -> int:
        """Where its next row goes."""
        return self.cells + self.ahead

    @property
    def complete(self) -> bool:
        """True if the step under way gives its last token."""
        return self.size + self.expected >= self._most

    def sent(self, rows: int, wanted: int | None) -> None:
        """`rows` rows are under way now; the choice for the step's wanted row `wanted` is the next token."""
        if wanted is not None:
            self.tokens[self.size + self.expected] = -1 - wanted
        self.ahead, self.expected = rows, int(wanted is not None)

    def landed(self) -> None:
        """No row is under way any more."""
        self.ahead = self.expected = 0

    @property
    def record(self) -> Int32:
        """The tokens that the slot's cells hold."""
        return self.tokens[: self.cells]

    def index(self) -> None:
        """Enter the tokens that came since into the lookup."""
        lookup = self._lookup
        if lookup is not None and len(lookup) < self.size:
            begin = len(lookup)
            lookup.extend(self.tokens[begin : min(self.size, begin + _INDEX_TOKENS)].tolist())

    def offer(self, room: int, tokens: float, cost: Sequence[float], rows: int) -> float:
        """Put the drafts that pay, at most `room`, behind the last token; returns how many are expected accepted.

        `tokens`, `cost` and `rows` describe the step without them, as in `AcceptRates.width`.
        """
        self.drafts = 0
        lookup = self._lookup
        most = min(self._limit, self._most - self.size - 1)
        if lookup is None or most <= 0 or len(lookup) < self.size:
            self._proposal = (0, [])
            return 0.0
        self._proposal = length, found = lookup.draft(most)
        if not length:
            return 0.0
        width, gain = self._rates.width(length, min(most, room), tokens, cost, rows)
        if width:
            self.tokens[self.size : self.size + width] = found[:width]
            self.drafts = width
        return gain

    def foresee(self, room: int, tokens: float, cost: Sequence[float], rows: int) -> tuple[int, float, float]:
        """Of the step after the one under way, by what is known before that one's token.

        The drafts that it may have, how many are expected accepted and the seconds that they are expected to take.
        Arguments as in `offer`.
        """
        lookup = self._lookup
        most = min(self._limit, self._most - self.size - 2, room)
        if lookup is None or most <= 0 or len(lookup) < self.size:
            self._proposal = (0, [])
            return 0, 0.0, 0.0
        self._proposal = length, _ = lookup.draft(most + 1)
        if not length:
            return 0, 0.0, 0.0
        width, gain = self._rates.width(length + 1, most, tokens, cost, rows)
        chance = self._rates.chance(length)  # that the token is the one found, else there is nothing to go on
        return width, chance * gain, chance * (cost[rows + width] - cost[rows])

    def draws(self) -> list[Draw]:
        """The draws of the wanted rows: the last token's, then one for each draft."""
        params, tokens, keep, prompt = self._params, self.tokens, self._history, self.prompt
        size = self.size + self.expected
        if not keep:
            return [Draw(params, end - prompt, _NO_HISTORY) for end in range(size, size + self.drafts + 1)]
        return [
            Draw(params, end - prompt, tokens[max(0, end - keep) : end]) for end in range(size, size + self.drafts + 1)
        ]

    def read(self, count: int, now: float) -> PromptProgress:
        """`count` prompt tokens went into their cells."""
        self.cells += count
        if self.cells == self.prompt:
            self._switched = now
        elapsed = max(now - self._started, 1e-9)
        return PromptProgress(self.cells, self.prompt, elapsed * 1e3, (self.cells - self.reused) / elapsed)

    def accept(self, choice: Choice) -> Reason | None:
        """Append the target's choice; returns why the request ends with it, if it does."""
        token, size = choice.token, self.size
        self.tokens[size] = token
        self.cells = size
        self.size = size + 1
        if token in self._end:
            return "stop"
        return "length" if self.size >= self._most else None

    def learn(self, came: Sequence[int], agreed: int) -> None:
        """The step is over: `came` are its tokens, the first `agreed` of them equal to the drafts."""
        length, found = self._proposal
        if length:
            self._rates.learn(length, found, came)
        self.offered += self.drafts
        self.accepted += agreed
        self.drafts = 0

    def done(self, reason: Reason, now: float) -> Done:
        """The last event of the request."""
        generated = self.size - self.prompt
        switched = now if self._switched is None else self._switched
        return Done(
            generated=generated,
            prompt=self.prompt,
            prompt_ms=(switched - self._started) * 1e3,
            decode_ms=(now - switched) * 1e3,
            reason=reason,
            drafts_accepted=self.accepted,
            drafts_offered=self.offered,
            reused=self.reused,
            seed=self._params.seed if self._params.sampled and generated else None,
        )
