"""The one kind of error that a client sees, and its JSON form."""

from __future__ import annotations

import json
from typing import Any

SHOWN = 60  # characters of an offending value that a message repeats


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
        self.message = message
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """``{"error": {"message", "type", "param", "code"}}``."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def shown(value: object) -> str:
    """`value` as an error message repeats it: as JSON has it, cut to `SHOWN` characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=repr)
    except (ValueError, RecursionError):  # more digits than Python prints, or nested too deep
        text = f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def reason(error: Exception) -> str:
    """Why a file could not be read, without the file's name."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)


def unavailable(message: str) -> ApiError:
    """503: the engine cannot be reached or cannot serve; the client may come back."""
    return ApiError(message, status=503, code="engine_unavailable", headers={"Retry-After": "2"})
