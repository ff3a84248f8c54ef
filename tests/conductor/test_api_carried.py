"""Streams that carry their past go on at a conductor that has never seen them."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.conductor.api.choice import Delta
from moonpool.conductor.api.errors import ApiError
from moonpool.conductor.api.responses.conversations import Conversations
from moonpool.conductor.api.schemas import CarriedPast
from moonpool.conductor.api.streams.resume import Position, Resumable, carried_messages
from moonpool.conductor.observing.recent_requests import RecentRequests
from moonpool.conductor.requests.stream_records import StreamHead, StreamRecord
from tests.conductor.conftest import Api, prompt_of

TEXT = "the heaven and the earth. naïve café 你好 " * 6
CARRY = {"x-moonpool-past": "1"}


@dataclass
class Event:
    """``past``: as a router would have kept it by then."""

    data: str
    past: dict[str, Any] | None


async def events(api: Api, path: str, body: dict[str, Any]) -> list[Event]:
    found, name, at, entries, kind = list[Event](), "", "", list[str](), ""
    async with api.client.post(api.url + path, json=body, headers=CARRY) as response:
        assert response.status == 200, await response.text()
        assert response.headers["x-moonpool-past"] == "1"
        text = await response.text()
    for block in text.split("\n\n")[:-1]:
        tagged = False
        for line in block.split("\n"):
            if line.startswith(": at "):
                at, tagged = line[5:], True
            elif line.startswith(": past "):
                name, entry = line[7:].split(" ")
                entries.append(entry)
            elif line.startswith("event: "):
                kind = line[7:]
            else:
                assert not kind or f'{{"type":"{kind}",' in line
                past = {"name": name, "at": at, "entries": list(entries)} if tagged else None
                found.append(Event(line.removeprefix("data: "), past))
    return found


@pytest.fixture
def speaking(api: Api) -> Api:
    """A core that goes on where it is asked to."""
    tokens = api.core.says(TEXT)
    api.core.script = lambda request: tokens[len(request.output_ids) :]
    return api


@pytest.mark.parametrize("more", [{}, {"n": 2}, {"logprobs": 1}, {"temperature": 0}])
async def test_a_stream_goes_on_after_each_event(speaking: Api, more: dict[str, Any]) -> None:
    body = {"prompt": "In the", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 200}
    body |= more
    whole = await events(speaking, "/v1/completions", body)
    places = [place for place, event in enumerate(whole) if event.past is not None]
    assert len(places) > 40
    for place in [*places[::11], places[-1]]:
        rest = await events(speaking, "/v1/completions", body | {"past": whole[place].past})
        expected = whole[place + 1 :]
        assert sorted(one.data for one in rest) == sorted(one.data for one in expected), place
        if "n" not in more:  # choices come in any order
            assert [one.data for one in rest] == [one.data for one in expected]
        # What was kept is at most some tokens short.
        latest = speaking.core.requests[-1]
        if not more and rest[:-2]:
            assert place - 16 <= len(latest.output_ids) <= place + 2
            assert latest.sampling.seed == speaking.core.requests[0].sampling.seed is not None


async def test_a_choice_that_begins_anew_counts_its_cached_tokens_once(speaking: Api) -> None:
    """Log-probabilities are not recorded: what was recorded and not sent is computed again."""
    speaking.core.cached = 1
    ask = {"prompt": ["In the", "In the end"], "logprobs": 1, "max_tokens": 200, "stream": True}
    body: dict[str, Any] = ask | {"stream_options": {"include_usage": True}}
    whole = await events(speaking, "/v1/completions", body)
    usage = json.loads(whole[-2].data)["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}
    kept = [event.past for event in whole if event.past is not None]
    sent_none_of_second = next(past["at"] for past in kept if past["at"].endswith(",0-00000000"))
    past = kept[-1] | {"at": sent_none_of_second}
    rest = await events(speaking, "/v1/completions", body | {"past": past})
    assert json.loads(rest[-2].data)["usage"] == usage


async def test_a_chat_goes_on_without_a_second_opening(speaking: Api) -> None:
    body = {"messages": [{"role": "user", "content": "In the"}], "stream": True, "max_tokens": 200}
    whole = await events(speaking, "/v1/chat/completions", body)
    second = next(event for event in whole[5:] if event.past is not None)
    rest = await events(speaking, "/v1/chat/completions", body | {"past": second.past})
    assert [one.data for one in rest] == [one.data for one in whole[whole.index(second) + 1 :]]
    # It breaks again, elsewhere.
    third = next(event for event in rest[5:] if event.past is not None)
    last = await events(speaking, "/v1/chat/completions", body | {"past": third.past})
    assert [one.data for one in last] == [one.data for one in rest[rest.index(third) + 1 :]]


CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Ulm"}}\n</tool_call>'
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@pytest.mark.parametrize("says", [TEXT, "Well. " + CALL])
async def test_a_response_goes_on_after_each_of_its_events(tools_api: Api, says: str) -> None:
    api = tools_api
    _, before = await api.post("/v1/responses", {"input": "Hi"})
    tokens = api.core.says(says)
    api.core.script = lambda request: tokens[len(request.output_ids) :]
    body = {"input": "In the", "stream": True, "tools": [LOOK], "previous_response_id": before["id"]}
    whole = await events(api, "/v1/responses", body)
    api.context.conversations = Conversations()  # those of another cluster
    numbers = [json.loads(event.data)["sequence_number"] for event in whole]
    assert numbers == list(range(len(whole)))
    places = [place for place, event in enumerate(whole) if event.past is not None]
    assert len(places) > 5
    for place in [*places[::7], *places[-3:]]:
        rest = await events(api, "/v1/responses", body | {"past": whole[place].past})
        assert [one.data for one in rest] == [one.data for one in whole[place + 1 :]], place
    final = json.loads(rest[-1].data)["response"]
    assert final["usage"]["output_tokens"] == json.loads(whole[-1].data)["response"]["usage"]["output_tokens"]
    # The next turn goes on from it where it ended.
    status, after = await api.post("/v1/responses", {"input": "And?", "previous_response_id": final["id"]})
    assert status == 200, after
    assert "<|user|>Hi<|eos|>" in prompt_of(api), "with what came before it"


async def test_a_stream_that_goes_on_is_found_by_its_id_and_leaves_no_name(
    speaking: Api,
) -> None:
    recent = speaking.context.recent = RecentRequests(capacity=1)
    body = {"prompt": "In the", "stream": True, "max_tokens": 200}
    whole = await events(speaking, "/v1/completions", body)
    answer_id = json.loads(whole[0].data)["id"]
    await events(speaking, "/v1/completions", body | {"past": whole[5].past})
    [record] = recent.latest(2)
    assert record.id != answer_id and recent.find(answer_id) is record
    await speaking.complete()
    assert recent.find(answer_id) is None
    assert set(recent._aliases.values()) == {recent.latest(1)[0].id}


def test_text_that_an_end_without_a_token_brings_is_not_lost() -> None:
    head = StreamHead("a", 0, "", "", (1,), 0.0)
    seen = Position().after(Delta(token_ids=[7]))
    record = StreamRecord.new(head, "", "", lambda: None)
    stream = Resumable(head, record, (seen,), [Position()], [seen], None)
    run: Any = SimpleNamespace(choice=SimpleNamespace(index=0, num_cached_tokens=0))
    assert stream.advance(run, Delta(text="So", token_ids=[7])) is None
    end = Delta(text=" far", finish_reason="stop")
    assert stream.advance(run, end) == end


async def test_messages_of_another_tenant_or_of_no_stream_do_not_count(tools_api: Api) -> None:
    api = tools_api
    _, before = await api.post("/v1/responses", {"input": "Hi"})
    api.core.script = lambda request: api.core.says(TEXT)
    body = {"input": "In the", "stream": True, "previous_response_id": before["id"]}
    whole = await events(api, "/v1/responses", body)
    past = [event.past for event in whole if event.past is not None][20]
    assert past is not None
    api.context.conversations = Conversations()
    raw = bytearray(b64decode(past["entries"][0]))
    raw[-3] ^= 1
    forged = past | {"entries": [b64encode(raw).decode()]}
    status, answer = await api.post("/v1/responses", body | {"past": forged}, headers=CARRY)
    assert (status, answer["error"]["code"]) == (403, "stream_forged")
    assert carried_messages(past, "") == [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello, world."},
    ]
    assert carried_messages(past, "another") is None


async def test_only_a_past_that_conductors_have_made_counts(speaking: Api) -> None:
    body = {"prompt": "In the", "stream": True, "max_tokens": 60}
    whole = await events(speaking, "/v1/completions", body)
    past = CarriedPast(**[event.past for event in whole if event.past is not None][40])
    assert len(past.entries) > 1
    raw = bytearray(b64decode(past.entries[-1]))
    raw[-3] ^= 1
    forged = past.model_copy(update={"entries": [*past.entries[:-1], b64encode(raw).decode()]})
    renamed = past.model_copy(update={"name": "another"})
    shortened = past.model_copy(update={"entries": past.entries[1:]})
    swapped = past.model_copy(update={"entries": past.entries[::-1]})
    for wrong in (forged, renamed, shortened, swapped, past.model_copy(update={"entries": ["?"]})):
        sent = body | {"past": wrong.model_dump()}
        status, answer = await speaking.post("/v1/completions", sent, headers=CARRY)
        assert (status, answer["error"]["code"]) == (403, "stream_forged")
    other = body | {"past": past.model_dump(), "prompt": "In that"}
    status, answer = await speaking.post("/v1/completions", other, headers=CARRY)
    assert (status, answer["error"]["code"]) == (409, "other_request")
    misplaced = body | {"past": past.model_copy(update={"at": "3-00000000"}).model_dump()}
    status, answer = await speaking.post("/v1/completions", misplaced, headers=CARRY)
    assert (status, answer["error"]["code"]) == (409, "stream_differs")
    status, answer = await speaking.post("/v1/completions", body | {"past": past.model_dump()})
    assert (status, answer["error"]["param"]) == (400, "past"), "nobody asks for a past"


def test_an_answer_that_ends_before_what_the_client_has_is_another_one() -> None:
    head = StreamHead("a", 0, "", "", (1,), 0.0)
    seen = Position().after(Delta(token_ids=[7, 8]))
    record = StreamRecord.new(head, "", "", lambda: None)
    stream = Resumable(head, record, (seen,), [Position()], [seen], None)
    run: Any = SimpleNamespace(choice=SimpleNamespace(index=0, num_cached_tokens=0))
    with pytest.raises(ApiError, match="came out differently"):
        stream.advance(run, Delta(text="So", token_ids=[7], finish_reason="stop"))
