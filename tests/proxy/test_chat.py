"""Chat completions, whole and streamed."""

from __future__ import annotations

import pytest

USER = [{"role": "user", "content": "Hi"}]
CHAT = "/v1/chat/completions"


async def test_answer_has_openai_shape(client, engine):
    response = await client.post(CHAT, json={"messages": USER})
    body = await response.json()
    assert response.status == 200
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["model"] == "tiny model"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
    prompt = len(engine.prompt)
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 6,
        "total_tokens": prompt + 6,
        "prompt_tokens_details": {"cached_tokens": prompt // 2},
    }


async def test_prompt_is_the_rendered_template(client, engine, tools):
    await client.post(CHAT, json={"messages": USER})
    text = tools.ids_of
    assert engine.prompt == [1, *text("user\nHi"), 2, *text("\n"), 1, *text("assistant\n")]


async def test_max_tokens_defaults_to_the_rest_of_the_context(client, engine):
    await client.post(CHAT, json={"messages": USER})
    assert int(engine.gens[-1].split()[1]) == 512 - len(engine.prompt)


async def test_length_is_reported(client):
    for field in ("max_tokens", "max_completion_tokens"):
        body = await (await client.post(CHAT, json={"messages": USER, field: 2})).json()
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["choices"][0]["message"]["content"] == "He"


async def test_stream_goes_role_text_end_done(client, tools):
    response = await client.post(CHAT, json={"messages": USER, "stream": True})
    assert response.headers["Content-Type"].startswith("text/event-stream")
    *events, done = await tools.events_of(response)
    assert done == "[DONE]"
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas[1:-1]) == "Hello"
    assert deltas[-1] == {} and events[-1]["choices"][0]["finish_reason"] == "stop"
    assert all(event["object"] == "chat.completion.chunk" and "usage" not in event for event in events)
    assert len({event["id"] for event in events}) == 1


async def test_stream_sends_text_as_it_comes(client, engine, tools):
    engine.pace = 0.05
    response = await client.post(CHAT, json={"messages": USER, "stream": True})
    assert b"assistant" in await response.content.readuntil(b"\n\n")
    assert b'"H"' in await response.content.readuntil(b"\n\n")
    assert engine.running == 1


async def test_usage_chunk_when_asked(client, tools):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *events, usage, _ = await tools.events_of(await client.post(CHAT, json={"messages": USER, **options}))
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == 6
    assert all(event["usage"] is None for event in events)


async def test_strata_object_says_what_reached_the_engine(client, engine, tools):
    request = {"messages": USER, "temperature": 0.5, "top_p": 1.0, "seed": 7}
    body = await (await client.post(CHAT, json=request)).json()
    assert engine.keys == body["strata"]["keys"] == "temperature=0.5 seed=7"
    assert body["strata"]["seed"] == 7
    assert body["strata"]["drafts"] == {"accepted": 3, "offered": 4}
    assert body["strata"]["reused"] == len(engine.prompt) // 2
    events = await tools.events_of(await client.post(CHAT, json={**request, "stream": True}))
    assert events[-2]["strata"]["keys"] == "temperature=0.5 seed=7"


async def test_seed_drawn_by_the_engine_is_reported(client, engine):
    engine.seed = 2**64 - 1
    body = await (await client.post(CHAT, json={"messages": USER, "temperature": 1})).json()
    assert body["strata"]["seed"] == 2**64 - 1


async def test_config_sampling_is_the_default_and_the_request_wins(proxy, engine):
    client = await proxy(sampling={"temperature": 0.7, "top_k": 40})
    await client.post(CHAT, json={"messages": USER, "temperature": None})
    assert engine.keys == "temperature=0.7 top_k=40"
    await client.post(CHAT, json={"messages": USER, "temperature": 0})
    assert engine.keys == "top_k=40"


async def test_n_choices_draw_with_successive_seeds(client, engine):
    body = await (await client.post(CHAT, json={"messages": USER, "n": 3, "temperature": 1, "seed": 5})).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert sorted(line.split()[3] for line in engine.gens) == ["seed=5", "seed=6", "seed=7"]
    assert [choice["seed"] for choice in body["strata"]["choices"]] == [5, 6, 7]
    assert body["usage"]["completion_tokens"] == 18
    assert body["usage"]["prompt_tokens"] == len(engine.prompt)


async def test_n_choices_stream_side_by_side(client, engine, tools):
    engine.pace = 0.01
    *events, _ = await tools.events_of(await client.post(CHAT, json={"messages": USER, "n": 2, "stream": True}))
    texts = {0: "", 1: ""}
    for event in events:
        texts[event["choices"][0]["index"]] += event["choices"][0]["delta"].get("content", "")
    assert texts == {0: "Hello", 1: "Hello"}
    assert sum(event["choices"][0]["finish_reason"] == "stop" for event in events) == 2


