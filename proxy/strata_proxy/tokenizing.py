"""Text to token ids and back over HTTP, for clients that speak the engine's line protocol themselves."""

from __future__ import annotations

import asyncio

from aiohttp import web

from .body import Body, flag, parse_body, refuse_unknown, token_ids
from .engine import Served
from .errors import ApiError, unavailable
from .handlers import ENGINE, TEMPLATE, json_bytes
from .messages import checked_messages, checked_text
from .plan import chat_text, check_ids


async def tokenize(request: web.Request) -> web.Response:
    """``{"content": text, "special": true}`` or ``{"messages": [...]}`` -> ``{"tokens": [ids], "count": n}``.

    The ids are those that the completion routes send for the same `prompt` or `messages`. `special` false: names of
    control tokens in the text are plain text, and no bos comes first.
    """
    body = parse_body(await json_bytes(request))
    refuse_unknown(body, {"content", "messages", "special"})
    ids = await asyncio.to_thread(_ids, body, _served(request), request.app[TEMPLATE])
    return web.json_response({"tokens": ids, "count": len(ids)})


async def detokenize(request: web.Request) -> web.Response:
    """``{"tokens": [ids]}`` -> ``{"content": text}``, control tokens by name; U+FFFD stands for a cut character."""
    body = parse_body(await json_bytes(request))
    refuse_unknown(body, {"tokens"})
    ids = token_ids(body.get("tokens"), "tokens")
    served = _served(request)
    check_ids(ids, "tokens", served.info.vocab)
    pieces = (served.vocab.piece(token, special=True) for token in ids)
    return web.json_response({"content": b"".join(pieces).decode("utf-8", "replace")})


def _served(request: web.Request) -> Served:
    engine = request.app[ENGINE]
    if engine.served is None:
        raise unavailable(engine.problem)
    return engine.served


def _ids(body: Body, served: Served, template: str) -> list[int]:
    """Slow for long texts: run it off the event loop."""
    vocab, special = served.vocab, flag(body, "special", default=True)
    if (body.get("content") is None) == (body.get("messages") is None):
        raise ApiError("Give content or messages, one of them.", param="content")
    if body.get("messages") is not None:
        if body.get("special") is not None:
            raise ApiError("special goes with content; leave it out with messages.", param="special")
        return vocab.encode_prompt(chat_text(checked_messages(body["messages"]), vocab, template or None))
    text = checked_text(body["content"], "content", "content")
    return vocab.encode_prompt(text) if special else vocab.encode(text, special=False)
