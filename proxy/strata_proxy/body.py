"""A request body, checked field by field: honoured or refused by name, never ignored."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata_engine.params import KEY_BY_NAME, LOGPROBS_MAX, SEED_MAX

from .errors import ApiError, shown
from .messages import checked_messages, checked_text
from .sampling import FIELD_BY_NAME, FIELDS, integer_or_none, number_text, sampling_keys

STOP_STRINGS_MAX = 16
STOP_CHARS_MAX = 1000  # each new piece of text is compared with every beginning of a stop text
Body = Mapping[str, Any]
Prompt = str | list[int]

COMMON = {"model", "stream", "stream_options", "max_tokens", "stop", "n", "logprobs", "logit_bias", *FIELD_BY_NAME}
ENGINE_ONLY = {"stop_token_ids", "ignore_eos", "draft"}
CHAT_FIELDS = COMMON | ENGINE_ONLY | {"messages", "max_completion_tokens", "top_logprobs"}
TEXT_FIELDS = COMMON | ENGINE_ONLY | {"prompt", "best_of"}
FIELD_OF_KEY = {field.key: field.name for field in FIELDS if field.key != field.name}  # what the engine calls them

# Fields that cannot change the answer.
HARMLESS = {"user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
# Fields of OpenAI's API that strata does not have, with the values that ask for nothing (null always does).
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "echo": (False,),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request. `prompts` holds one entry a prompt: text, ids, or (chat) the list of messages."""

    chat: bool
    model: str | None
    prompts: list[Any]
    stream: bool
    include_usage: bool
    n: int
    max_tokens: int | None  # None: the rest of the context
    max_tokens_field: str
    stops: tuple[str, ...]
    stop_ids: tuple[int, ...]
    ignore_eos: bool
    logprobs: int | None  # alternatives a token; None: no log-probabilities
    bias: tuple[tuple[int, float], ...]
    keys: tuple[str, ...]  # the key text of each of the n choices

    @property
    def prompt_field(self) -> str:
        return "messages" if self.chat else "prompt"

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n


