"""The routes: translate HTTP to generations and back, nothing more."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import PurePath
from typing import Any

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from .body import Ask, parse_ask
from .config import Config
from .ending import Ending
from .engine import Engine
from .errors import ApiError, printable, shown, unavailable
from .generation import Delta, Generation, Together
from .metrics import Metrics
from .openai import Shape
from .plan import plan_jobs
from .reading import read_body

CONFIG = web.AppKey("config", Config)
ENGINE = web.AppKey("engine", Engine)
METRICS = web.AppKey("metrics", Metrics)
ENDING = web.AppKey("ending", Ending)
TEMPLATE = web.AppKey("template", str)  # the configuration's chat template; empty: the model's own
STARTED = web.AppKey("started", int)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, chat=True)


async def completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, chat=False)


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [_model(request)]})


async def model(request: web.Request) -> web.Response:
    found, wanted = _model(request), request.match_info["id"]
    if wanted != found["id"]:
        raise _no_model(wanted, found["id"])
    return web.json_response(found)


async def health(request: web.Request) -> web.Response:
    """From the proxy's own state, so that it answers at once whatever the engine does."""
    engine = request.app[ENGINE]
    if engine.served is None:
        body = {"status": "unavailable", "engine": {"up": False}, **unavailable(engine.problem).body()}
        return web.json_response(body, status=503)
    info = engine.served.info
    about = {
        "up": True,
        "version": info.engine,
        "model": printable(info.model),
        "context": info.context,
        "device": info.device,
    }
    return web.json_response({"status": "ok", "engine": about})


async def metrics(request: web.Request) -> web.Response:
    return web.Response(body=request.app[METRICS].text(), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _model_id(config: Config, path: str) -> str:
    return printable(config.model_name or PurePath(path).stem)


def _model(request: web.Request) -> dict[str, Any]:
    engine = request.app[ENGINE]
    if engine.served is None:
        raise unavailable(engine.problem)
    info = engine.served.info
    about = {"context": info.context, "vocab": info.vocab, "arch": info.arch, "device": info.device}
    name = _model_id(request.app[CONFIG], info.model)
    return {"id": name, "object": "model", "created": request.app[STARTED], "owned_by": "strata", "strata": about}


def _no_model(wanted: object, served: str) -> ApiError:
    message = f"No model {shown(wanted)}; this server has {served}."
    return ApiError(message, status=404, param="model", code="model_not_found")


async def _answer(request: web.Request, chat: bool) -> web.StreamResponse:
    events: EventStream | None = None
    try:
        async with request.app[ENDING].answering():
            config = request.app[CONFIG]
            ask = await read_body(request, lambda body: parse_ask(body, chat, config.sampling, config.max_choices))
            if ask.stream:
                events = EventStream(request, config.keepalive_s, ask.include_usage)
            return await _generate(request, ask, events)
    except ApiError as error:
        if events is None or not events.begun:
            raise  # nothing was sent yet: the status can still say it
        await events.send(error.body())
        return events.response


async def _generate(request: web.Request, ask: Ask, events: EventStream | None) -> web.StreamResponse:
    begun = time.monotonic()
    async with _generations(request, ask) as (shape, generations):
        try:
            if events is not None:
                return await _stream(events, ask, shape, generations)
            return await _whole(shape, generations)
        finally:
            request.app[METRICS].count(request.path, begun, generations)


@asynccontextmanager
async def _generations(request: web.Request, ask: Ask) -> AsyncIterator[tuple[Shape, list[Generation]]]:
    """The request's generations, each on a connection of its own that leaving the context closes."""
    engine, config = request.app[ENGINE], request.app[CONFIG]
    async with AsyncExitStack() as stack:
        link, vocab = await stack.enter_async_context(engine.connect())
        name = _checked_model(config, ask.model, _model_id(config, link.info.model))
        jobs = await asyncio.to_thread(plan_jobs, ask, link.info, vocab, request.app[TEMPLATE] or None)
        links = [link]
        for _ in jobs[1:]:
            other, _vocab = await stack.enter_async_context(engine.connect())
            if other.info != link.info:
                raise unavailable("The engine changed its model during the request; send it again.")
            links.append(other)
        shape = Shape.new(ask.chat, name, vocab)
        yield shape, [Generation(job, own, vocab) for job, own in zip(jobs, links, strict=True)]


def _checked_model(config: Config, wanted: str | None, served: str) -> str:
    if config.strict_model and wanted not in (None, served):
        raise _no_model(wanted, served)
    return served


async def _whole(shape: Shape, generations: Sequence[Generation]) -> web.Response:
    answers: list[list[Delta]] = [[] for _ in generations]
    async with Together(generations) as together:
        running = len(generations)
        while running:
            at, delta = await together.next()
            if delta is None:
                running -= 1
            else:
                answers[at].append(delta)
    return web.json_response(shape.whole(generations, answers))


async def _stream(events: EventStream, ask: Ask, shape: Shape, generations: Sequence[Generation]) -> web.StreamResponse:
    async with Together(generations) as together:
        await _stream_choices(events, together, shape, generations)
    if ask.include_usage:
        await events.send(shape.usage(generations))
    await events.send_text("data: [DONE]\n\n")
    return events.response


async def _stream_choices(
    events: EventStream, together: Together, shape: Shape, generations: Sequence[Generation]
) -> None:
    opened: set[int] = set()
    running = len(generations)
    while running:
        at, delta = await events.alive(together.next())
        index = generations[at].job.index
        if shape.chat and index not in opened:
            await events.send(shape.role(index))
        opened.add(index)
        if delta is None:
            running -= 1
            await events.send(shape.last(generations[at]))
        elif delta.text or delta.scored:
            await events.send(shape.piece(index, delta))


class EventStream:
    """Server-sent events; the response starts with the first one."""

    def __init__(self, request: web.Request, keepalive_s: float, usage: bool) -> None:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        self.response = web.StreamResponse(headers=headers)
        self._request, self._keepalive_s, self._usage = request, keepalive_s, usage

    @property
    def begun(self) -> bool:
        return self.response.prepared

    async def send(self, event: dict[str, Any]) -> None:
        if self._usage:
            event.setdefault("usage", None)  # OpenAI's form: present in every chunk once asked for
        await self.send_text(f"data: {json.dumps(event, ensure_ascii=False, separators=(',', ':'))}\n\n")

    async def send_text(self, text: str) -> None:
        if not self.response.prepared:
            await self.response.prepare(self._request)
        await self.response.write(text.encode("utf-8"))

    async def alive(self, waiting: Any) -> Any:
        """The result of `waiting`; while it takes long, comments keep the connection from timing out."""
        task = asyncio.ensure_future(waiting)
        try:
            while not (await asyncio.wait({task}, timeout=self._keepalive_s))[0]:
                await self.send_text(": waiting\n\n")
            return await task
        finally:
            task.cancel()
