"""Text to token ids and back over HTTP, for clients that speak the engine's line protocol themselves."""

from __future__ import annotations

import asyncio

from aiohttp import web

from .body import Body, flag, refuse_unknown, token_ids
from .engine import Served
from .errors import ApiError, unavailable
from .handlers import ENGINE, TEMPLATE
from .messages import checked_messages, checked_text
from .plan import chat_text, check_ids
from .reading import read_body

JSON = "application/json"


async def tokenize(request: web.Request) -> web.Response:
    """``{"content": text, "special": true}`` or ``{"messages": [...]}`` -> ``{"tokens": [ids], "count": n}``.

    The ids are those that the completion routes send for the same `prompt` or `messages`. `special` false: names of
    control tokens in the text are plain text, and no bos comes first.
    """
    body = await read_body(request, lambda body: _known(body, {"content", "messages", "special"}))
    return await asyncio.to_thread(_tokens, body, _served(request), request.app[TEMPLATE])


async def detokenize(request: web.Request) -> web.Response:
    """``{"tokens": [ids]}`` -> ``{"content": text}``, control tokens by name; U+FFFD stands for a cut character."""
    ids = await read_body(request, lambda body: token_ids(_known(body, {"tokens"}).get("tokens"), "tokens"))
    return await asyncio.to_thread(_content, ids, _served(request))


def _known(body: Body, names: set[str]) -> Body:
    refuse_unknown(body, names)
    return body


def _served(request: web.Request) -> Served:
    engine = request.app[ENGINE]
    if engine.served is None:
        raise unavailable(engine.problem)
    return engine.served


def _tokens(body: Body, served: Served, template: str) -> web.Response:
    """Slow for long texts: run it off the event loop."""
    ids = _ids(body, served, template)
    # Not by the JSON encoder, which would keep the interpreter to itself for the whole list.
    listed = ", ".join([str(token) for token in ids])
    return web.Response(text=f'{{"tokens": [{listed}], "count": {len(ids)}}}', content_type=JSON)


def _content(ids: list[int], served: Served) -> web.Response:
    """Slow for many ids: run it off the event loop."""
    check_ids(ids, "tokens", served.info.vocab)
    pieces = (served.vocab.piece(token, special=True) for token in ids)
    return web.json_response({"content": b"".join(pieces).decode("utf-8", "replace")})


def _ids(body: Body, served: Served, template: str) -> list[int]:
    vocab, special = served.vocab, flag(body, "special", default=True)
    if (body.get("content") is None) == (body.get("messages") is None):
        raise ApiError("Give content or messages, one of them.", param="content")
    if body.get("messages") is not None:
        if body.get("special") is not None:
            raise ApiError("special goes with content; leave it out with messages.", param="special")
        return vocab.encode_prompt(chat_text(checked_messages(body["messages"]), vocab, template or None))
    text = checked_text(body["content"], "content", "content")
    return vocab.encode_prompt(text) if special else vocab.encode(text, special=False)
