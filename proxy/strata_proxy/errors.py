"""The one kind of error that a client sees, and its JSON form."""

from __future__ import annotations

import json
import re
from typing import Any

SHOWN = 60  # characters of an offending value that a message repeats
_SURROGATES = re.compile("[\ud800-\udfff]")
_json = json.JSONEncoder(ensure_ascii=False, default=repr)


class ApiError(Exception):
    """Ends a request with `status` and OpenAI's error object; `param` is the top-level field at fault."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = printable(message)
        self.status = status
        self.param = None if param is None else printable(param)
        self.code = code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """``{"error": {"message", "type", "param", "code"}}``."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def shown(value: object) -> str:
    """`value` as an error message repeats it: as JSON has it, cut to `SHOWN` characters, however large it is."""
    text = ""
    try:
        for part in _json.iterencode(value[: SHOWN + 1] if isinstance(value, str) else value):
            text += part[: SHOWN + 1]
            if len(text) > SHOWN:
                return text[:SHOWN] + "..."
    except (ValueError, RecursionError):  # more digits than Python prints, or nested too deep
        return f"<{type(value).__name__}>"
    return text


def printable(text: str) -> str:
    """`text` as UTF-8 can carry it: U+FFFD for each half of a surrogate pair, as in a path that is not UTF-8."""
    return _SURROGATES.sub("\ufffd", text)


def reason(error: Exception) -> str:
    """Why a file could not be read, without the file's name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)


def unavailable(message: str) -> ApiError:
    """503: the engine cannot be reached or cannot serve; the client may come back."""
    return ApiError(message, status=503, code="engine_unavailable", headers={"Retry-After": "2"})