def parse_body(data: bytes, yielding: bool = False) -> Body:
    """The JSON object in `data`. Raises ApiError (400) for anything else, NaN and repeated names included.

    `yielding`: other threads get to run meanwhile, at half the speed.
    """
    hooks: dict[str, Any] = {"parse_int": _int, "parse_float": _float} if yielding else {}
    try:
        body = json.loads(data.decode("utf-8"), parse_constant=_no_constant, object_pairs_hook=_unique, **hooks)
    except UnicodeDecodeError as error:
        raise ApiError(f"The body is not UTF-8 (byte {error.start}).", code="invalid_json") from None
    except RecursionError:
        raise ApiError("The body is nested too deep.", code="invalid_json") from None
    except _NotJsonError as error:
        param = _field_not_json(data)
        raise ApiError(f"The body is not valid JSON: {error}", param=param, code="invalid_json") from None
    except (json.JSONDecodeError, _RepeatedError) as error:
        raise ApiError(f"The body is not valid JSON: {error}", code="invalid_json") from None
    except ValueError:  # int()'s bound on digits, whose message is for programmers
        text = "An integer has more digits than any field takes."
        raise ApiError(text, param=_field_not_json(data), code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(f"The body must be a JSON object, got {shown(body)}.", code="invalid_json")
    return body


def parse_ask(body: Body, chat: bool, defaults: Mapping[str, Any], max_choices: int) -> Ask:
    """Check every field of a chat (or text) completion request. Raises ApiError (400, `param` set)."""
    _refuse_other_route(body, chat)
    refuse_unknown(body, CHAT_FIELDS if chat else TEXT_FIELDS)
    n = _integer(body, "n", 1, max_choices, default=1)
    prompts = [checked_messages(body.get("messages"))] if chat else _prompts(body.get("prompt"))
    if len(prompts) * n > max_choices:
        raise ApiError(f"{len(prompts)} prompts with n = {n} are over {max_choices} choices a request.", param="n")
    if body.get("best_of") is not None and integer_or_none(body["best_of"]) != n:
        raise ApiError(f"best_of is not supported, got {shown(body['best_of'])}; leave it out.", param="best_of")
    stream = flag(body, "stream")
    max_field = "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
    logprobs = _chat_logprobs(body) if chat else _integer(body, "logprobs", 0, LOGPROBS_MAX)
    bias = _logit_bias(body.get("logit_bias"))
    stop_ids = [] if body.get("stop_token_ids") is None else token_ids(body["stop_token_ids"], "stop_token_ids")
    extra = _extra_keys(body, logprobs, bias, stop_ids)
    return Ask(
        chat=chat,
        model=_model(body.get("model")),
        prompts=prompts,
        stream=stream,
        include_usage=_include_usage(body.get("stream_options"), stream),
        n=n,
        max_tokens=_max_tokens(body, max_field),
        max_tokens_field=max_field,
        stops=_stops(body.get("stop")),
        stop_ids=tuple(stop_ids),
        ignore_eos=flag(body, "ignore_eos"),
        logprobs=logprobs,
        bias=bias,
        keys=tuple(f"{keys} {extra}".strip() for keys in _choice_keys(body, defaults, n)),
    )


class _NotJsonError(ValueError):
    """NaN or an infinity, which Python's parser and many others write and read."""


class _RepeatedError(ValueError):
    """A name that stands twice in one object."""


def _no_constant(name: str) -> None:
    raise _NotJsonError(f"{name} is not JSON")


def _field_not_json(data: bytes) -> str | None:
    """The first field that is or holds NaN, an infinity or an endless integer; None if more is wrong with the body."""
    try:
        body = json.loads(data, parse_constant=_NotJsonError, parse_int=_int_or_not_json)
        return next(name for name, value in body.items() if _holds_not_json(value))
    except (ValueError, AttributeError, StopIteration, RecursionError):
        return None


def _holds_not_json(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, _NotJsonError) or any(map(_holds_not_json, inside))


def _int_or_not_json(text: str) -> int | _NotJsonError:
    try:
        return int(text)
    except ValueError:
        return _NotJsonError(text)


# The parser keeps the interpreter to itself until it calls a Python function, which these are.
def _int(text: str) -> int:
    return int(text)


def _float(text: str) -> float:
    return float(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _RepeatedError(f"{shown(name)} is given twice")
            seen.add(name)
    return found


def _model(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ApiError(f"model must be text, got {shown(value)}", param="model")
    return value


def _refuse_other_route(body: Body, chat: bool) -> None:
    """Name the route of a field that this one does not have."""
    here, there = ("/v1/chat/completions", "/v1/completions") if chat else ("/v1/completions", "/v1/chat/completions")
    foreign = TEXT_FIELDS - CHAT_FIELDS if chat else CHAT_FIELDS - TEXT_FIELDS
    for name in body:
        if name in foreign:
            other = {"prompt": ", which wants messages", "messages": ", which wants prompt"}.get(name, "")
            message = f"{name} is a field of {there}; this is {here}{other}."
            raise ApiError(message, param=name, code="unknown_parameter")


def refuse_unknown(body: Body, known: set[str]) -> None:
    """Raise ApiError (400) for a field that is neither known nor harmless."""
    for name, value in body.items():
        if name in known or name in HARMLESS:
            continue
        if name not in UNSUPPORTED:
            own = FIELD_OF_KEY.get(name)
            close = [own] if own in known else difflib.get_close_matches(name[:64], known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ApiError(f"Unknown field {shown(name)}{hint}", param=name[:64], code="unknown_parameter")
        if value is not None and not any(type(value) is type(ok) and value == ok for ok in UNSUPPORTED[name]):
            message = f"{name} is not supported, got {shown(value)}; leave it out."
            raise ApiError(message, param=name, code="unsupported_parameter")


def _choice_keys(body: Body, defaults: Mapping[str, Any], n: int) -> list[str]:
    """The sampling keys of each choice: with a seed, choice i draws with seed + i."""
    first = sampling_keys(body, defaults)
    seed = integer_or_none(body["seed"] if body.get("seed") is not None else defaults.get("seed"))
    if n == 1 or seed is None or seed < 0:
        return [first] * n
    return [sampling_keys({**body, "seed": (seed + i) % (SEED_MAX + 1)}, defaults) for i in range(n)]


def _extra_keys(body: Body, logprobs: int | None, bias: tuple[tuple[int, float], ...], stop_ids: list[int]) -> str:
    draft = _integer(body, "draft", 0, int(KEY_BY_NAME["draft"].high))
    parts = {
        "logprobs": logprobs,
        "logit_bias": ",".join(f"{token}:{number_text(value)}" for token, value in bias) or None,
        "stop": ",".join(map(str, stop_ids)) or None,
        "ignore_eos": 1 if flag(body, "ignore_eos") else None,
        "draft": draft,
    }
    return " ".join(f"{key}={value}" for key, value in parts.items() if value is not None)


def _integer(body: Body, name: str, low: int, high: int, default: Any = None) -> Any:
    value = body.get(name)
    if value is None:
        return default
    number = integer_or_none(value)
    if number is None or not (low <= number <= high):
        raise ApiError(f"{name} must be an integer in {low}..{high}, got {shown(value)}", param=name)
    return number


def flag(body: Body, name: str, default: bool = False) -> bool:
    """A field that is true or false; null is the default. Raises ApiError (400)."""
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"{name} must be true or false, got {shown(value)}", param=name)
    return default if value is None else value


def _max_tokens(body: Body, field: str) -> int | None:
    most = 2**31 - 1
    value, other = _integer(body, field, 1, most), _integer(body, "max_tokens", 1, most)
    if other is not None and other != value:
        raise ApiError(f"max_tokens ({other}) and {field} ({value}) differ; give one of them.", param="max_tokens")
    return value


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise ApiError("stream_options needs stream: true.", param="stream_options")
    if not isinstance(options, dict):
        raise ApiError(f"stream_options must be an object, got {shown(options)}", param="stream_options")
    for name, value in options.items():
        right = isinstance(value, bool) if name == "include_usage" else name == "include_obfuscation" and value is False
        if value is not None and not right:
            raise ApiError(f"stream_options: {name}: {shown(value)} is not supported.", param="stream_options")
    return bool(options.get("include_usage"))


def _chat_logprobs(body: Body) -> int | None:
    top = _integer(body, "top_logprobs", 0, LOGPROBS_MAX)
    if flag(body, "logprobs"):
        return top or 0
    if top:
        raise ApiError("top_logprobs needs logprobs: true.", param="top_logprobs")
    return None


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if stops is None or stops == []:
        return ()
    if not isinstance(stops, list) or len(stops) > STOP_STRINGS_MAX:
        raise ApiError(f"stop must be a text or a list of at most {STOP_STRINGS_MAX}, got {shown(value)}", param="stop")
    for stop in stops:
        if not 1 <= len(checked_text(stop, "stop", "stop")) <= STOP_CHARS_MAX:
            message = f"A stop text must have 1 to {STOP_CHARS_MAX} characters, got {len(stop)}"
            raise ApiError(f"stop: {message}.", param="stop")
    return tuple(dict.fromkeys(stops))


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise ApiError(f"logit_bias must be an object, token id to number, got {shown(value)}", param="logit_bias")
    key = KEY_BY_NAME["logit_bias"]
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 20 and str(int(token)) == token):
            raise ApiError(f"logit_bias: {shown(token)} is not a token id.", param="logit_bias")
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not number or not (key.low <= bias <= key.high):
            message = f"logit_bias: token {token} needs a number {key.rule}, got {shown(bias)}"
            raise ApiError(message, param="logit_bias")
    return tuple((int(token), bias) for token, bias in value.items() if bias != 0)


def token_ids(value: Any, field: str) -> list[int]:
    """`value` if it is a list of token ids; `check_ids` holds them to the vocabulary once the model is known."""
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise ApiError(f"{field} must be a list of token ids, got {shown(value)}", param=field)
    return list(dict.fromkeys(value)) if field == "stop_token_ids" else value


def _prompts(value: Any) -> list[Prompt]:
    """A text, ids, or a list of either."""
    if isinstance(value, str):
        return [checked_text(value, "prompt", "prompt")]
    if not isinstance(value, list) or not value:
        raise ApiError(f"prompt must be a text, token ids, or a list of either, got {shown(value)}", param="prompt")
    return [_prompt(item) for item in value] if isinstance(value[0], str | list) else [_prompt(value)]


def _prompt(value: Any) -> Prompt:
    return checked_text(value, "prompt", "prompt") if isinstance(value, str) else token_ids(value, "prompt")
