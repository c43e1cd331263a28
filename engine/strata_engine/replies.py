"""The line protocol, the engine's side of writing and the client's side of reading.

`format_*` give lines without their LF; `parse_reply` turns any of them back into the same objects. No I/O here, and
neither numba nor numpy, so that a client can import it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, unquote

from .protocol import PROTOCOL_VERSION
from .request import Choice, Done, Event, Failed, PromptProgress, Reused, Token


class ReplyError(ValueError):
    """A reply line that this version of the protocol cannot read."""


class VersionError(ReplyError):
    """The INFO line of another version of the protocol."""


@dataclass(frozen=True, slots=True)
class Info:
    """What the engine says of itself on connect."""

    engine: str
    model: str  # the path of the model file
    arch: str
    vocab: int
    context: int
    bos: int | None
    eos: tuple[int, ...]  # ascending; empty where the model has none
    device: str
    slots: int
    features: tuple[str, ...] = ()
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class Ready:
    context: int


@dataclass(frozen=True, slots=True)
class Pong:
    pass


@dataclass(frozen=True, slots=True)
class StatsReply:
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Unknown:
    """A reply of a later version: to be skipped."""

    text: str


Reply = Info | Ready | Event | Pong | StatsReply | Unknown


def format_info(info: Info) -> str:
    """The INFO line; pairs that the model has no value for are missing."""
    pairs: dict[str, object] = {
        "protocol": info.protocol,
        "engine": info.engine,
        "model": quote(os.fsencode(info.model), safe="/"),
        "arch": info.arch,
        "vocab": info.vocab,
        "context": info.context,
        "bos": info.bos,
        "eos": ",".join(map(str, info.eos)) or None,
        "device": info.device,
        "slots": info.slots,
        "features": ",".join(info.features) or None,
    }
    return "INFO " + " ".join(f"{key}={value}" for key, value in pairs.items() if value is not None)


def format_ready(context: int) -> str:
    """The READY line."""
    return f"READY {context} stop"


def format_stats(values: Mapping[str, float]) -> str:
    """The STATS line, keys in the order of `values`."""
    return " ".join(["STATS", *(f"{name}={_stat(value)}" for name, value in values.items())])


def _stat(value: float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


def format_error(code: str, text: str) -> str:
    """One line whatever `text` holds."""
    return f"ERR {code} {' '.join(text.encode('ascii', 'backslashreplace').decode().split())}"


def format_event(event: Event) -> str:
    """The line that tells a client of `event`, without its LF."""
    match event:
        case Token(choice):
            return _format_token(choice)
        case Reused(count):
            return f"REUSED {count}"
        case PromptProgress(position, total, ms, rate):
            return f"PP {position} {total} {ms:.1f} {rate:.1f}"
        case Done():
            return _format_done(event)
        case Failed(code, text):
            return format_error(code, text)


def _logprob(value: float) -> str:
    return f"{value:.9g}"  # nine digits give a float32 back exactly


def _format_token(choice: Choice) -> str:
    line = f"T {choice.token}"
    if choice.logprob is not None:
        line += f" lp={_logprob(choice.logprob)}"
    if choice.top:
        line += " top=" + ",".join(f"{token}:{_logprob(value)}" for token, value in choice.top)
    return line


def _format_done(done: Done) -> str:
    line = (
        f"DONE {done.generated} {done.prompt} {done.prompt_ms:.1f} {done.decode_ms:.1f} {done.reason}"
        f" {done.drafts_accepted} {done.drafts_offered} {done.reused}"
    )
    return line if done.seed is None else f"{line} seed={done.seed}"


def parse_reply(line: bytes) -> Reply:
    """The object of one reply line (LF or not). Raises ReplyError where a known reply does not have its form,
    VersionError for an INFO of another version."""
    try:
        text = line.decode("ascii").rstrip("\r\n")
        word, _, rest = text.partition(" ")
        return _parse_known(word, rest) if word in _KNOWN else Unknown(text)
    except VersionError:
        raise
    except (ValueError, IndexError, KeyError) as error:
        raise ReplyError(f"cannot read the reply {line[:80]!r}: {error}") from error


_KNOWN = frozenset({"INFO", "READY", "REUSED", "PP", "T", "DONE", "ERR", "PONG", "STATS"})


def _parse_known(word: str, rest: str) -> Reply:
    words = rest.split()
    match word:
        case "T":
            return Token(_parse_token(int(words[0]), _pairs(words[1:])))
        case "PP":
            return PromptProgress(int(words[0]), int(words[1]), float(words[2]), float(words[3]))
        case "REUSED":
            return Reused(int(words[0]))
        case "DONE":
            return _parse_done(words)
        case "ERR":
            code, _, text = rest.partition(" ")
            return Failed(code, text)
        case "PONG":
            return Pong()
        case "STATS":
            return StatsReply({name: float(value) for name, value in _pairs(words).items()})
        case "READY":
            return Ready(int(words[0]))
        case _:
            return _parse_info(_pairs(words))


def _pairs(words: list[str]) -> dict[str, str]:
    """key=value pairs; words of another form belong to later versions and are skipped."""
    return dict(word.split("=", 1) for word in words if "=" in word)


def _parse_token(token: int, pairs: dict[str, str]) -> Choice:
    logprob = float(pairs["lp"]) if "lp" in pairs else None
    entries = [entry.split(":") for entry in pairs["top"].split(",")] if "top" in pairs else []
    return Choice(token, logprob, tuple((int(other), float(value)) for other, value in entries))


def _parse_done(words: list[str]) -> Done:
    reason = words[4]
    if reason not in ("stop", "length", "cancel"):
        raise ValueError(f"no reason {reason!r}")
    generated, prompt, accepted, offered, reused = (int(words[i]) for i in (0, 1, 5, 6, 7))
    seed = _pairs(words[8:]).get("seed")
    return Done(
        generated=generated,
        prompt=prompt,
        prompt_ms=float(words[2]),
        decode_ms=float(words[3]),
        reason=reason,  # type: ignore[arg-type]
        drafts_accepted=accepted,
        drafts_offered=offered,
        reused=reused,
        seed=None if seed is None else int(seed),
    )


def _parse_info(pairs: dict[str, str]) -> Info:
    if (version := int(pairs["protocol"])) != PROTOCOL_VERSION:
        raise VersionError(f"it speaks version {version} of the protocol, this client version {PROTOCOL_VERSION}")
    return Info(
        engine=pairs["engine"],
        model=os.fsdecode(unquote(pairs["model"], errors="surrogateescape")),
        arch=pairs["arch"],
        vocab=int(pairs["vocab"]),
        context=int(pairs["context"]),
        bos=int(pairs["bos"]) if "bos" in pairs else None,
        eos=tuple(int(token) for token in pairs["eos"].split(",")) if "eos" in pairs else (),
        device=pairs["device"],
        slots=int(pairs["slots"]),
        features=tuple(pairs["features"].split(",")) if "features" in pairs else (),
        protocol=version,
    )
