"""Answers over HTTP: both APIs, whole and streamed, in the shapes clients of OpenAI and vLLM read."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from moonpool.conductor.api.models.lanes import Lanes
from moonpool.conductor.dashboard import routes
from moonpool.conductor.observing.timelines.chrome import chrome_trace

TEXT = "Hello, world."
PROMPT = "In the"


def text_of(events: list[Any], index: int = 0) -> str:
    choices = [event["choices"][0] for event in events[:-1] if event["choices"]]
    return "".join(
        choice.get("text") or choice.get("delta", {}).get("content", "")
        for choice in choices
        if choice["index"] == index
    )


async def test_a_completion(api: Any) -> None:
    api.core.cached = 1
    answer = await api.complete(prompt=PROMPT, max_tokens=50)
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "tiny"
    assert choice["text"] == TEXT
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    assert choice["logprobs"] is None
    assert "token_ids" not in choice
    num_prompt = len(api.core.tokenizer.encode_now(PROMPT, add_special_tokens=True))
    num_output = len(api.core.says(TEXT)) + 1  # the end of sequence is generated, too
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


async def test_a_completion_streamed(api: Any) -> None:
    events = await api.events("/v1/completions", prompt=PROMPT, max_tokens=50)
    assert events[-1] == "[DONE]"
    assert text_of(events) == TEXT
    assert {event["id"] for event in events[:-1]} == {events[0]["id"]}
    assert [event["choices"][0]["finish_reason"] for event in events[:-2]] == [None] * (len(events) - 2)
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert "usage" not in events[0]


async def test_a_chat(api: Any) -> None:
    messages = [
        {"role": "system", "content": "Be good."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    status, answer = await api.post("/v1/chat/completions", {"messages": messages})
    assert status == 200
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    sent = api.core.requests[0]
    assert api.core.tokenizer.decode(sent.prompt_token_ids, skip_special=False) == (
        "<|bos|><|system|>Be good.<|eos|><|user|>Hi<|eos|><|assistant|>"
    )
    # Without a limit a chat may go on to the model's end.
    assert sent.sampling.max_tokens == api.core.model.max_model_len - len(sent.prompt_token_ids)


async def test_a_chat_streamed_with_usage(api: Any) -> None:
    events = await api.events(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "Hi"}],
        max_completion_tokens=4,
        stream_options={"include_usage": True},
    )
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(event["usage"] is None for event in events[:-2])
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 4
    assert events[-3]["choices"][0]["finish_reason"] == "length"


async def test_what_reaches_the_core(api: Any) -> None:
    await api.complete(
        prompt=[5, 6, 7],
        max_tokens=9,
        min_tokens=2,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=-1,
        presence_penalty=1,
        frequency_penalty=-1.5,
        repetition_penalty=1.2,
        logit_bias={"7": -100},
        stop_token_ids=[9],
        ignore_eos=True,
        priority=-3,
        timeout=2.5,
        user="somebody",
        cache_salt="tenant-a",
        surprise="ignored",
    )
    (request,) = api.core.requests
    assert request.prompt_token_ids.tolist() == [5, 6, 7]
    assert (request.priority, request.tenant, request.prompt_logprobs) == (-3, "0:/tenant-a", False)
    assert 0 < request.deadline_s <= 2.5
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.temperature) == (9, 2, 0)
    assert (sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (0.5, 0, 0.1, 2**64 - 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1.5)
    assert (sampling.repetition_penalty, sampling.logit_bias) == (1.2, {7: -100})
    assert (sampling.stop_token_ids, sampling.ignore_eos, sampling.num_logprobs) == ((9,), True, -1)


async def test_a_number_too_small_for_a_message_does_not_turn_into_its_opposite(api: Any) -> None:
    """In float32 it would be 0, which stands for no cut at all."""
    await api.complete(top_p=1e-300)
    (request,) = api.core.requests
    assert request.sampling.to_proto(0).top_p > 0


async def test_defaults_are_the_checkpoints_then_openais(api: Any) -> None:
    await api.complete(top_p=None)  # null is as good as absent
    sampling = api.core.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (16, 1, 1, 7)
    assert (sampling.seed, sampling.num_logprobs, sampling.repetition_penalty) == (None, -1, 1)


async def test_a_batch_with_several_choices_is_numbered_prompt_by_prompt(api: Any) -> None:
    api.core.script = lambda request: api.core.says(
        f"{len(request.prompt_token_ids)} {request.sampling.seed}"
    )
    answer = await api.complete(prompt=[[5], [5, 6]], n=2, seed=40)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == ["1 40", "1 41", "2 40", "2 41"]
    assert answer["usage"]["prompt_tokens"] == 3
    # The first is admitted or not, and the others with it.
    follows = {request.request_id.rsplit("-")[-1]: request.follows for request in api.core.requests}
    assert follows == {"0": False, "1": True, "2": True, "3": True}
    ids = {request.request_id for request in api.core.requests}
    assert ids == {f"{answer['id']}-{i}" for i in range(4)}


async def test_a_streamed_batch_keeps_each_choice_in_order(api: Any) -> None:
    api.core.script = lambda request: api.core.says("abc " * len(request.prompt_token_ids))
    events = await api.events("/v1/completions", prompt=["In", "In the"], n=2, max_tokens=99)
    texts = [text_of(events, index) for index in range(4)]
    assert texts[0] == texts[1]
    assert texts[2] == texts[3]
    assert len(texts[2]) > len(texts[0]) > 0
    ends = [event["choices"][0]["index"] for event in events[:-1] if event["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2, 3]


async def test_choices_of_one_prompt_wait_for_its_first_token(api: Any) -> None:
    gate = asyncio.Event()
    api.core.script = lambda request: [gate, *api.core.says("x")]
    answer = asyncio.create_task(api.complete(n=3))
    await api.core.until(lambda: len(api.core.requests) > 0)
    await asyncio.sleep(0)
    assert len(api.core.requests) == 1
    gate.set()
    assert [choice["text"] for choice in (await answer)["choices"]] == ["x"] * 3


@pytest.mark.parametrize("stop", ["rld", ["zzz", "wor"], "o, w", [".", "d."]])
@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_shown_past_a_stop(api: Any, stop: Any, stream: bool) -> None:
    api.core.script = lambda request: api.core.says(TEXT * 5)
    stops = [stop] if isinstance(stop, str) else stop
    first = min(TEXT.index(one) for one in stops if one in TEXT)
    if stream:
        events = await api.events("/v1/completions", prompt=PROMPT, stop=stop, max_tokens=90)
        text, last = text_of(events), events[-2]["choices"][0]
    else:
        last = (await api.complete(stop=stop, max_tokens=90))["choices"][0]
        text = last["text"]
    assert text == TEXT[:first]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", TEXT[first:][: len(last["stop_reason"])])
    # The rest was not generated for nothing.
    await api.core.until(lambda: api.core.cancelled == [api.core.requests[0].request_id])


async def test_stops_may_be_included_and_wait_for_min_tokens(api: Any) -> None:
    answer = await api.complete(stop="wor", include_stop_str_in_output=True, max_tokens=90)
    assert answer["choices"][0]["text"] == "Hello, wor"
    num_tokens = len(api.core.says(TEXT))
    answer = await api.complete(stop="wor", min_tokens=num_tokens, max_tokens=90)
    assert answer["choices"][0]["text"] == TEXT


async def test_a_stop_token_ends_without_its_text(api: Any) -> None:
    last = api.core.says(TEXT)[-1]
    (choice,) = (await api.complete(stop_token_ids=[last]))["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (TEXT[:-1], "stop", last)


async def test_characters_of_several_tokens_arrive_whole(api: Any) -> None:
    text = "naïve 👩‍👩‍👧 你好, Привет 🇩🇪"
    api.core.script = lambda request: api.core.says(text)
    events = await api.events("/v1/completions", prompt=PROMPT, max_tokens=200)
    assert text_of(events) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in event["choices"][0]["text"] for event in events[:-1])


async def test_token_ids_are_returned_whole_and_streamed(api: Any) -> None:
    tokens = [*api.core.says(TEXT), 1]
    (choice,) = (await api.complete(prompt=[5, 6], return_token_ids=True, max_tokens=50))["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([5, 6], tokens)
    events = await api.events("/v1/completions", prompt=[5, 6], return_token_ids=True, max_tokens=50)
    choices = [event["choices"][0] for event in events[:-1]]
    assert [choice["prompt_token_ids"] for choice in choices] == [[5, 6]] + [None] * (len(choices) - 1)
    assert [one for choice in choices for one in choice["token_ids"]] == tokens


async def test_completion_logprobs_with_echo(api: Any) -> None:
    answer = await api.complete(prompt="In the", echo=True, logprobs=2, max_tokens=2)
    (choice,) = answer["choices"]
    prompt = api.core.says("In the")
    output = api.core.says(TEXT)[:2]
    assert api.core.requests[0].prompt_logprobs
    assert choice["text"] == "In the" + api.core.tokenizer.decode(output)
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert logprobs["token_logprobs"] == [None, *(-i / 16 for i in [*prompt, *output][1:])]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 3 for top in logprobs["top_logprobs"][1:])  # two, and the token itself
    lengths = [len(token) for token in logprobs["tokens"]]
    assert logprobs["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]


async def test_echo_alone_asks_nothing_of_the_model(api: Any) -> None:
    answer = await api.complete(prompt="In the", echo=True, max_tokens=0)
    assert answer["choices"][0]["text"] == "In the"
    assert answer["usage"]["completion_tokens"] == 0
    assert api.core.requests == []
    scored = await api.complete(prompt="In the", echo=True, max_tokens=0, logprobs=0)
    assert scored["choices"][0]["text"] == "In the"
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == len(api.core.says("In the"))
    assert len(api.core.requests) == 1


async def test_chat_logprobs_have_true_bytes(api: Any) -> None:
    api.core.script = lambda request: api.core.says("界!")
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "logprobs": True,
        "top_logprobs": 1,
        "max_tokens": 50,
    }
    _, answer = await api.post("/v1/chat/completions", body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content[:-1]).decode() == "界!"
    assert content[0]["token"].startswith("bytes:\\x")
    assert content[-1]["token"] == "<|eos|>"
    assert [len(one["top_logprobs"]) for one in content] == [1] * len(content)
    events = await api.events("/v1/chat/completions", **body)
    streamed = [
        one for event in events[:-1] for one in (event["choices"][0]["logprobs"] or {}).get("content", ())
    ]
    assert streamed == content


async def test_each_answer_has_a_request_id(api: Any) -> None:
    async with api.client.post(f"{api.url}/v1/completions", json={"prompt": "In"}) as response:
        own = response.headers["x-request-id"]
        assert (await response.json())["id"] == f"cmpl-{own}"
    headers = {"x-request-id": "mine-1"}
    for _ in range(2):  # the same again is another request to the core
        async with api.client.post(
            f"{api.url}/v1/completions", json={"prompt": "In"}, headers=headers
        ) as response:
            assert response.headers["x-request-id"] == "mine-1"
            assert (await response.json())["id"].startswith("cmpl-mine-1-")
    assert len({request.request_id for request in api.core.requests}) == 3
    async with api.client.get(f"{api.url}/v1/requests/mine-1/timeline") as response:
        timeline = await response.json()
    assert timeline["request_id"] == api.core.requests[-1].request_id
    assert timeline["api"]["output_tokens"] > 0
    address = f"{api.url}/v1/requests/mine-1/timeline?format=chrome"
    async with api.client.get(address) as response:
        assert await response.json() == chrome_trace(timeline)


async def test_a_snapshot_that_fails_ends_its_viewers_and_no_later_ones(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "EVERY_S", 0.01)
    feed = routes.LiveFeed(api.context, Lanes.alone(api.context))
    snapshots = [KeyError("metrics_url"), b"data: {}"]

    def event(scope: str | None) -> bytes:
        found = snapshots.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(feed, "event", event)
    with feed.watching():
        with pytest.raises(KeyError):
            await asyncio.wait_for(feed.next(None), 60)
        assert await asyncio.wait_for(feed.next(None), 60) == b"data: {}"
    assert feed._task is not None
    await feed._task


async def test_viewers_that_come_together_share_a_snapshot_that_costs_much(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed, made = routes.LiveFeed(api.context, Lanes.alone(api.context)), []

    def event(scope: str | None) -> bytes:
        until_s = time.thread_time() + 0.02  # an event lasts for 1.3 s then
        while time.thread_time() < until_s:
            pass
        made.append(scope)
        return b"data: {}"

    monkeypatch.setattr(feed, "event", event)
    assert {feed.first(None) for _ in range(8)} == {b"data: {}"}
    feed.first("a tenant")
    assert made == [None, "a tenant"]
    monkeypatch.setattr(feed, "event", lambda scope: b"data: 1")
    assert feed.first("another") == b"data: 1"
