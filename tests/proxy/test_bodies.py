"""Bodies that are large, or broken below JSON: refused by name, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import threading
import time

import pytest

from strata_proxy import body, reading
from strata_proxy.errors import SHOWN, ApiError, shown
from strata_proxy.serving import one_line

TEXT = "/v1/completions"
JSON = {"Content-Type": "application/json"}
ASK = b'{"prompt": "a"}'


def test_a_name_given_twice_is_found_in_linear_time():
    names = [f'"{i}": 1' for i in range(40_000)]
    data = ("{" + ", ".join([*names, names[-1]]) + "}").encode()
    began = time.thread_time()
    with pytest.raises(ApiError, match='"39999\\\\*" is given twice'):
        body.parse_body(data)
    assert time.thread_time() - began < 0.5


@pytest.mark.parametrize("value", [[1] * 2_000_000, {str(i): [] for i in range(300_000)}, "a" * 10_000_000])
def test_a_large_value_is_shown_quickly(value):
    began = time.thread_time()
    assert len(shown(value)) == SHOWN + 3
    assert time.thread_time() - began < 0.01


def test_shown_is_json():
    assert shown({"a": [1, "é", None]}) == '{"a": [1, "é", null]}'


@pytest.mark.parametrize("path", [TEXT, "/tokenize", "/detokenize"])
async def test_others_are_answered_while_a_large_body_is_parsed(client, monkeypatch, path):
    parsing, go_on = threading.Event(), threading.Event()

    def slow(data, **options):
        parsing.set()
        go_on.wait(10)
        raise ApiError("enough")

    monkeypatch.setattr(reading, "parse_body", slow)
    large = asyncio.create_task(client.post(path, data=b" " * (reading.BIG_BODY + 1), headers=JSON))
    try:
        await asyncio.to_thread(parsing.wait, 10)
        async with asyncio.timeout(5):
            assert (await client.get("/health")).status == 200
        assert not large.done()
    finally:
        go_on.set()
    assert (await large).status == 400


async def test_a_large_body_is_read_as_a_small_one(client, engine):
    assert (
        await client.post(TEXT, json={"prompt": "a", "user": "x" * 100_000, "temperature": 0.5, "n": 2})
    ).status == 200
    assert engine.keys == "temperature=0.5"


async def test_a_stop_text_is_bounded(client):
    assert (await client.post(TEXT, json={"prompt": "a", "stop": "x" * body.STOP_CHARS_MAX})).status == 200
    response = await client.post(TEXT, json={"prompt": "a", "stop": "x" * (body.STOP_CHARS_MAX + 1)})
    assert response.status == 400 and (await response.json())["error"]["param"] == "stop"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_does_not_decode(client, encoding):
    # aiohttp's client would compress it: the header alone must say so
    response = await client.post(TEXT, data=b"\xff" + ASK, headers={**JSON, "Content-Encoding": encoding})
    error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "invalid_body")
    assert error["message"] == f"The body cannot be read: Can not decode content-encoding: {encoding}"


async def test_a_body_that_decodes(client):
    headers = {**JSON, "Content-Encoding": "gzip"}
    assert (await client.post(TEXT, data=gzip.compress(ASK), headers=headers)).status == 200


@pytest.mark.parametrize("encoding", ["snappy", "gzip, gzip"])
async def test_an_encoding_that_is_not_supported(client, encoding):
    response = await client.post(TEXT, data=ASK, headers={**JSON, "Content-Encoding": encoding})
    error = (await response.json())["error"]
    assert (response.status, error["code"]) == (415, "unsupported_encoding") and encoding in error["message"]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    "rest",
    [
        b"Content-Length: x\r\n\r\n",
        b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n" + ASK + b"\r\n0\r\n\r\n",
        b"Content-Encoding: zstd\r\nContent-Length: 2\r\n\r\n{}",
        b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=range(7),
)
async def test_malformed_http_is_a_400_and_no_traceback(client, caplog, rest):
    caplog.set_level("INFO")
    logging.getLogger("aiohttp.server").addFilter(one_line)
    try:
        reader, writer = await asyncio.open_connection(client.host, client.port)
        writer.write(HEAD + rest)
        async with asyncio.timeout(5):
            status = await reader.readline()
            await reader.read()
        writer.close()
    finally:
        logging.getLogger("aiohttp.server").removeFilter(one_line)
    assert status.split()[1] == b"400"
    assert "Traceback" not in caplog.text and "a malformed request: 400" in caplog.text


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("stop_token_ids", value) for value in ({}, 0, False, "")],
        *[("best_of", value) for value in (True, "1", 2, [])],
        *[("logit_bias", value) for value in ([], 0, False, "")],
        *[("stop", value) for value in ({}, 0, False)],
        *[("max_tokens", value) for value in (False, "", [])],
        *[("n", value) for value in (False, 0, "", [])],
        *[("ignore_eos", value) for value in (0, "", [])],
        *[("draft", value) for value in (False, "", [])],
        *[("stream", value) for value in (0, "", [])],
        *[("logprobs", value) for value in (False, "", [])],
        *[("temperature", value) for value in (False, "", [], {})],
        *[("penalty_last_n", value) for value in (False, "")],
        *[("seed", value) for value in (False, "")],
        *[("tools", value) for value in (0, False, "", {})],
        *[("store", value) for value in (0, "")],
        *[("model", value) for value in (0, False, [])],
    ],
)
async def test_an_empty_value_of_the_wrong_type_is_refused(client, engine, field, value):
    response = await client.post(TEXT, json={"prompt": "a", field: value})
    assert (response.status, (await response.json())["error"]["param"]) == (400, field)
    assert not engine.gens


@pytest.mark.parametrize("value", [0, "", [], True])
async def test_stream_options_of_the_wrong_type(client, value):
    options = {"stream": True, "stream_options": {"include_obfuscation": value}}
    assert (await client.post(TEXT, json={"prompt": "a", **options})).status == 400


@pytest.mark.parametrize("value", [0, False, [None], {"a": 1}])
async def test_an_echoed_message_field_of_the_wrong_type(client, value):
    messages = [{"role": "assistant", "content": "a", "tool_calls": value}]
    assert (await client.post("/v1/chat/completions", json={"messages": messages})).status == 400


@pytest.mark.parametrize("url", [TEXT, "/tokenize"])
async def test_half_a_surrogate_pair_is_not_sent_back(client, url):
    data = json.dumps({"prompt": "a", "content": "a", "\ud800x": "\udfff"})
    text = await (await client.post(url, data=data, headers=JSON)).text()
    assert not any("\ud800" <= char <= "\udfff" for char in json.loads(text)["error"]["message"])
