"""Errors in one shape, clients that leave, an engine that comes and goes, health at any load."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
from dataclasses import replace

import pytest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
JSON = {"Content-Type": "application/json"}
USER = [{"role": "user", "content": "Hi"}]


def assert_error(body, code=None, param=None):
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["type"]
    assert body["error"]["param"] == param and (code is None or body["error"]["code"] == code)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b'{"prompt": "a"} x',
        b'{"prompt": "a", "temperature": NaN} x',
        b"[NaN]",
        b"NaN",
        b'{"prompt": "a", "prompt": "b"}',
        b'{"prompt": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
    ],
    ids=range(14),
)
async def test_bodies_that_are_no_json_object(client, data):
    response = await client.post(TEXT, data=data, headers=JSON)
    assert response.status == 400
    assert_error(await response.json(), "invalid_json")


@pytest.mark.parametrize("constant", [b"NaN", b"Infinity", b"-Infinity"])
@pytest.mark.parametrize(
    ("field", "param"),
    [(b'"temperature": %b', "temperature"), (b'"logit_bias": {"3": %b}', "logit_bias"), (b'"stop": ["a", %b]', "stop")],
)
async def test_constants_that_are_not_json_are_refused_by_field(client, constant, field, param):
    response = await client.post(TEXT, data=b'{"prompt": "a", %b}' % (field % constant), headers=JSON)
    assert response.status == 400
    assert_error(await response.json(), "invalid_json", param)


@pytest.mark.parametrize("field", [b'"seed": %b', b'"logit_bias": {"3": %b}'])
async def test_an_endless_integer_is_refused_by_field_in_words_for_users(client, field):
    response = await client.post(TEXT, data=b'{"prompt": "a", %b}' % (field % (b"9" * 5000)), headers=JSON)
    body = await response.json()
    assert_error(body, "invalid_json", field.split(b'"')[1].decode())
    assert "digits" in body["error"]["message"] and "sys." not in body["error"]["message"]


async def test_overflowing_numbers_are_refused_by_name(client):
    response = await client.post(TEXT, data=b'{"prompt": "a", "temperature": 1e999}', headers=JSON)
    assert response.status == 400
    assert_error(await response.json(), param="temperature")


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("POST", "/v1/embeddings", 404, "not_found"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
    ],
)
async def test_unknown_routes_and_methods(client, method, path, status, code):
    response = await client.request(method, path)
    assert response.status == status
    assert_error(await response.json(), code)
    assert status != 405 or response.headers["Allow"]


async def test_body_over_the_limit(proxy):
    client = await proxy(max_body_bytes=2000)
    response = await client.post(TEXT, json={"prompt": "a" * 3000})
    assert response.status == 413
    assert_error(await response.json(), "request_too_large")


FORM = "application/x-www-form-urlencoded"  # what curl -d sends, and a web page may send anywhere


async def post_as(client, kind, headers):
    headers = headers if kind is None else {**headers, "Content-Type": kind}
    skip = ["Content-Type"] if kind is None else []
    return await client.post(TEXT, data=b'{"prompt": "a"}', headers=headers, skip_auto_headers=skip)


@pytest.mark.parametrize("kind", ["text/plain", "application/octet-stream", "multipart/form-data"])
async def test_wrong_content_type(client, kind):
    response = await post_as(client, kind, {})
    assert response.status == 415
    assert_error(await response.json(), "unsupported_media_type")


@pytest.mark.parametrize("kind", [None, FORM])
async def test_json_without_its_type_is_taken_from_programs(client, kind):
    assert (await post_as(client, kind, {})).status == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null"])
@pytest.mark.parametrize("kind", [None, FORM])
async def test_json_without_its_type_is_not_taken_from_web_pages(client, engine, kind, origin):
    assert (await post_as(client, kind, {"Origin": origin})).status == 415
    assert not engine.gens


@pytest.mark.parametrize(
    ("path", "meant"),
    [(f"{CHAT}/", CHAT), ("/chat/completions", CHAT), ("/v1/completion", TEXT), ("/v1/tokenize", "/tokenize")],
)
async def test_a_route_that_is_nearly_right_is_named(client, path, meant):
    error = (await (await client.post(path, json={})).json())["error"]
    assert error["message"].endswith(f"did you mean {meant}?")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (CHAT, {"prompt": "a"}, "prompt is a field of /v1/completions; this is /v1/chat/completions, which wants mess"),
        (TEXT, {"messages": USER}, "messages is a field of /v1/chat/completions; this is /v1/completions, which wants"),
        (TEXT, {"prompt": "a", "penalty_repeat": 1.1}, "did you mean repetition_penalty?"),
        (CHAT, {"messages": USER, "penalty_freq": 1}, "did you mean frequency_penalty?"),
        (TEXT, {"prompt": "a", "repetition_penalty": 0}, "must be a number over 0 and at most 1e+06, got 0"),
    ],
)
async def test_a_wrong_field_is_told_the_right_one(client, path, body, words):
    assert words in (await (await client.post(path, json=body)).json())["error"]["message"]


@pytest.mark.parametrize(
    ("line", "status", "code"),
    [
        ("ERR BUSY the queue is full", 429, "engine_busy"),
        ("ERR CONTEXT_FULL prompt + max_new over 512", 400, "context_length_exceeded"),
        ("ERR OUT_OF_RANGE top_k=0", 400, "out_of_range"),
        ("ERR INTERNAL fault", 500, "internal"),
        ("ERR SHUTDOWN ending", 503, "engine_unavailable"),
        ("ERR LOADING not yet", 503, "engine_unavailable"),
        ("T nonsense", 500, "engine_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_of_the_engine(client, engine, line, status, code, stream):
    engine.refuse = line
    response = await client.post(TEXT, json={"prompt": "a", "stream": stream})
    assert response.status == status
    assert_error(await response.json(), code)
    assert (status in (429, 503)) == ("Retry-After" in response.headers)


async def test_engine_gone_before_an_answer(client, engine):
    engine.die_after = 2
    response = await client.post(TEXT, json={"prompt": "a"})
    assert response.status == 503
    assert_error(await response.json(), "engine_unavailable")


async def test_engine_gone_in_the_middle_of_a_stream(client, engine, tools):
    engine.die_after = 2
    events = await tools.events_of(await client.post(CHAT, json={"messages": USER, "stream": True}))
    assert_error(events[-1], "engine_unavailable")
    assert "[DONE]" not in events


async def test_an_engine_that_is_yet_to_come_is_no_warning(proxy, engine, caplog, tools):
    caplog.set_level("INFO", "strata_proxy")
    await engine.stop()
    await proxy()
    await tools.until(lambda: "waiting for the engine: " in caplog.text)
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
    await engine.start()
    await tools.until(lambda: "engine up" in caplog.text)
    await engine.stop()
    await tools.until(lambda: "WARNING" in caplog.text)
    assert caplog.text.count("engine down: The engine went away") == 1


async def test_engine_absent_then_back(proxy, engine, tools):
    await engine.stop()
    client = await proxy()
    response = await client.post(TEXT, json={"prompt": "a"})
    assert response.status == 503
    assert_error(await response.json(), "engine_unavailable")
    assert (await client.get("/v1/models")).status == 503
    await engine.start()
    assert (await client.post(TEXT, json={"prompt": "a"})).status == 200


async def test_health_follows_the_engine(client, engine, tools):
    health = await client.get("/health")
    assert health.status == 200 and (await health.json())["engine"]["up"] is True
    await engine.stop()
    await until_status(client, 503)
    body = await (await client.get("/health")).json()
    assert body["engine"] == {"up": False} and body["error"]["code"] == "engine_unavailable"
    await engine.start()
    await until_status(client, 200)


async def until_status(client, status):
    async with asyncio.timeout(5):
        while (await client.get("/health")).status != status:
            await asyncio.sleep(0.02)


async def test_another_model_after_a_restart(client, engine, make_model):
    await engine.stop()
    engine.say_model(make_model("{{ 'new' }}"))
    await engine.start()
    body = await (await client.post(CHAT, json={"messages": USER})).json()
    assert body["model"] == "other" and len(engine.prompt) == 3


async def test_the_same_file_rewritten_is_read_again(proxy, engine, make_model):
    engine.say_model(make_model("{{ 'old one' }}"))
    client = await proxy()
    await engine.stop()
    await until_status(client, 503)
    make_model("{{ 'new' }}")
    await engine.start()
    await client.post(CHAT, json={"messages": USER})
    assert len(engine.prompt) == 3


async def test_a_model_file_that_cannot_be_read(proxy, engine, tmp_path):
    engine.say_model(tmp_path / "gone.gguf")
    client = await proxy(wait=False)
    response = await client.post(TEXT, json={"prompt": "a"})
    assert response.status == 503
    assert_error(await response.json(), "model_unusable")
    message = (await (await client.get("/health")).json())["error"]["message"]
    assert message == f"cannot read the model file {tmp_path / 'gone.gguf'}: no such file or directory"


@pytest.fixture
async def odd(proxy, engine, model, tmp_path):
    """A client of a proxy whose model file has a name that is not UTF-8."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/m\xff\xe9.gguf")
    shutil.copy(model, path)
    engine.say_model(path)
    return await proxy()


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_a_model_path_that_is_not_utf8(odd, tools, path):
    ask = {"messages": USER} if path == CHAT else {"prompt": "a"}
    assert (await (await odd.post(path, json=ask)).json())["model"] == "m\ufffd\ufffd"
    events = await tools.events_of(await odd.post(path, json={**ask, "stream": True}))
    assert events[-1] == "[DONE]" and events[0]["model"] == "m\ufffd\ufffd"


