"""A request's body: its type, its bytes, its JSON. Large ones are read on a thread, so that the loop stays free."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from aiohttp import web

from .body import Body, parse_body
from .errors import ApiError, shown

BIG_BODY = 64 * 1024  # bytes; a longer body is parsed and checked off the loop
ENCODINGS = ("", "identity", "gzip", "deflate", "br", "zstd")  # aiohttp decodes these or refuses them

Checked = TypeVar("Checked")
_parser = ThreadPoolExecutor(1, thread_name_prefix="json")


async def read_body(request: web.Request, check: Callable[[Body], Checked]) -> Checked:
    """What `check` makes of the request's JSON object. Raises ApiError (400, 415), and what `check` raises."""
    data = await _bytes(request)
    if len(data) <= BIG_BODY:
        return check(parse_body(data))
    return await asyncio.get_running_loop().run_in_executor(_parser, _parse_big, data, check)


def _parse_big(data: bytes, check: Callable[[Body], Checked]) -> Checked:
    """Garbage collection waits meanwhile: it would walk a million new lists again and again, and hold up the loop."""
    gc.disable()
    try:
        return check(parse_body(data, yielding=True))
    finally:
        gc.enable()


async def _bytes(request: web.Request) -> bytes:
    """The body, if its type lets it be JSON.

    No type, and the one that curl -d sends, will do too; but not from a web page, which could send them to this
    machine's proxy from any site without the browser asking first.
    """
    kind = request.content_type if "Content-Type" in request.headers else "nothing"
    from_a_program = "Origin" not in request.headers and kind in ("nothing", "application/x-www-form-urlencoded")
    if kind != "application/json" and not kind.endswith("+json") and not from_a_program:
        message = f"The body must be JSON: send the header Content-Type: application/json (got {kind})."
        raise ApiError(message, status=415, code="unsupported_media_type")
    encoding = request.headers.get("Content-Encoding", "").strip().lower()
    if encoding not in ENCODINGS:
        raise ApiError(f"Content-Encoding {shown(encoding)} is not supported.", status=415, code="unsupported_encoding")
    try:
        return await request.read()
    except web.RequestPayloadError as error:
        why = " ".join(str(error).removeprefix("400, message:").split())
        raise ApiError(f"The body cannot be read: {why}", code="invalid_body") from None
