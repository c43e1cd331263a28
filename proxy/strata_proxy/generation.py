"""One choice, from the engine's tokens to pieces of text; and several choices side by side."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from strata_engine.protocol import gen_line
from strata_engine.request import Choice, Done, Failed, PromptProgress, Reused, Token

from .engine import Link, refusal
from .errors import ApiError, unavailable
from .plan import Job
from .stops import StopStrings
from .vocab import TextStream, Vocab

log = logging.getLogger(__name__)

_SEED, _SAMPLED = re.compile(r"\bseed=(\d+)"), re.compile(r"\btemperature=")
STOP_S = 60.0  # the engine ends a generation within a step, which may be a long one; past this it is not waited for
BACKLOG = 32  # pieces a slow client may lag behind before its engine connection is no longer read


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of the answer with its log-probability."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    offset: int  # characters of the answer before it


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to the answer; empty when the engine has only begun."""

    text: str = ""
    scored: tuple[Scored, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a choice ended."""

    finish_reason: str  # stop or length
    prompt: int
    generated: int
    reused: int
    drafts_accepted: int
    drafts_offered: int
    prompt_ms: float
    decode_ms: float
    seed: int | None


@dataclass(slots=True)
class Generation:
    """Runs one job on one connection."""

    job: Job
    link: Link
    vocab: Vocab
    outcome: Outcome | None = None
    first_text: float | None = None  # when, by time.monotonic()
    _text: TextStream = field(default_factory=TextStream)
    _stops: StopStrings = field(init=False)
    _tokens: int = 0
    _reused: int = 0
    _prompt_ms: float = 0.0
    _decoding: float = 0.0  # since when, by time.monotonic()
    _decoded: int = 0  # characters, shown or held back
    _scored: list[Scored] = field(default_factory=list)  # of tokens whose text is not decided yet

    def __post_init__(self) -> None:
        self._stops = StopStrings(self.job.stops)

    async def deltas(self) -> AsyncIterator[Delta]:
        """The answer piece by piece; `outcome` is set at the end. Raises ApiError where the engine fails."""
        await self.link.send(gen_line(self.job.max_new, self.job.keys, self.job.prompt))
        while self.outcome is None:
            match await self.link.read():
                case Token(choice):
                    delta = self._accept(choice)
                    if delta.text or delta.scored:
                        yield delta
                    if self._stops.hit is not None:
                        await self._stop()
                case Done() as done:
                    if done.reason == "cancel":
                        raise unavailable("The engine is ending and cancelled the request.")
                    yield self._finish(done)
                case Failed() as failed:
                    raise refusal(failed)
                case Reused(count):
                    self._reused = count
                    yield Delta()
                case PromptProgress(ms=ms):
                    self._prompt_ms, self._decoding = ms, time.monotonic()
                    yield Delta()

    def _accept(self, choice: Choice) -> Delta:
        self._tokens += 1
        silent = choice.token in self.job.silent
        if choice.logprob is not None and not silent:
            self._scored.append(Scored(choice.token, choice.logprob, choice.top, self._decoded))
        text = "" if silent else self._text.push(self.vocab.piece(choice.token))
        return self._show(text)

    def _show(self, text: str) -> Delta:
        """`text` behind what was decoded, through the stop strings."""
        self._decoded += len(text)
        held = self._stops.held
        shown = self._stops.push(text)
        if shown and self.first_text is None:
            self.first_text = time.monotonic()
        if self._stops.hit is None and self._stops.held == 0:
            return Delta(shown, self._take(None))
        return Delta(shown, self._take(self._decoded - len(text) - held + len(shown)))

    def _take(self, before: int | None) -> tuple[Scored, ...]:
        """The waiting tokens that begin before this character (None: all of them)."""
        ready = tuple(item for item in self._scored if before is None or item.offset < before)
        self._scored = self._scored[len(ready) :]
        return ready

    def _finish(self, done: Done) -> Delta:
        last = self._show(self._text.flush())
        if self._stops.hit is None:
            last = Delta(last.text + self._stops.flush(), last.scored + self._take(None))
        reason = "stop" if self._stops.hit is not None else done.reason
        self.outcome = self._outcome(done, reason, done.generated)
        return last

    async def _stop(self) -> None:
        """A stop string came, so the answer is complete: end the generation, and hear what the engine did."""
        try:
            async with asyncio.timeout(STOP_S):
                await self.link.send(b"STOP\n")
                while not isinstance(reply := await self.link.read(), Done):
                    if isinstance(reply, Failed):
                        raise refusal(reply)
            self.outcome = self._outcome(reply, "stop", self._tokens)
        except (TimeoutError, ApiError) as error:  # closing the connection cancels what still runs
            log.warning("an answer that a stop string ended: %s", str(error) or f"no DONE within {STOP_S:g} s of STOP")
            self.outcome = self._outcome(self._known(), "stop", self._tokens)

    def _known(self) -> Done:
        """What DONE would say, as far as it is known without it."""
        now, prompt_ms, seed = time.monotonic(), self._prompt_ms, _SEED.search(self.job.keys)
        decode_ms = (now - self._decoding) * 1e3 if self._decoding else 0.0
        drawn = int(seed[1]) if seed and _SAMPLED.search(self.job.keys) else None
        return Done(self._tokens, len(self.job.prompt), prompt_ms, decode_ms, "stop", 0, 0, self._reused, drawn)

    def _outcome(self, done: Done, reason: str, generated: int) -> Outcome:
        return Outcome(
            finish_reason=reason,
            prompt=done.prompt,
            generated=generated,
            reused=done.reused,
            drafts_accepted=done.drafts_accepted,
            drafts_offered=done.drafts_offered,
            prompt_ms=done.prompt_ms,
            decode_ms=done.decode_ms,
            seed=done.seed,
        )


class Together:
    """Several generations at once, their deltas in the order in which they come.

    Leaving the context ends them all; the first failure comes out of `next`.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(BACKLOG)
        self._generations = generations
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._pump(at)) for at in range(len(self._generations))]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def next(self) -> tuple[int, Delta | None]:
        """(position, delta) of the next piece; delta None: that generation is complete."""
        at, item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        return at, item

    async def _pump(self, at: int) -> None:
        try:
            async for delta in self._generations[at].deltas():
                await self._queue.put((at, delta))
            await self._queue.put((at, None))
        except Exception as error:
            await self._queue.put((at, error))
