"""Text completions, models, and the fields that are refused."""

from __future__ import annotations

import pytest

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]


async def post(client, url, **body):
    response = await client.post(url, json=body)
    return response.status, await response.json()


async def test_answer_has_openai_shape(client, engine, tools):
    status, body = await post(client, TEXT, prompt="Once")
    assert status == 200 and body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert engine.prompt == tools.ids_of("Once") and body["strata"]["keys"] == ""


async def test_prompt_as_token_ids(client, engine):
    await post(client, TEXT, prompt=[5, 1, 7], max_tokens=4)
    assert engine.gens == ["GEN 4 5,1,7"]


async def test_special_tokens_in_a_text_prompt_count(client, engine):
    await post(client, TEXT, prompt="<|im_start|>a")
    assert engine.prompt[0] == 1


@pytest.mark.parametrize("prompt", [["ab", "c"], [[100, 101], [102]], ["ab", [102]]])
async def test_several_prompts(client, engine, prompt):
    _, body = await post(client, TEXT, prompt=prompt, n=2)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    lengths = sorted(len(line.split()[-1].split(",")) for line in engine.gens)
    assert lengths == [1, 1, 2, 2] and body["usage"]["prompt_tokens"] == 3


async def test_stream(client, tools):
    response = await client.post(TEXT, json={"prompt": "a", "stream": True})
    *events, done = await tools.events_of(response)
    assert done == "[DONE]" and "".join(event["choices"][0]["text"] for event in events) == "Hello"
    assert events[-1]["choices"][0]["finish_reason"] == "stop" and events[-1]["strata"]["keys"] == ""


async def test_logprobs(client):
    _, body = await post(client, TEXT, prompt="a", logprobs=1)
    assert body["choices"][0]["logprobs"] == {
        "tokens": list("Hello"),
        "token_logprobs": [-0.5] * 5,
        "top_logprobs": [{"<|endoftext|>": -1.0}] * 5,
        "text_offset": [0, 1, 2, 3, 4],
    }


async def test_logprobs_of_split_characters_keep_their_bytes(client, engine, tools):
    engine.answer = [*tools.ids_of("é"), tools.eos]
    _, body = await post(client, TEXT, prompt="a", logprobs=0)
    assert body["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 0]


async def test_models(client):
    body = await (await client.get("/v1/models")).json()
    assert body["object"] == "list" and body["data"][0]["id"] == "tiny model"
    one = await client.get("/v1/models/tiny%20model")
    assert (await one.json())["object"] == "model"
    other = await client.get("/v1/models/gpt-4")
    assert other.status == 404 and (await other.json())["error"]["code"] == "model_not_found"


async def test_any_model_name_is_served_and_the_answer_names_the_real_one(client):
    assert (await post(client, TEXT, prompt="a", model="gpt-4"))[1]["model"] == "tiny model"


async def test_strict_model(proxy):
    client = await proxy(strict_model=True, model_name="mine")
    assert (await post(client, TEXT, prompt="a", model="mine"))[0] == 200
    status, body = await post(client, TEXT, prompt="a", model="other")
    assert status == 404 and body["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}),
        ("modalities", ["text", "audio"]),
        ("audio", {}),
        ("prediction", {"type": "content"}),
        ("reasoning_effort", "high"),
        ("service_tier", "flex"),
        ("store", True),
        ("suffix", "x"),
        ("echo", True),
        ("best_of", 2),
        ("n", 0),
        ("n", 17),
        ("n", "2"),
        ("n", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("stream", "true"),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop", [str(i) for i in range(17)]),
        ("stop", "\ud800"),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"01": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"1": "2"}),
        ("logit_bias", {"1": 1e7}),
        ("logit_bias", {"260": 1}),
        ("stop_token_ids", ["1"]),
        ("stop_token_ids", [260]),
        ("ignore_eos", 1),
        ("draft", 8),
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_k", 1.5),
        ("seed", "1"),
        ("model", 5),
        ("nonsense", 1),
        ("temperture", 0.5),
    ],
)
@pytest.mark.parametrize("url", [CHAT, TEXT])
async def test_refused_by_name(client, engine, url, field, value):
    prompt = {"messages": USER} if url == CHAT else {"prompt": "a"}
    status, body = await post(client, url, **prompt, **{field: value})
    assert status == 400 and body["error"]["param"] == field, body
    assert body["error"]["type"] == "invalid_request_error" and field in body["error"]["message"]
    assert not engine.gens


