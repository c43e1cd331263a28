"""Chat messages, checked and in the form that chat templates expect."""

from __future__ import annotations

from typing import Any

from .errors import ApiError, shown

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# What a client echoes back with an assistant's message; only an empty value asks for nothing.
EMPTY_ONLY = ("tool_calls", "function_call", "refusal", "audio", "annotations", "reasoning_content")


def checked_messages(value: Any) -> list[dict[str, str]]:
    """``[{"role", "content"}]`` with text contents. Raises ApiError (400, param ``messages``)."""
    if not isinstance(value, list) or not value:
        raise _wrong("messages", "must be a list of at least one message", value)
    return [_message(item, f"messages[{at}]") for at, item in enumerate(value)]


def checked_text(value: Any, where: str, param: str) -> str:
    """`value` if it is text that UTF-8 can carry. Raises ApiError (400)."""
    if not isinstance(value, str):
        raise ApiError(f"{where} must be text, got {shown(value)}", param=param)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ApiError(f"{where} holds half a surrogate pair at character {error.start}.", param=param) from None
    return value


def _message(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong(where, "must be an object", value)
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise _wrong(f"{where}.role", f"must be one of {', '.join(ROLES)}", role)
    for name, item in value.items():
        if name not in ("role", "content", "name") and not (name in EMPTY_ONLY and _empty(item)):
            raise _wrong(f"{where}.{name[:64]}", "is not supported", item)
    message = {"role": ROLES[role], "content": _content(value.get("content"), f"{where}.content")}
    if value.get("name") is not None:
        message["name"] = checked_text(value["name"], f"{where}.name", "messages")
    return message


def _empty(value: Any) -> bool:
    return value is None or value in ("", [], {})


def _content(value: Any, where: str) -> str:
    """Text as it is; text parts joined by line ends, as other local servers do."""
    if isinstance(value, str):
        return checked_text(value, where, "messages")
    if not isinstance(value, list) or not value:
        raise _wrong(where, "must be text or a list of parts", value)
    return "\n".join(_part(part, f"{where}[{at}]") for at, part in enumerate(value))


def _part(value: Any, where: str) -> str:
    if not isinstance(value, dict) or value.get("type") != "text":
        kind = value.get("type") if isinstance(value, dict) else value
        raise _wrong(where, "must be a part of type text (strata reads text only)", kind)
    extra = [name for name in value if name not in ("type", "text")]
    if extra:
        raise _wrong(f"{where}.{extra[0][:64]}", "is not supported", value[extra[0]])
    return checked_text(value.get("text"), f"{where}.text", "messages")


def _wrong(where: str, rule: str, value: Any) -> ApiError:
    return ApiError(f"{where} {rule}, got {shown(value)}", param="messages")
