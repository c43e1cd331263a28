"""The shapes of OpenAI's API: completions, chunks, log-probabilities, usage."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .generation import Delta, Generation, Outcome, Scored
from .vocab import Vocab

LOGPROB_FLOOR = -9999.0  # JSON has no -inf


@dataclass(frozen=True, slots=True)
class Shape:
    """Builds the objects of one answer."""

    chat: bool
    model: str
    vocab: Vocab
    id: str
    created: int

    @classmethod
    def new(cls, chat: bool, model: str, vocab: Vocab) -> Shape:
        prefix = "chatcmpl" if chat else "cmpl"
        return cls(chat, model, vocab, f"{prefix}-{secrets.token_hex(12)}", int(time.time()))

    def whole(self, generations: Sequence[Generation], answers: Sequence[Sequence[Delta]]) -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        choices = [self._choice(g, deltas) for g, deltas in zip(generations, answers, strict=True)]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": usage(generations), "strata": strata(generations)}

    def role(self, index: int) -> dict[str, Any]:
        """The first chunk of a chat choice."""
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}})

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """A chunk that carries text."""
        content = {"delta": {"content": delta.text}} if self.chat else {"text": delta.text}
        return self._chunk(index, content, delta.scored)

    def last(self, generation: Generation) -> dict[str, Any]:
        """The chunk that ends a choice."""
        content: dict[str, Any] = {"delta": {}} if self.chat else {"text": ""}
        chunk = self._chunk(generation.job.index, content, reason=_outcome(generation).finish_reason)
        return {**chunk, "strata": strata([generation])}

    def usage(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The chunk that ends a stream whose client asked for it."""
        return {**self._head(self._chunk_kind), "choices": [], "usage": usage(generations)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(
        self, index: int, content: dict[str, Any], scored: Sequence[Scored] = (), reason: str | None = None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(scored) if scored else None
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head(self._chunk_kind), "choices": [choice]}

    def _choice(self, generation: Generation, deltas: Sequence[Delta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        scored = [item for delta in deltas for item in delta.scored]
        return {
            "index": generation.job.index,
            **({"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}),
            "logprobs": None if generation.job.logprobs is None else self._logprobs(scored),
            "finish_reason": _outcome(generation).finish_reason,
        }

    def _logprobs(self, scored: Iterable[Scored]) -> dict[str, Any]:
        return self._chat_logprobs(scored) if self.chat else self._text_logprobs(scored)

    def _chat_logprobs(self, scored: Iterable[Scored]) -> dict[str, Any]:
        content = [
            {**self._entry(item.token, item.logprob), "top_logprobs": [self._entry(*other) for other in item.top]}
            for item in scored
        ]
        return {"content": content, "refusal": None}

    def _text_logprobs(self, scored: Iterable[Scored]) -> dict[str, Any]:
        items = list(scored)
        return {
            "tokens": [self._name(item.token) for item in items],
            "token_logprobs": [_finite(item.logprob) for item in items],
            "top_logprobs": [{self._name(token): _finite(value) for token, value in item.top} for item in items],
            "text_offset": [item.offset for item in items],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self.vocab.piece(token, special=True)
        return {"token": piece.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(piece)}

    def _name(self, token: int) -> str:
        """A token's text as a JSON key: incomplete characters are told apart by their bytes."""
        piece = self.vocab.piece(token, special=True)
        try:
            return piece.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def usage(generations: Sequence[Generation]) -> dict[str, Any]:
    """Token counts; the prompt of several choices counts once."""
    prompts = {id(g.job.prompt): _outcome(g) for g in reversed(generations)}.values()
    prompt = sum(outcome.prompt for outcome in prompts)
    generated = sum(_outcome(g).generated for g in generations)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": sum(outcome.reused for outcome in prompts)},
    }


def strata(generations: Sequence[Generation]) -> dict[str, Any]:
    """What reached the engine and what it did; the lists under `choices` stand where there are several."""
    each = [
        {
            "keys": g.job.keys,
            "seed": _outcome(g).seed,
            "reused": _outcome(g).reused,
            "drafts": {"accepted": _outcome(g).drafts_accepted, "offered": _outcome(g).drafts_offered},
            "prompt_ms": _outcome(g).prompt_ms,
            "decode_ms": _outcome(g).decode_ms,
        }
        for g in generations
    ]
    return each[0] if len(each) == 1 else {**each[0], "choices": each}


def _outcome(generation: Generation) -> Outcome:
    if generation.outcome is None:
        raise RuntimeError("the generation has not ended")
    return generation.outcome


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOGPROB_FLOOR