async def test_a_model_path_that_is_not_utf8_in_models_and_health(odd):
    name = (await (await odd.get("/v1/models")).json())["data"][0]["id"]
    assert name == "m\ufffd\ufffd" and (await odd.get(f"/v1/models/{name}")).status == 200
    assert (await (await odd.get("/health")).json())["engine"]["model"].endswith("/m\ufffd\ufffd.gguf")


async def test_a_missing_model_whose_path_is_not_utf8(odd, engine, tmp_path):
    engine.say_model(os.fsdecode(os.fsencode(tmp_path) + b"/gone\xff.gguf"))
    response = await odd.post(TEXT, json={"prompt": "a", "stream": True})
    assert response.status == 503 and "gone\ufffd.gguf" in (await response.json())["error"]["message"]


async def test_an_engine_of_another_protocol_is_refused(proxy, engine):
    engine.info = replace(engine.info, protocol=2)
    client = await proxy(wait=False)
    response = await client.post(TEXT, json={"prompt": "a"})
    error = (await response.json())["error"]
    assert (response.status, error["code"]) == (503, "engine_protocol") and not engine.gens
    assert error["message"] == ("The engine cannot be used: it speaks version 2 of the protocol, this client version 1")
    assert (await client.get("/health")).status == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_cancels_its_request(client, engine, tools, stream, n):
    engine.answer, engine.pace = tools.ids_of("a" * 400), 0.02
    body = {"prompt": "a", "stream": stream, "n": n}
    task = asyncio.create_task(client.post(TEXT, json=body))
    await tools.until(lambda: engine.running == n)
    if stream:
        (await task).close()
    else:
        task.cancel()
    await tools.until(lambda: engine.cancelled == n and engine.running == 0, timeout=1.0)


