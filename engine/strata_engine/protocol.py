"""The line protocol, the engine's side of reading: one request line in, one checked command or one refusal out.

protocol.md is the normative text; `replies` formats and reads the lines that go the other way. No I/O here, and
neither numba nor numpy, so that a client can import it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

from .params import KEY_BY_NAME, GenParams, Key
from .request import Request

PROTOCOL_VERSION = 1
LINE_MAX = 8 * 2**20  # bytes, the line ending not counted
BARE_MAX = 64 * 1024  # bytes of a line that is no GEN, spaces at its end included
NUMBER_MAX = 64  # characters of one number; also what a refusal quotes of a faulty value
ID_DIGITS_MAX = 20
IDS_A_SLICE = 4096  # ids parsed between two chances for other threads to run: about a millisecond

ERROR_CODES: dict[str, str] = {
    "BAD_LINE": "not a request: unknown word, missing part, a byte outside printable ASCII, no line ending",
    "TOO_LONG": "the line passes the longest line; the connection closes",
    "BAD_KEY": "a key that is unknown, repeated, or behind the ids",
    "BAD_VALUE": "a value that does not parse as its key's type; NaN and infinity",
    "OUT_OF_RANGE": "a number that parses and lies outside its key's range",
    "BAD_TOKEN": "an id that does not parse, or lies outside the vocabulary",
    "CONTEXT_FULL": "prompt + max_new is more than the context",
    "BUSY": "every slot is taken and the queue is full; try again later",
    "LOADING": "the model is not loaded yet; the connection closes, try again later",
    "INTERNAL": "a fault of the engine; its log says more",
    "SHUTDOWN": "the engine is ending; the connection closes",
}

STATS_KEYS: dict[str, str] = {
    "uptime_s": "seconds since the engine started",
    "connections": "open connections, this one included",
    "slots": "requests that can be computed at once",
    "running": "requests being computed",
    "waiting": "requests that wait for a slot",
    "requests": "requests taken since the start: they got a slot or wait for one",
    "finished": "of them, ended with `stop` or `length`",
    "cancelled": "of them, ended with `cancel`",
    "failed": "of them, ended with ERR",
    "steps": "steps of the engine's loop",
    "rows": "rows computed in them",
    "busy_s": "seconds spent computing",
    "prompt_tokens": "prompt tokens computed",
    "reused_tokens": "prompt tokens found in a slot's cache instead",
    "generated_tokens": "tokens emitted",
    "drafts_offered": "drafted tokens that were checked",
    "drafts_accepted": "of them, those that were the target's own choice",
}


class ProtocolError(Exception):
    """A line is refused; `code` is one of ERROR_CODES, `text` names the part at fault."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code} {text}")
        self.code = code
        self.text = text


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is checked against besides params.KEYS."""

    vocab: int
    context: int


@dataclass(frozen=True, slots=True)
class Gen:
    request: Request


@dataclass(frozen=True, slots=True)
class Stop:
    pass


@dataclass(frozen=True, slots=True)
class Ping:
    pass


@dataclass(frozen=True, slots=True)
class Stats:
    pass


@dataclass(frozen=True, slots=True)
class Quit:
    pass


Command = Gen | Stop | Ping | Stats | Quit
_BARE: dict[str, Command] = {"STOP": Stop(), "PING": Ping(), "STATS": Stats(), "QUIT": Quit()}

_TOO_MANY = f"a number has at most {NUMBER_MAX} characters"
_PRINTABLE = bytes(range(0x20, 0x7F))
_INT = re.compile(r"-?[0-9]+")
_FLOAT = re.compile(r"-?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WORD = re.compile(r" *([^ ]*)")
_ID = re.compile(f"[0-9]{{1,{ID_DIGITS_MAX}}}")
_SEPARATOR = re.compile(r" *, *| +")
_IDS = re.compile(f"{_ID.pattern}(?:(?:{_SEPARATOR.pattern}){_ID.pattern}){{0,{IDS_A_SLICE - 1}}}")
_PIECE = re.compile(r"[^ ,]*")


def is_gen(line: bytes) -> bool:
    """True if `line` asks for tokens, well formed or not: its answer then waits for its turn."""
    return line == b"GEN" or line.startswith(b"GEN ")


def parse_line(line: bytes, limits: Limits) -> Command:
    """One line without its LF (a CR at its end is dropped). ProtocolError names the first fault from the left."""
    line = line.removesuffix(b"\r")
    if len(line) > BARE_MAX and not is_gen(line):
        raise ProtocolError("BAD_LINE", f"a line of {len(line)} bytes that is no GEN: {BARE_MAX} are the most")
    text = _ascii(line)
    word, _, rest = text.partition(" ")
    if word == "GEN":
        return Gen(_parse_gen(rest.rstrip(" "), limits))
    if word not in _BARE:
        raise ProtocolError("BAD_LINE", _no_request(word))
    if extra := rest.strip(" "):
        raise ProtocolError("BAD_LINE", f"{word} stands alone on its line, got {_clip(extra)!r} behind it")
    return _BARE[word]


def _no_request(word: str) -> str:
    requests = ["GEN", *_BARE]
    if not word:
        return "a line must not be empty and must not begin with a space"
    if word.upper() in requests:
        return f"no request {word!r}: requests are upper case, {word.upper()}"
    return f"no request {_clip(word)!r}; there are {', '.join(requests)}"


def gen_line(max_new: int, keys: str, prompt: Iterable[int]) -> bytes:
    """The client's side: one GEN line with its LF. `keys` is ``key=value ...`` or empty."""
    head = f"GEN {max_new} {keys} " if keys else f"GEN {max_new} "
    return f"{head}{','.join(map(str, prompt))}\n".encode("ascii")