async def test_split_characters_never_reach_the_client(client, engine, tools):
    engine.answer = [*tools.ids_of("né 👩 日"), tools.eos]
    *events, _ = await tools.events_of(await client.post(CHAT, json={"messages": USER, "stream": True}))
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == "né 👩 日" and "�" not in "".join(pieces)


async def test_incomplete_character_at_the_end_becomes_a_replacement(client, engine, tools):
    engine.answer = tools.ids_of("a👩")[:-1]
    body = await (await client.post(CHAT, json={"messages": USER, "max_tokens": 4})).json()
    assert body["choices"][0]["message"]["content"] == "a�"


async def test_stop_string_across_tokens(client, engine, tools):
    engine.answer = [*tools.ids_of("one END two"), tools.eos]
    body = await (await client.post(CHAT, json={"messages": USER, "stop": ["ENDLESS", " END"]})).json()
    assert body["choices"][0]["message"]["content"] == "one"
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 7


async def test_stop_string_ends_the_generation(client, engine, tools):
    engine.answer, engine.pace = tools.ids_of("ab" * 200), 0.01
    body = await (await client.post(CHAT, json={"messages": USER, "stop": "ba", "max_tokens": 400})).json()
    assert body["choices"][0]["message"]["content"] == "a"
    assert engine.stopped == 1 and engine.running == 0


async def test_a_stop_string_waits_for_a_long_step(client, engine, tools):
    engine.answer, engine.pace, engine.stop_after = tools.ids_of("ab" * 200), 0.01, 2.5
    body = await (await client.post(CHAT, json={"messages": USER, "stop": "ba"})).json()
    assert body["choices"][0]["message"]["content"] == "a" and body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dies", [False, True])
async def test_a_stop_string_needs_no_done(client, engine, tools, monkeypatch, stream, dies):
    monkeypatch.setattr("strata_proxy.generation.STOP_S", 0.2)
    engine.answer, engine.pace, engine.stop_after, engine.dies_at_stop = tools.ids_of("ab" * 200), 0.01, None, dies
    request = {"messages": USER, "stop": "ba", "temperature": 1, "seed": 5, "stream": stream}
    response = await client.post(CHAT, json=request)
    last = (await tools.events_of(response))[-2] if stream else await response.json()
    assert last["choices"][0]["finish_reason"] == "stop"
    strata = last["strata"]
    assert (strata["seed"], strata["reused"], strata["prompt_ms"]) == (5, len(engine.prompt) // 2, 1.0)
    if not stream:
        assert last["choices"][0]["message"]["content"] == "a"
        assert last["usage"]["prompt_tokens"] == len(engine.prompt) and last["usage"]["completion_tokens"] >= 3
    await tools.until(lambda: engine.running == 0)


async def test_text_held_for_a_stop_string_comes_out_at_the_end(client, engine, tools):
    engine.answer = [*tools.ids_of("the EN"), tools.eos]
    *events, _ = await tools.events_of(await client.post(CHAT, json={"messages": USER, "stop": "END", "stream": True}))
    pieces = [event["choices"][0]["delta"].get("content", "") for event in events]
    assert "".join(pieces) == "the EN" and pieces[-2] == "EN"


async def test_logprobs_have_tokens_bytes_and_alternatives(client):
    body = await (await client.post(CHAT, json={"messages": USER, "logprobs": True, "top_logprobs": 2})).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list("Hello")
    assert content[0]["logprob"] == -0.5 and content[0]["bytes"] == [72]
    assert content[0]["top_logprobs"][1] == {"token": "<|im_start|>", "logprob": -2.0, "bytes": list(b"<|im_start|>")}


async def test_logprobs_stream_with_their_text(client, tools):
    request = {"messages": USER, "logprobs": True, "stream": True}
    *events, _ = await tools.events_of(await client.post(CHAT, json=request))
    scored = [e["choices"][0]["logprobs"]["content"][0] for e in events if e["choices"][0]["logprobs"]]
    assert [entry["token"] for entry in scored] == list("Hello") and scored[0]["top_logprobs"] == []


async def test_logprobs_end_where_a_stop_string_cut(client, engine, tools):
    engine.answer = [*tools.ids_of("abXYcd"), tools.eos]
    body = await (await client.post(CHAT, json={"messages": USER, "logprobs": True, "stop": "XY"})).json()
    assert [entry["token"] for entry in body["choices"][0]["logprobs"]["content"]] == ["a", "b"]


async def test_engine_keys_of_other_fields(client, engine):
    request = {"logit_bias": {"5": -100, "6": 1.5, "7": 0}, "ignore_eos": True, "draft": 0, "stop_token_ids": [9, 8]}
    await client.post(CHAT, json={"messages": USER, **request})
    assert engine.keys == "logit_bias=5:-100,6:1.5 stop=9,8 ignore_eos=1 draft=0"


async def test_stop_token_adds_no_text(client, engine, tools):
    engine.answer = tools.ids_of("ab")
    body = await (await client.post(CHAT, json={"messages": USER, "stop_token_ids": tools.ids_of("b")})).json()
    assert body["choices"][0]["message"]["content"] == "a"
