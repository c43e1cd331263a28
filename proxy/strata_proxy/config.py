"""The proxy's configuration: one YAML file, every key optional, nothing ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from .errors import ApiError, reason, shown
from .sampling import check_defaults

LOG_LEVELS = ("debug", "info", "warning", "error")


class ConfigError(Exception):
    """The configuration cannot be used; the message names the key and its value."""


@dataclass(frozen=True, slots=True)
class Config:
    """The values of one run. configs/default.yaml explains each key."""

    host: str = "127.0.0.1"
    port: int = 8080
    engine: str = "/tmp/strata.sock"
    log_level: str = "info"
    sampling: Mapping[str, Any] = field(default_factory=dict)
    model_name: str | None = None
    strict_model: bool = False
    chat_template: str | None = None
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_choices: int = 16
    max_body_bytes: int = 4 * 2**20
    keepalive_s: float = 15.0


RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65535),
    "max_choices": (1, 1024),
    "max_body_bytes": (1024, 2**30),
    "keepalive_s": (0.05, 3600),
}
TYPES: dict[str, tuple[type, str]] = {
    "int": (int, "an integer"),
    "float": (float, "a number"),
    "str": (str, "text"),
    "bool": (bool, "true or false"),
    "tuple": (list, "a list of texts"),
    "Mapping": (dict, "a mapping"),
}


def load_config(path: Path | None, overrides: Mapping[str, Any] | None = None) -> Config:
    """The configuration of `path` (None: the defaults), with the command line's `overrides` on top.

    Raises ConfigError for a file that cannot be read, an unknown key, or a value that cannot be honoured.
    """
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    values = _all_checked({} if path is None else _read(path))  # on their own: an override hides no fault
    return Config(**{**values, **_all_checked(given)})


def _all_checked(values: Mapping[str, Any]) -> dict[str, Any]:
    known = {f.name: f for f in fields(Config)}
    for name, value in values.items():
        if name not in known:
            raise ConfigError(f"unknown configuration key {name!r} (value {shown(value)}); known: {', '.join(known)}")
    checked = {name: _checked(name, str(known[name].type), value) for name, value in values.items()}
    if checked.get("log_level", "info") not in LOG_LEVELS:
        raise ConfigError(f"log_level must be one of {', '.join(LOG_LEVELS)}, got {shown(checked['log_level'])}")
    try:
        check_defaults(checked.get("sampling", {}))
    except ApiError as error:
        raise ConfigError(f"sampling: {error.message}") from None
    return checked


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice, which YAML would silently let the last one win."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, str):
            raise ConfigError(f"configuration keys are text, got {shown(key)}")
        if key in seen:
            raise ConfigError(f"configuration key {key!r} is given twice")
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_UniqueKeys.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {path}: {reason(error)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: it is nested too deep") from None
    except Exception as error:  # PyYAML's constructors let out whatever a value that is none raises
        why = str(error) if isinstance(error, yaml.YAMLError | ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path}: {' '.join(why.split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, got {shown(values)}")
    return values


def _checked(name: str, annotation: str, value: Any) -> Any:
    """`value` in the form that `Config` keeps; null is allowed where the annotation has None, and for a block."""
    if value is None and ("None" in annotation or annotation.startswith("Mapping")):
        return None if "None" in annotation else {}
    wanted, words = TYPES[annotation.split("[")[0].split(" ")[0]]
    number = isinstance(value, int) and not isinstance(value, bool)
    right = number if wanted is int else isinstance(value, wanted) or (wanted is float and number)
    if not right or (wanted is list and not all(isinstance(item, str) and item.strip() for item in value)):
        raise ConfigError(f"{name} must be {words}, got {shown(value)}")
    if isinstance(value, str) and (not value.strip() or min(value) < " "):
        raise ConfigError(f"{name} must be text without control characters and not empty, got {shown(value)}")
    if name in RANGES and not (RANGES[name][0] <= value <= RANGES[name][1]):
        raise ConfigError(f"{name} must be in {RANGES[name][0]}..{RANGES[name][1]}, got {shown(value)}")
    return tuple(value) if wanted is list else value
