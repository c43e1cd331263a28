"""A fake engine that speaks the protocol in-process, a tiny model file, and a client of the proxy in front."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from strata_engine.protocol import Gen, Limits, Ping, ProtocolError, Stop, parse_line
from strata_engine.replies import Info, format_error, format_event, format_info, format_ready
from strata_engine.request import Choice, Done, PromptProgress, Request, Reused, Token
from strata_proxy.app import create_app
from strata_proxy.config import Config
from strata_proxy.pretokenizers import byte_of_char

EOS, FIRST_BYTE, VOCAB = 2, 3, 260  # ids: 0..2 control tokens, then one a byte, then the only merge
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def ids_of(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


def write_model(path: Path, template: str | None = TEMPLATE) -> Path:
    chars = {byte: char for char, byte in byte_of_char().items()}
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chars[byte] for byte in range(256)), chars[0] + chars[1]]
    )
    writer.add_token_types([3, 3, 3] + [1] * 257)
    writer.add_token_merges([f"{chars[0]} {chars[1]}"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


class FakeEngine:
    """Answers every GEN with `answer`; what it saw is in `lines`, the hang-ups of running GENs in `cancelled`."""

    def __init__(self, path: Path, model: Path) -> None:
        self.path = path
        self.info = Info("strata/0", str(model), "llama", VOCAB, 512, 1, (EOS,), "cpu", 4)
        self.answer: list[int] = [*ids_of("Hello"), EOS]
        self.pace = 0.0  # seconds before each token
        self.seed: int | None = None
        self.refuse: str | None = None  # an ERR line in place of an answer
        self.die_after: int | None = None  # tokens before the connection is dropped
        self.silent = False  # GENs wait for ever, as in a queue
        self.stop_after: float | None = 0.0  # seconds from STOP to DONE; None: there is no DONE
        self.dies_at_stop = False
        self.lines: list[str] = []
        self.running = self.cancelled = self.stopped = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path, limit=2**23)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()
            await self._server.wait_closed()
            self._server = None
            self.path.unlink(missing_ok=True)

    def say_model(self, model: Path) -> None:
        """Name another file in INFO from the next connection on."""
        self.info = replace(self.info, model=str(model))

    @property
    def listening(self) -> bool:
        return self._server is not None

    @property
    def gens(self) -> list[str]:
        return [line for line in self.lines if line.startswith("GEN")]

    @property
    def prompt(self) -> list[int]:
        return [int(i) for i in self.gens[-1].split()[-1].split(",")]

    @property
    def keys(self) -> str:
        return " ".join(self.gens[-1].split()[2:-1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self._say(writer, format_info(self.info), format_ready(self.info.context))
        generation: asyncio.Task[None] | None = None
        while line := await self._line(reader):
            self.lines.append(line.decode().rstrip())
            try:
                command = parse_line(line.rstrip(b"\n"), Limits(self.info.vocab, self.info.context))
            except ProtocolError as error:
                self._say(writer, format_error(error.code, error.text))
                continue
            if isinstance(command, Gen):
                generation = asyncio.create_task(self._generate(writer, command.request))
            elif isinstance(command, Ping):
                self._say(writer, "PONG")
            elif isinstance(command, Stop) and generation is not None and generation.cancel():
                self.stopped += 1
                await self._stop(writer)
        if generation is not None and generation.cancel():
            self.cancelled += 1
        self._writers.discard(writer)
        writer.close()

    async def _stop(self, writer: asyncio.StreamWriter) -> None:
        if self.dies_at_stop:
            writer.transport.abort()
        elif self.stop_after is not None:
            await asyncio.sleep(self.stop_after)
            self._say(writer, format_event(Done(1, 1, 1.0, 1.0, "cancel", 0, 0, 0, self.seed)))

    async def _line(self, reader: asyncio.StreamReader) -> bytes:
        try:
            return await reader.readline()
        except ConnectionError:
            return b""

    async def _generate(self, writer: asyncio.StreamWriter, request: Request) -> None:
        if self.refuse is not None:
            return self._say(writer, self.refuse)
        self.running += 1
        try:
            if self.silent:
                await asyncio.Event().wait()
            await self._tokens(writer, request)
        finally:
            self.running -= 1

    async def _tokens(self, writer: asyncio.StreamWriter, request: Request) -> None:
        prompt, params = len(request.prompt), request.params
        self._say(writer, format_event(Reused(prompt // 2)), format_event(PromptProgress(prompt, prompt, 1.0, 9.0)))
        answer = self.answer[: request.max_new]
        for at, token in enumerate(answer):
            if self.pace:
                await asyncio.sleep(self.pace)
            if at == self.die_after:
                return writer.transport.abort()
            top = tuple((i, -1.0 - i) for i in range(params.logprobs or 0))
            self._say(writer, format_event(Token(Choice(token, None if params.logprobs is None else -0.5, top))))
        reason = "stop" if answer and answer[-1] == EOS else "length"
        seed = params.seed if params.seed is not None else self.seed
        seed = seed if params.sampled else None
        self._say(writer, format_event(Done(len(answer), prompt, 1.0, 2.0, reason, 3, 4, prompt // 2, seed)))

    def _say(self, writer: asyncio.StreamWriter, *lines: str) -> None:
        writer.write("".join(f"{line}\n" for line in lines).encode())


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny model.gguf")


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[[str | None], Path]:
    return lambda template: write_model(tmp_path / "other.gguf", template)


@pytest.fixture
async def engine(tmp_path: Path, model: Path) -> AsyncIterator[FakeEngine]:
    fake = FakeEngine(tmp_path / "engine.sock", model)
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def proxy(engine: FakeEngine) -> AsyncIterator[Callable[..., Awaitable[TestClient]]]:
    """`await proxy(**config)`: a client of a proxy in front of `engine`."""
    clients: list[TestClient] = []

    async def start(wait: bool = True, **config: Any) -> TestClient:
        app = create_app(replace(Config(engine=str(engine.path)), **config))
        clients.append(TestClient(TestServer(app)))  # it cancels handlers as the proxy's own runner does
        await clients[-1].start_server()
        await until(lambda: not wait or not engine.listening or "PING" in engine.lines)
        return clients[-1]

    yield start
    for client in clients:
        await client.close()


@pytest.fixture
async def client(proxy: Callable[..., Awaitable[TestClient]]) -> TestClient:
    return await proxy()


async def until(true: Callable[[], bool], timeout: float = 5.0) -> None:
    async with asyncio.timeout(timeout):
        while not true():
            await asyncio.sleep(0.005)


async def events_of(response: ClientResponse) -> list[Any]:
    """The events of a stream, parsed; ``[DONE]`` stays text."""
    text = (await response.read()).decode()
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


class Tools:
    until = staticmethod(until)
    events_of = staticmethod(events_of)
    ids_of = staticmethod(ids_of)
    eos = EOS


@pytest.fixture
def tools() -> type[Tools]:
    return Tools
