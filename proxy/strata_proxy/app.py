"""The application: routes, and what stands around every request."""

from __future__ import annotations

import asyncio
import difflib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from aiohttp import web

from . import handlers, tokenizing
from .config import Config, ConfigError
from .ending import Ending, shutting_down
from .engine import Engine
from .errors import ApiError, reason
from .handlers import CONFIG, ENDING, ENGINE, METRICS, STARTED, TEMPLATE
from .metrics import Metrics
from .template import check_template

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
OPEN = ("/health", "/metrics")
CLIENT_LEFT = 499  # nginx' code for it; only metrics see it


def create_app(config: Config) -> web.Application:
    """The proxy for one engine. Raises ConfigError if the configured chat template cannot be used."""
    app = web.Application(
        middlewares=[_measure, _preflight, _errors, _ending, _authorise], client_max_size=config.max_body_bytes
    )
    engine = Engine(config.engine)
    app[CONFIG], app[ENGINE], app[METRICS] = config, engine, Metrics(lambda: engine.up)
    app[ENDING] = Ending()
    app[TEMPLATE], app[STARTED] = _template(config.chat_template), int(time.time())
    app.cleanup_ctx.append(_watching)
    app.on_response_prepare.append(_add_cors)
    app.add_routes(
        [
            web.post("/v1/chat/completions", handlers.chat_completions),
            web.post("/v1/completions", handlers.completions),
            web.post("/tokenize", tokenizing.tokenize),
            web.post("/detokenize", tokenizing.detokenize),
            web.get("/v1/models", handlers.models),
            web.get("/v1/models/{id}", handlers.model),
            web.get("/health", handlers.health),
            web.get("/metrics", handlers.metrics),
        ]
    )
    return app


def _template(path: str | None) -> str:
    if path is None:
        return ""
    try:
        source = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template (chat_template) {path}: {reason(error)}") from None
    try:
        check_template(source)
    except ValueError as error:
        raise ConfigError(f"the chat template (chat_template) {path} cannot be used: {error}") from None
    return source


async def _watching(app: web.Application) -> AsyncIterator[None]:
    task = asyncio.create_task(app[ENGINE].watch())
    yield
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _route(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "other"


@web.middleware
async def _measure(request: web.Request, handler: Handler) -> web.StreamResponse:
    metrics, route, begun, status = request.app[METRICS], _route(request), time.monotonic(), CLIENT_LEFT
    metrics.active.inc()
    try:
        response = await handler(request)
        status = response.status
        return response
    finally:
        metrics.active.dec()
        metrics.requests.labels(route, str(status)).inc()
        metrics.seconds.labels(route).observe(time.monotonic() - begun)


def _allowed_origin(request: web.Request) -> str | None:
    origin, allowed = request.headers.get("Origin"), request.app[CONFIG].cors_origins
    return origin if origin is not None and (origin in allowed or "*" in allowed) else None


@web.middleware
async def _preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers a browser that asks whether a page of a configured origin may call; by default none may."""
    if request.method != "OPTIONS" or _allowed_origin(request) is None:
        return await handler(request)
    methods, names = "GET, POST", "Authorization, Content-Type"
    headers = {"Access-Control-Allow-Methods": methods, "Access-Control-Allow-Headers": names}
    return web.Response(status=204, headers=headers)


async def _add_cors(request: web.Request, response: web.StreamResponse) -> None:
    """On every response, streams included: their headers are gone before a middleware sees them."""
    if (origin := _allowed_origin(request)) is not None:
        response.headers.update({"Access-Control-Allow-Origin": origin, "Vary": "Origin"})


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return _error_response(error)
    except web.HTTPException as error:
        return _error_response(_from_http(request, error))
    except ConnectionError:
        raise  # the client left while it was written to; nobody would read an answer
    except Exception:
        log.exception("%s %s", request.method, request.path)
        return _error_response(ApiError("The proxy failed; its log says more.", status=500, code="internal_error"))


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    limit = request.app[CONFIG].max_body_bytes
    message, code = {
        404: (f"No route {request.method} {request.path}{_similar_route(request)}", "not_found"),
        405: (f"{request.method} is not allowed on {request.path}.", "method_not_allowed"),
        413: (f"The body is over {limit} bytes (max_body_bytes).", "request_too_large"),
    }.get(error.status, (error.reason, "http_error"))
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
    return ApiError(message, status=error.status, code=code, headers=headers)


def _similar_route(request: web.Request) -> str:
    routes = [resource.canonical for resource in request.app.router.resources()]
    close = difflib.get_close_matches(request.path[:100], routes, 1, cutoff=0.8)
    return f"; did you mean {close[0]}?" if close else "."


def _error_response(error: ApiError) -> web.Response:
    return web.json_response(error.body(), status=error.status, headers=error.headers)


@web.middleware
async def _ending(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Once the proxy ends, everything but /metrics is a 503, /health too: no balancer sends more."""
    if request.app[ENDING].begun and request.path != "/metrics":
        raise shutting_down()
    return await handler(request)


@web.middleware
async def _authorise(request: web.Request, handler: Handler) -> web.StreamResponse:
    """With `api_keys` set, all but /health and /metrics needs one of them."""
    keys = request.app[CONFIG].api_keys
    if keys and request.path not in OPEN:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip().encode("utf-8", "surrogateescape")
        if scheme.lower() != "bearer" or not any(hmac.compare_digest(given, key.encode()) for key in keys):
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError("A valid API key is needed.", status=401, code="invalid_api_key", headers=headers)
    return await handler(request)
