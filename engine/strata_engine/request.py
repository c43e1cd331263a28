"""One generation request and the events it produces: the seam between daemon and scheduler.

This module imports neither numba nor numpy: the protocol, and so the proxy, is built on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .params import GenParams

Reason = Literal["stop", "length", "cancel"]


class Busy(Exception):  # noqa: N818 - the word of the protocol
    """Every slot is taken and the queue is full."""


@dataclass(frozen=True, slots=True)
class Request:
    """A checked GEN: ids are inside the vocabulary, prompt + max_new fits the context, max_new >= 0."""

    max_new: int
    params: GenParams
    prompt: tuple[int, ...]


@dataclass(slots=True)
class Choice:
    """The token chosen for one wanted row."""

    token: int
    logprob: float | None = None  # of `token`, from the raw logits; None unless params.logprobs is set
    top: tuple[tuple[int, float], ...] = ()  # params.logprobs alternatives (id, log-probability), best first


@dataclass(frozen=True, slots=True)
class Reused:
    """The first `count` prompt tokens were found in the slot's cache."""

    count: int


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """`position` of `total` prompt tokens are read, after `ms`."""

    position: int
    total: int
    ms: float
    rate: float  # tokens a second


@dataclass(frozen=True, slots=True)
class Token:
    """The next token of the answer."""

    choice: Choice


@dataclass(frozen=True, slots=True)
class Done:
    """The request ended: counts in tokens, times in milliseconds without the wait for a slot."""

    generated: int
    prompt: int
    prompt_ms: float
    decode_ms: float
    reason: Reason
    drafts_accepted: int
    drafts_offered: int
    reused: int
    seed: int | None  # set whenever a draw was used


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended in an error; `code` is one of protocol.ERROR_CODES."""

    code: str
    text: str


Event = Reused | PromptProgress | Token | Done | Failed
