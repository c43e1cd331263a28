"""The proxy at a signal, as a process: answers end or say why, and it is gone in time."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
import time
from contextlib import asynccontextmanager

import aiohttp
import pytest

from strata_proxy.handlers import ENDING
from strata_proxy.serving import CUT_S, GRACE_S

LATEST_S = GRACE_S + 2 * CUT_S + 1.0  # the last second is the process's own end on a busy machine
ASK = {"prompt": "a", "stream": True}


class Process:
    """A running proxy; its log is read to the end by `ended`."""

    def __init__(self, process, url, log):
        self.process, self.url, self.log = process, url, log

    def signal(self, number=signal.SIGINT):
        self.process.send_signal(number)

    async def said(self, words):
        async with asyncio.timeout(5):
            while words not in self.log:
                self.log += (await self.process.stderr.readline()).decode()

    async def ended(self):
        async with asyncio.timeout(LATEST_S + 3):
            self.log += (await self.process.stderr.read()).decode()
            return await self.process.wait()


@asynccontextmanager
async def running(engine):
    command = [sys.executable, "-m", "strata_proxy.cli", "--port", "0", "--engine", str(engine.path)]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    proxy = Process(process, "", "")
    try:
        await proxy.said("engine up")
        proxy.url = re.search(r"http://\S+", proxy.log)[0]
        yield proxy
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


async def begin(session, proxy):
    """A stream whose first event has come."""
    response = await session.post(f"{proxy.url}/v1/completions", json=ASK)
    await response.content.readline()
    return response


async def test_a_stream_that_ends_in_time_is_whole(engine, session, tools):
    engine.answer, engine.pace = [*tools.ids_of("a" * 20), tools.eos], 0.02
    async with running(engine) as proxy:
        response = await begin(session, proxy)
        proxy.signal()
        assert (await tools.events_of(response))[-1] == "[DONE]"
        assert await proxy.ended() == 0
        assert "SIGINT: ending" in proxy.log
        assert re.search(r'strata_proxy.access: \S+ "POST /v1/completions HTTP/1.1" 200 ', proxy.log)


async def test_a_stream_that_does_not_end_gets_an_error_event(engine, session, tools):
    engine.answer, engine.pace = tools.ids_of("a" * 400), 0.1
    async with running(engine) as proxy:
        response = await begin(session, proxy)
        begun = time.monotonic()
        proxy.signal(signal.SIGTERM)
        await proxy.said("SIGTERM: ending")
        async with session.get(f"{proxy.url}/health") as refused:
            assert refused.status == 503 and (await refused.json())["error"]["code"] == "shutting_down"
        assert (await tools.events_of(response))[-1]["error"]["code"] == "shutting_down"
        assert await proxy.ended() == 0 and time.monotonic() - begun < LATEST_S
        assert '"POST /v1/completions HTTP/1.1" 200 ' in proxy.log
        await tools.until(lambda: engine.running == 0)


async def test_a_second_signal_ends_at_once(engine, session, tools):
    engine.silent = True
    async with running(engine) as proxy:
        asking = asyncio.create_task(session.post(f"{proxy.url}/v1/completions", json={"prompt": "a"}))
        await tools.until(lambda: engine.running == 1)
        proxy.signal()
        await proxy.said("SIGINT: ending")
        proxy.signal()
        async with asyncio.timeout(2):
            assert await proxy.process.wait() == -signal.SIGINT
        with pytest.raises(aiohttp.ClientError):
            await asking


async def test_an_answer_that_is_not_streamed_is_a_503_when_its_time_is_up(proxy, engine, tools):
    client = await proxy()
    engine.silent = True
    asking = asyncio.create_task(client.post("/v1/completions", json={"prompt": "a"}))
    await tools.until(lambda: engine.running == 1)
    await client.app[ENDING].finish(0.05)
    response = await asking
    assert response.status == 503 and (await response.json())["error"]["code"] == "shutting_down"
