"""Streams that carry their past go on at a conductor that has never seen them."""

from __future__ import annotations

from base64 import b64decode, b64encode
from dataclasses import dataclass
from typing import Any

import pytest

from moonpool.conductor.api.schemas import CarriedPast
from tests.conductor.conftest import Api

TEXT = "the heaven and the earth. naïve café 你好 " * 6
CARRY = {"x-moonpool-past": "1"}


@dataclass
class Event:
    """``past``: as a router would have kept it by then."""

    data: str
    past: dict[str, Any] | None


async def events(api: Api, path: str, body: dict[str, Any]) -> list[Event]:
    found, name, at, entries = list[Event](), "", "", list[str]()
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
            else:
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