def _ascii(line: bytes) -> str:
    strange = line.translate(None, _PRINTABLE)
    if strange:
        at = line.index(strange[:1])
        raise ProtocolError("BAD_LINE", f"byte 0x{strange[0]:02x} at offset {at} is not printable ASCII")
    return line.decode("ascii")


def _clip(text: str) -> str:
    return text if len(text) <= NUMBER_MAX else f"{text[:NUMBER_MAX]}..."


def _parse_gen(text: str, limits: Limits) -> Request:
    word = _word(text, 0)
    if not word[1]:
        raise ProtocolError("BAD_LINE", "GEN needs <max_new> and the prompt's ids")
    max_new = _parse_max_new(word[1])
    values: dict[str, Any] = {}
    while "=" in (word := _word(text, word.end()))[1]:
        name, _, value = word[1].partition("=")
        key = _key(name, values)
        values[name] = _PARSERS[key.kind](key, value, limits)
    prompt = _parse_prompt(text, word.start(1), max_new, limits)
    return Request(max_new, GenParams(**values), prompt)


def _word(text: str, at: int) -> re.Match[str]:
    """The word at `at` as group 1, spaces before it skipped; empty at the end."""
    word = _WORD.match(text, at)
    assert word, "the pattern matches anything"
    return word


def _parse_max_new(text: str) -> int:
    if len(text) > NUMBER_MAX:
        raise ProtocolError("BAD_VALUE", f"max_new={_clip(text)}: {_TOO_MANY}")
    if not _INT.fullmatch(text):
        raise ProtocolError("BAD_VALUE", f"max_new={_clip(text)}: not a whole number")
    if text.startswith("-"):
        raise ProtocolError("OUT_OF_RANGE", f"max_new={_clip(text)}: must be 0 or more")
    return int(text)


def _key(name: str, seen: dict[str, Any]) -> Key:
    if name not in KEY_BY_NAME:
        raise ProtocolError("BAD_KEY", f"no key {_clip(name)!r}")
    if name in seen:
        raise ProtocolError("BAD_KEY", f"{name} is given twice")
    return KEY_BY_NAME[name]


def _parse_prompt(text: str, at: int, max_new: int, limits: Limits) -> tuple[int, ...]:
    """The ids from `at` to the end, a slice at a time: other threads run in between, and a prompt over the context
    costs no more than the context."""
    if at == len(text):
        raise ProtocolError("BAD_LINE", "no prompt: GEN needs at least one id")
    ids: list[int] = []
    while True:
        part = _IDS.match(text, at)
        if not part:
            _refuse_id(text, at)
        ids += _checked_ids(part[0], limits.vocab)
        ended = part.end() == len(text)
        if len(ids) + max_new > limits.context:
            count = f"{len(ids)}" if ended else f"{len(ids)} or more"
            total = f"prompt ({count} ids) + max_new ({max_new})"
            raise ProtocolError("CONTEXT_FULL", f"{total} is over the context of {limits.context}")
        if ended:
            return tuple(ids)
        separator = _SEPARATOR.match(text, part.end())
        if not separator:
            _refuse_id(text, part.end())
        at = separator.end()


