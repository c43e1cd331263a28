"""A request's sampling fields, checked and turned into the engine's ``key=value`` text.

One table, `FIELDS`, says which body field becomes which key and what its neutral values are; the ranges are
those of the engine's own table, so the two cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strata_engine.params import KEY_BY_NAME, SEED_MAX, TOP_K_MAX, Key

from .errors import ApiError, shown

Number = int | float


@dataclass(frozen=True, slots=True)
class Field:
    """One sampling field of the body."""

    name: str
    key: str  # of the engine
    integer: bool = False
    neutral: Number | None = None  # the value that is dropped
    bounded: bool = True  # held to the engine's range; top_k and seed have rules of their own

    @property
    def engine_key(self) -> Key:
        return KEY_BY_NAME[self.key]


FIELDS: tuple[Field, ...] = (
    Field("temperature", "temperature", neutral=0),
    Field("top_p", "top_p", neutral=1),
    Field("top_k", "top_k", integer=True, bounded=False),
    Field("min_p", "min_p", neutral=0),
    Field("repetition_penalty", "penalty_repeat", neutral=1),
    Field("frequency_penalty", "penalty_freq", neutral=0),
    Field("presence_penalty", "penalty_present", neutral=0),
    Field("penalty_last_n", "penalty_last_n", integer=True),
    Field("seed", "seed", integer=True, bounded=False),
)
FIELD_BY_NAME = {field.name: field for field in FIELDS}
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def sampling_keys(body: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> str:
    """The keys that `body` asks for, e.g. ``temperature=0.7 seed=1``; empty if all of it is neutral.

    `defaults` stand in for fields that are absent or null. Raises ApiError (400, `param` set) for a value that
    is not a number, not finite, out of range or not an integer where one is needed.
    """
    values = _values(body, defaults or {})
    kept = {
        field.name: value
        for field in FIELDS
        if (value := values[field.name]) is not None and not _neutral(field, value)
    }
    if not any(name in kept for name in PENALTIES) or kept.get("penalty_last_n") == 0:
        kept = {name: value for name, value in kept.items() if name not in (*PENALTIES, "penalty_last_n")}
    else:
        kept.setdefault("penalty_last_n", KEY_BY_NAME["penalty_last_n"].default)
    return " ".join(f"{f.key}={number_text(kept[f.name])}" for f in FIELDS if f.name in kept)


def check_defaults(defaults: Mapping[str, Any]) -> None:
    """Raise ApiError, naming key and value, unless the engine can honour every one of `defaults`."""
    for name, value in defaults.items():
        if name not in FIELD_BY_NAME:
            raise ApiError(f"unknown sampling key {name!r} (value {shown(value)}); known: {', '.join(FIELD_BY_NAME)}")
        if value is None:
            continue
        number = checked_number(FIELD_BY_NAME[name], value)
        if name == "top_k" and not (1 <= number <= TOP_K_MAX):
            raise ApiError(f"top_k must be an integer in 1..{TOP_K_MAX}, got {shown(value)}", param="top_k")
        if name == "seed" and number < 0:
            raise ApiError(f"seed must be an integer in 0..2^64-1, got {shown(value)}", param="seed")


def _values(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Number | None]:
    values: dict[str, Number | None] = {}
    for field in FIELDS:
        value = body.get(field.name)
        if value is None:
            value = defaults.get(field.name)
        values[field.name] = None if value is None else checked_number(field, value)
    return values


def _neutral(field: Field, value: Number) -> bool:
    if field.name == "top_k":
        return not (1 <= value <= TOP_K_MAX)
    if field.name == "seed":
        return value < 0
    return value == field.neutral


def checked_number(field: Field, value: Any) -> Number:
    """`value` as a number that the engine takes for `field` (20.0 becomes 20 where an integer is needed)."""
    number = integer_or_none(value) if field.integer else value
    if isinstance(value, bool) or not isinstance(number, int | float) or not _in_range(field, number):
        raise ApiError(f"{field.name} must be {_wanted(field)}, got {shown(value)}", param=field.name)
    return number


def integer_or_none(value: Any) -> int | None:
    """`value` as an integer (20.0 is 20), or None if it is not one; booleans are not."""
    if isinstance(value, bool):
        return None
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else None


def _in_range(field: Field, number: Number) -> bool:
    if field.name == "top_k":
        return True
    if field.name == "seed":
        return number <= SEED_MAX
    # Bounds before isfinite: an integer too large for a float is then out of range, not an OverflowError.
    key = field.engine_key
    return key.low <= number <= key.high and key.in_range(number)


def _wanted(field: Field) -> str:
    if field.name == "top_k":
        return f"an integer (1..{TOP_K_MAX}, any other: as if absent)"
    if field.name == "seed":
        return "an integer in 0..2^64-1 (negative: none)"
    return f"{'an integer' if field.integer else 'a number'} {field.engine_key.rule}"


def number_text(value: Number) -> str:
    """`value` in the shortest form that reads back equal: 1.0 is ``1``, 0.7 is ``0.7``."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e16:
        return str(int(value))
    return repr(value)