async def test_a_client_that_leaves_a_queued_stream(client, engine, tools):
    engine.silent = True
    task = asyncio.create_task(client.post(TEXT, json={"prompt": "a", "stream": True}))
    await tools.until(lambda: engine.running == 1)
    task.cancel()
    await tools.until(lambda: engine.cancelled == 1, timeout=1.0)


async def test_leaving_touches_no_other_request(client, engine, tools):
    engine.answer, engine.pace = [*tools.ids_of("a" * 20), tools.eos], 0.01
    staying = asyncio.create_task(client.post(TEXT, json={"prompt": "a"}))
    leaving = asyncio.create_task(client.post(TEXT, json={"prompt": "a"}))
    await tools.until(lambda: engine.running == 2)
    leaving.cancel()
    body = await (await staying).json()
    assert body["choices"][0]["text"] == "a" * 20 and engine.cancelled == 1


async def test_comments_keep_a_silent_stream_open(proxy, engine, tools):
    client = await proxy(keepalive_s=0.05)
    engine.silent = True
    response = await client.post(TEXT, json={"prompt": "a", "stream": True})
    assert await response.content.readline() == b": waiting\n"
    response.close()
    await tools.until(lambda: engine.cancelled == 1)


async def test_health_answers_at_once_under_load(client, engine, tools):
    engine.answer, engine.pace = tools.ids_of("a" * 400), 0.001
    load = [asyncio.create_task(client.post(TEXT, json={"prompt": "a" * 90, "n": 4})) for _ in range(8)]
    await tools.until(lambda: engine.running == 32)
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        assert (await client.get("/health")).status == 200
        times.append(time.perf_counter() - begun)
    for task in load:
        task.cancel()
    assert sorted(times)[len(times) // 2] < 0.05


async def test_metrics(client):
    await client.post(TEXT, json={"prompt": "abc"})
    await client.post(TEXT, json={"prompt": 5})
    text = await (await client.get("/metrics")).text()
    assert 'strata_requests_total{route="/v1/completions",status="200"} 1.0' in text
    assert 'strata_requests_total{route="/v1/completions",status="400"} 1.0' in text
    assert 'strata_tokens_total{kind="generated"} 6.0' in text
    assert 'strata_tokens_total{kind="prompt"} 3.0' in text
    assert "strata_engine_up 1.0" in text
    assert "_created" not in text
    assert 'strata_first_token_seconds_count{route="/v1/completions"} 1.0' in text


async def test_metrics_count_clients_that_left(client, engine, tools):
    engine.silent = True
    task = asyncio.create_task(client.post(TEXT, json={"prompt": "a"}))
    await tools.until(lambda: engine.running == 1)
    task.cancel()
    await tools.until(lambda: engine.cancelled == 1)
    assert 'status="499"} 1.0' in await (await client.get("/metrics")).text()


async def test_api_keys(proxy):
    client = await proxy(api_keys=("one", "two"))
    for headers in ({}, *({"Authorization": text} for text in ("Bearer three", "Bearer é", "two", "Basic two"))):
        response = await client.get("/v1/models", headers=headers)
        assert response.status == 401
        assert_error(await response.json(), "invalid_api_key")
    for text in ("Bearer two", "bearer two"):  # the scheme has no case
        assert (await client.get("/v1/models", headers={"Authorization": text})).status == 200
    assert (await client.get("/health")).status == 200


async def test_cross_origin_pages_are_not_let_in_by_default(client):
    response = await client.get("/v1/models", headers={"Origin": "https://a.example"})
    assert "Access-Control-Allow-Origin" not in response.headers


async def test_cross_origin_pages_that_are_configured(proxy):
    client = await proxy(cors_origins=("https://a.example",), api_keys=("key",))
    origin = {"Origin": "https://a.example"}
    preflight = await client.options(CHAT, headers=origin)
    assert preflight.status == 204 and "Authorization" in preflight.headers["Access-Control-Allow-Headers"]
    headers = origin | {"Authorization": "Bearer key"}
    response = await client.post(CHAT, json={"messages": USER, "stream": True}, headers=headers)
    assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
    refused = await client.get("/v1/models", headers=origin)
    assert refused.status == 401 and refused.headers["Access-Control-Allow-Origin"] == "https://a.example"
    assert "Access-Control-Allow-Origin" not in (await client.get("/health", headers={"Origin": "https://b"})).headers


async def test_errors_of_the_proxy_itself_are_json(client, monkeypatch):
    monkeypatch.setattr("strata_proxy.handlers.parse_ask", lambda *_: 1 / 0)
    response = await client.post(TEXT, data=json.dumps({"prompt": "a"}), headers=JSON)
    assert response.status == 500
    assert_error(await response.json(), "internal_error")