async def test_a_close_name_is_suggested(client):
    _, body = await post(client, TEXT, prompt="a", temperture=0.5)
    assert "temperature" in body["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "store": False},
        {"user": "me", "metadata": {"a": "b"}, "parallel_tool_calls": True, "service_tier": "auto", "tools": []},
        {"stop": None, "logit_bias": {}, "max_tokens": None, "stream": False, "stream_options": None, "seed": None},
        {"logprobs": None, "suffix": None, "echo": False, "stop": [], "model": None, "draft": None},
    ],
)
@pytest.mark.parametrize("url", [CHAT, TEXT])
async def test_neutral_values_pass(client, engine, url, fields):
    prompt = {"messages": USER} if url == CHAT else {"prompt": "a", "best_of": 1}
    status, body = await post(client, url, **prompt, **fields)
    assert status == 200, body
    assert engine.keys == ""


@pytest.mark.parametrize("prompt", [None, "", [], {}, 5, [1, "a"], [["a"]], [-1], [1.5], [True], [260], "\ud800", [[]]])
async def test_bad_prompts(client, prompt):
    status, body = await post(client, TEXT, prompt=prompt)
    assert status == 400 and body["error"]["param"] == "prompt", body


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "Hi",
        {"role": "user"},
        ["Hi"],
        [{"content": "Hi"}],
        [{"role": "user"}],
        [{"role": "robot", "content": "Hi"}],
        [{"role": ["user"], "content": "Hi"}],
        [{"role": "tool", "content": "Hi", "tool_call_id": "1"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": "\ud800"}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": ["Hi"]}],
        [{"role": "user", "content": "Hi", "weight": 1}],
        [{"role": "assistant", "content": "Hi", "tool_calls": [{}]}],
    ],
)
async def test_bad_messages(client, messages):
    status, body = await post(client, CHAT, messages=messages)
    assert status == 400 and body["error"]["param"] == "messages", body


async def test_content_parts_and_roles(client, engine, tools):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    messages.append({"role": "assistant", "content": "x", "refusal": None, "tool_calls": []})
    assert (await post(client, CHAT, messages=messages))[0] == 200
    text = bytes(i - 3 for i in engine.prompt if i >= 3).decode()
    assert text == "system\ns\nuser\na\nb\nassistant\nx\nassistant\n"


async def test_chat_only_and_text_only_fields(client):
    assert (await post(client, CHAT, messages=USER, prompt="a"))[1]["error"]["param"] == "prompt"
    assert (await post(client, TEXT, prompt="a", messages=USER))[1]["error"]["param"] == "messages"
    assert (await post(client, TEXT, prompt="a", logprobs=True))[1]["error"]["param"] == "logprobs"
    assert (await post(client, CHAT, messages=USER, logprobs=1))[1]["error"]["param"] == "logprobs"
    assert (await post(client, CHAT, messages=USER, top_logprobs=2))[1]["error"]["param"] == "top_logprobs"


async def test_prompt_over_the_context_gives_the_numbers(client, engine):
    for url, prompt, param in ((TEXT, {"prompt": "a" * 600}, "prompt"), (CHAT, {"messages": USER}, "messages")):
        if url == CHAT:
            prompt["messages"] = [{"role": "user", "content": "a" * 600}]
        status, body = await post(client, url, **prompt)
        assert status == 400 and body["error"]["param"] == param
        assert body["error"]["code"] == "context_length_exceeded"
        assert "512" in body["error"]["message"] and "6" in body["error"]["message"]
    assert not engine.gens


async def test_max_tokens_over_the_context(client):
    status, body = await post(client, TEXT, prompt="a" * 500, max_tokens=13)
    assert status == 400 and body["error"]["param"] == "max_tokens"
    assert (await post(client, TEXT, prompt="a" * 500, max_tokens=12))[0] == 200


async def test_differing_limits_are_refused(client):
    status, body = await post(client, CHAT, messages=USER, max_tokens=5, max_completion_tokens=6)
    assert status == 400 and body["error"]["param"] == "max_tokens"


async def test_a_model_without_a_template(proxy, engine, make_model):
    engine.say_model(make_model(None))
    client = await proxy()
    status, body = await post(client, CHAT, messages=USER)
    assert status == 400 and body["error"]["param"] == "messages" and body["error"]["code"] == "no_chat_template"
    assert (await post(client, TEXT, prompt="a"))[0] == 200


async def test_a_broken_template(proxy, engine, make_model):
    engine.say_model(make_model("{% for %}"))
    status, body = await post(await proxy(), CHAT, messages=USER)
    assert status == 400 and body["error"]["param"] == "messages"


async def test_a_configured_template(proxy, engine, tools, tmp_path):
    (tmp_path / "chat.jinja").write_text("<{{ messages[0].content }}>", encoding="utf-8")
    await post(await proxy(chat_template=str(tmp_path / "chat.jinja")), CHAT, messages=USER)
    assert engine.prompt == tools.ids_of("<Hi>")
