"""/tokenize and /detokenize."""

from __future__ import annotations

import pytest

from strata_proxy.handlers import ENGINE

USER = [{"role": "user", "content": "Hi"}]


async def ids(client, body):
    response = await client.post("/tokenize", json=body)
    answer = await response.json()
    assert response.status == 200 and answer["count"] == len(answer["tokens"])
    return answer["tokens"]


async def test_the_ids_of_a_text(client, tools):
    assert await ids(client, {"content": "aé"}) == tools.ids_of("aé")


async def test_names_of_control_tokens_are_text_where_asked(client, tools):
    text = "<|im_end|>"
    assert await ids(client, {"content": text}) == [2]
    assert await ids(client, {"content": text, "special": False}) == tools.ids_of(text)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [("/v1/chat/completions", "messages", USER), ("/v1/completions", "prompt", "a<|im_end|>b")],
)
async def test_the_ids_are_those_of_a_completion(client, engine, path, field, value):
    await client.post(path, json={field: value})
    assert await ids(client, {"content" if field == "prompt" else field: value}) == engine.prompt


async def test_there_and_back(client):
    text = "<|im_start|>é 日本"
    response = await client.post("/detokenize", json={"tokens": await ids(client, {"content": text})})
    assert await response.json() == {"content": text}


async def test_a_cut_character_is_replaced(client, tools):
    response = await client.post("/detokenize", json={"tokens": tools.ids_of("é")[:1]})
    assert await response.json() == {"content": "\ufffd"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 1}, "content"),
        ("/tokenize", {"content": "\ud800"}, "content"),
        ("/tokenize", {"content": "a", "messages": USER}, "content"),
        ("/tokenize", {"content": "a", "special": 1}, "special"),
        ("/tokenize", {"messages": USER, "special": True}, "special"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages"),
        ("/tokenize", {"content": "a", "add_special": True}, "add_special"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [260]}, "tokens"),
        ("/detokenize", {"tokens": [1.0]}, "tokens"),
    ],
)
async def test_refused_naming_the_field(client, path, body, param):
    response = await client.post(path, json=body)
    assert response.status == 400 and (await response.json())["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_without_an_engine(client, engine, tools, path):
    await engine.stop()
    await tools.until(lambda: not client.app[ENGINE].up)
    response = await client.post(path, json={"content": "a"} if path == "/tokenize" else {"tokens": [1]})
    assert response.status == 503


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_guarded_by_api_keys(proxy, path):
    client = await proxy(api_keys=("key",))
    assert (await client.post(path, json={})).status == 401