def _checked_ids(text: str, vocab: int) -> list[int]:
    ids = [int(word) for word in text.replace(",", " ").split()]
    if max(ids) >= vocab:
        _refuse_outside(next(i for i in ids if i >= vocab), vocab)
    return ids


def _refuse_outside(token: int, vocab: int, where: str = "id ") -> NoReturn:
    raise ProtocolError("BAD_TOKEN", f"{where}{token} is outside the vocabulary 0..{vocab - 1}")


def _refuse_id(text: str, at: int) -> NoReturn:
    """Name the piece around `at`, which is where the ids stop being ids."""
    start = max(text.rfind(" ", 0, at), text.rfind(",", 0, at)) + 1
    piece = _PIECE.match(text, start)
    word = piece[0] if piece else ""
    if not word:
        raise ProtocolError("BAD_TOKEN", f"an empty id, at offset {start} of what follows GEN")
    if "=" in word:
        raise ProtocolError("BAD_KEY", f"{_clip(word)}: keys stand before the ids")
    raise ProtocolError("BAD_TOKEN", f"{_clip(word)!r} is not an id")


def _bad_value(key: Key, value: str, expected: str) -> ProtocolError:
    return ProtocolError("BAD_VALUE", f"{key.name}={_clip(value)}: {expected}")


def _ranged(key: Key, number: float, text: str) -> None:
    if not key.in_range(number):
        raise ProtocolError("OUT_OF_RANGE", f"{key.name}={_clip(text)}: must be {key.rule}")


def _parse_float(key: Key, value: str, limits: Limits) -> float:
    if len(value) > NUMBER_MAX:
        raise _bad_value(key, value, _TOO_MANY)
    if not _FLOAT.fullmatch(value):
        raise _bad_value(key, value, "not a decimal number")
    number = float(value)
    _ranged(key, number, value)
    return number


def _parse_int(key: Key, value: str, limits: Limits) -> int:
    if len(value) > NUMBER_MAX:
        raise _bad_value(key, value, _TOO_MANY)
    if not _INT.fullmatch(value):
        raise _bad_value(key, value, "not a whole number")
    number = int(value)
    _ranged(key, number, value)
    return number


def _parse_flag(key: Key, value: str, limits: Limits) -> bool:
    return _parse_int(key, value, limits) == 1


def _entries(key: Key, value: str, limits: Limits) -> list[str]:
    """The comma-separated entries; no id stands twice, so there are at most as many as ids."""
    if value.count(",") >= limits.vocab:
        raise _bad_value(key, value, f"more than {limits.vocab} entries")
    return value.split(",")


def _parse_id(key: Key, text: str, seen: Iterable[int], limits: Limits) -> int:
    if not _ID.fullmatch(text):
        raise _bad_value(key, text, "not an id")
    token = int(text)
    if token >= limits.vocab:
        _refuse_outside(token, limits.vocab, f"{key.name}: id ")
    if token in seen:
        raise _bad_value(key, text, "the id is given twice")
    return token


def _parse_id_list(key: Key, value: str, limits: Limits) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for text in _entries(key, value, limits):
        ids[_parse_id(key, text, ids, limits)] = None
    return tuple(ids)


def _parse_bias(key: Key, value: str, limits: Limits) -> tuple[tuple[int, float], ...]:
    bias: dict[int, float] = {}
    for entry in _entries(key, value, limits):
        text, colon, number = entry.partition(":")
        if not colon:
            raise _bad_value(key, entry, "not id:bias")
        token = _parse_id(key, text, bias, limits)
        bias[token] = _parse_float(key, number, limits)
    return tuple(bias.items())


_PARSERS: dict[str, Callable[[Key, str, Limits], Any]] = {
    "float": _parse_float,
    "int": _parse_int,
    "flag": _parse_flag,
    "ids": _parse_id_list,
    "bias": _parse_bias,
}
