"""Routes over HTTP: two scripted models behind one API."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import REGISTRY

from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.api.models.lanes import Lane, Lanes
from moonpool.conductor.api.streams import heartbeats
from moonpool.conductor.api.streams.carried import PAST_HEADER
from moonpool.conductor.errors import NoNodes, RequestFailed
from moonpool.conductor.request import GenerateRequest
from moonpool.runtime.config.options import ConductorOptions
from moonpool.runtime.config.routes import read_route
from tests.conductor.conftest import COST, Api, ScriptedConductor, serving
from tests.conductor.test_api_carried import events as carried_events

SIMPLE = "What is the capital of Peru?"
DEMANDING = "Write a Python function that merges intervals, prove that it is correct, and analyse it."


@dataclass
class Tiers:
    """``small`` answers first in a cascade; ``api`` is that of the large model."""

    api: Api
    small: ScriptedConductor
    large: ScriptedConductor


@asynccontextmanager
async def tiers(checkpoint: Path, *given: dict[str, Any]) -> AsyncIterator[Tiers]:
    """The routes of a file of models."""
    made: dict[str, ScriptedConductor] = {}

    def lanes_of(context: ApiContext) -> Lanes:
        large = context.conductor
        small = ScriptedConductor(context.tokenizer)
        large.model, small.model = (replace(large.model, name=name) for name in ("large", "small"))
        made.update(small=small, large=large)
        other = replace(context, conductor=small)
        lanes = [
            Lane("large", large, lambda: context, loaded=context),
            Lane("small", small, lambda: other),
        ]
        return Lanes(lanes, [read_route(one) for one in given])

    options = ConductorOptions(port=0, max_body_nbytes=1 << 16)
    async with serving(checkpoint, options, lanes_of) as api:
        yield Tiers(api, made["small"], made["large"])
    assert not made["small"].running


def counted(name: str, **labels: str) -> Callable[[], float]:
    """What was added to a metric since this call."""

    def value() -> float:
        return REGISTRY.get_sample_value(f"moonpool_route_{name}", labels) or 0.0

    before = value()
    return lambda: value() - before


@pytest.mark.parametrize(("prompt", "model"), [(SIMPLE, "small"), (DEMANDING, "large")])
async def test_a_classifier_chooses_the_model(checkpoint: Path, prompt: str, model: str) -> None:
    route = {"name": "classified", "classifier": {"models": ["small", "large"]}}
    answered = counted("requests_total", route="classified", model_name=model)
    cost = counted("cost_total", route="classified")
    async with tiers(checkpoint, route) as served:
        _, answer = await served.api.post("/v1/completions", {"model": "classified", "prompt": prompt})
        assert (answer["model"], answer["choices"][0]["text"]) == (model, "Hello, world.")
        message = {"role": "user", "content": prompt}
        chunks = await served.api.events(
            "/v1/chat/completions", model="classified", messages=[message], max_tokens=4
        )
        assert {one["model"] for one in chunks[:-1]} == {model}
        assert len(getattr(served, model).requests) == 2
    assert answered() == 2
    assert cost() == 2 * COST


SURE, UNSURE = 16, 160  # tokens: the scripted model gives them log-probabilities of -1 and -10
EARLY = {"models": ["small", "large"], "least_logprob": -2.0, "after_tokens": 3}


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["text"] for choice in choices)


@pytest.mark.parametrize("n", [1, 2])
async def test_after_n_sure_tokens_the_cheap_answer_is_streamed_as_it_comes(checkpoint: Path, n: int) -> None:
    gate = asyncio.Event()
    held = counted("held_seconds_count", route="early")
    async with tiers(checkpoint, {"name": "early", "cascade": EARLY}) as served:
        # What comes later is not judged.
        tokens = [SURE, SURE, SURE, UNSURE, UNSURE, UNSURE]
        served.small.script = lambda request: [*tokens[:4], gate, *tokens[4:]]
        body = {"model": "early", "prompt": "In", "stream": True, "n": n, "logprobs": 0}
        async with served.api.client.post(f"{served.api.url}/v1/completions", json=body) as response:
            first = json.loads((await response.content.readline()).removeprefix(b"data: "))
            assert first["model"] == "small"
            assert first["choices"][0]["logprobs"]["token_logprobs"][:3] == [-1.0] * 3
            assert not gate.is_set(), "the answer has not ended yet"
            gate.set()
            rest = await response.text()
        assert rest.endswith("data: [DONE]\n\n")
        served.small.script = lambda request: tokens
        _, whole = await served.api.post("/v1/completions", body | {"stream": False})
        alone = (await served.api.complete(model="small"))["choices"][0]["text"]
        assert [one["text"] for one in whole["choices"]] == [alone] * n
        chunks = await served.api.events("/v1/completions", **body)
        assert [text_of(chunks, index) for index in range(n)] == [alone] * n
        assert not served.large.requests
    assert held() == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_after_n_unsure_tokens_the_larger_model_begins_anew(checkpoint: Path, stream: bool) -> None:
    never = asyncio.Event()
    labels = {"route": "early", "model_name": "small", "cause": "unsure"}
    unsure, added = counted("escalations_total", **labels), counted("added_seconds_count", route="early")
    cost = counted("cost_total", route="early")
    async with tiers(checkpoint, {"name": "early", "cascade": EARLY}) as served:
        served.small.script = lambda request: [SURE, UNSURE, UNSURE, never]
        body = {"model": "early", "prompt": "In"}
        if stream:
            chunks = await served.api.events("/v1/completions", **body)
            assert {one["model"] for one in chunks[:-1]} == {"large"}
            assert text_of(chunks) == "Hello, world."
        else:
            answer = await served.api.complete(**body)
            assert (answer["model"], answer["choices"][0]["text"]) == ("large", "Hello, world.")
        assert len(served.small.cancelled) == 1, "the node is told, and computes no more of it"
    assert (unsure(), added()) == (1, 1)
    assert cost() == 2 * COST


@pytest.mark.parametrize("first", [SURE, UNSURE])
async def test_a_drafted_stream_goes_on_elsewhere_with_its_model_and_seed(
    checkpoint: Path, first: int
) -> None:
    gate = asyncio.Event()

    def sampled(request: GenerateRequest) -> list[Any]:
        chance = random.Random(request.sampling.seed)  # None: never the same twice
        tokens = [first, SURE, SURE, gate, *(chance.randrange(10, 200) for _ in range(40))]
        done = len(request.output_ids)
        return tokens[done + (done > 2) :]

    async with tiers(checkpoint, {"name": "early", "cascade": EARLY}) as served:
        served.small.script = served.large.script = sampled
        answered = served.small if first == SURE else served.large
        body: dict[str, Any] = {"model": "early", "prompt": "In", "stream": True, "max_tokens": 60}
        reading = asyncio.create_task(carried_events(served.api, "/v1/completions", body))
        async with asyncio.timeout(60):
            # Until nothing is held any more.
            while not any(one.write_s for one in served.api.context.recent.latest(1)):  # noqa: ASYNC110
                await asyncio.sleep(0)
        gate.set()
        whole = await reading
        places = [place for place, event in enumerate(whole) if event.past is not None]
        assert len(places) > 20
        for place in places[::7]:
            rest = await carried_events(served.api, "/v1/completions", body | {"past": whole[place].past})
            assert [one.data for one in rest] == [one.data for one in whole[place + 1 :]]
            assert answered.requests[-1].output_ids, "what was there is not computed again"


async def test_an_answer_that_ends_early_is_judged_by_what_there_is(checkpoint: Path) -> None:
    short = counted("escalations_total", route="early", model_name="small", cause="short")
    async with tiers(checkpoint, {"name": "early", "cascade": EARLY | {"min_tokens": 3}}) as served:
        for tokens, model in (([SURE, SURE], "small"), ([SURE], "large")):
            served.small.script = lambda request, tokens=tokens: tokens
            assert (await served.api.complete(model="early"))["model"] == model
    assert short() == 1


async def test_choices_of_one_answer_are_judged_together(checkpoint: Path) -> None:
    """One that is ahead is held until the other has as many tokens."""
    gate = asyncio.Event()
    async with tiers(checkpoint, {"name": "early", "cascade": EARLY}) as served:
        scripts = {0: [SURE] * 8, 1: [SURE, gate, SURE, SURE, SURE]}
        served.small.script = lambda request: scripts[int(request.request_id[-1])]
        chunks = asyncio.create_task(served.api.events("/v1/completions", model="early", prompt="In", n=2))
        await served.small.until(lambda: len(served.small.requests) == 2 and len(served.small.running) == 1)
        gate.set()
        answers = [text_of(await chunks, index) for index in (0, 1)]
        one = served.small.tokenizer.decode([SURE])
        assert answers == [one * 8, one * 4]


async def test_a_model_that_fails_before_it_is_judged_is_passed_over(checkpoint: Path) -> None:
    async with tiers(checkpoint, {"name": "early", "cascade": EARLY}) as served:
        served.small.script = lambda request: [SURE, SURE, RequestFailed("no node", 1, 2)]
        chunks = await served.api.events("/v1/completions", model="early", prompt="In")
        assert (chunks[0]["model"], text_of(chunks)) == ("large", "Hello, world.")
        # Later, the client has a part of its answer.
        served.small.script = lambda request: [*[SURE] * 3, RequestFailed("no node", 1, 3)]
        chunks = await served.api.events("/v1/completions", model="early", prompt="In")
        assert (chunks[0]["model"], chunks[-1]["error"]["code"]) == ("small", "request_failed")


async def test_a_stream_that_is_held_beats(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeats, "EVERY_S", 0.01)
    async with tiers(checkpoint, {"name": "early", "cascade": EARLY}) as served:
        for token, model in ((SURE, "small"), (UNSURE, "large")):
            gate, last = asyncio.Event(), asyncio.Event()
            rest = [SURE, token, last]
            served.small.script = lambda request, gate=gate, rest=rest: [SURE, gate, *rest]
            served.large.script = lambda request, last=last: [SURE, last]
            body = {"model": "early", "prompt": "In", "stream": True}
            async with served.api.client.post(f"{served.api.url}/v1/completions", json=body) as response:
                for _ in range(3):
                    assert await response.content.readuntil(b"\n\n") == heartbeats.HEARTBEAT
                gate.set()
                while (said := await response.content.readuntil(b"\n\n")) == heartbeats.HEARTBEAT:
                    pass
                assert json.loads(said.removeprefix(b"data: "))["model"] == model
                await asyncio.sleep(10 * heartbeats.EVERY_S)  # there would be time for more
                last.set()
                events = (await response.text()).removesuffix("\n\n").split("\n\n")
            assert events[-1] == "data: [DONE]"
            assert all(one.startswith("data: ") for one in events), "no comment after the first token"


async def test_a_stream_that_is_held_says_with_its_first_comment_that_it_carries_its_past(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a router of cells could not go on with it elsewhere."""
    monkeypatch.setattr(heartbeats, "EVERY_S", 0.01)
    async with tiers(checkpoint, {"name": "early", "cascade": EARLY}) as served:
        gate = asyncio.Event()
        served.small.script = lambda request: [gate, UNSURE, UNSURE, UNSURE]
        body = {"model": "early", "prompt": "In", "stream": True}
        url, carry = f"{served.api.url}/v1/completions", {PAST_HEADER: "1"}
        async with served.api.client.post(url, json=body, headers=carry) as response:
            assert response.headers[PAST_HEADER] == "1"
            assert await response.content.readuntil(b"\n\n") == heartbeats.HEARTBEAT
            gate.set()
            assert ": past " in await response.text()


async def test_an_error_after_a_heartbeat_is_an_event_and_before_it_a_status(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tiers(checkpoint, {"name": "early", "cascade": EARLY}) as served:
        gate = asyncio.Event()
        served.small.script = lambda request: [gate, UNSURE, UNSURE, UNSURE]
        served.large.script = lambda request: [NoNodes("decode", 1.0)]
        body = {"model": "early", "prompt": "In", "stream": True}
        url = f"{served.api.url}/v1/completions"
        gate.set()
        async with served.api.client.post(url, json=body) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (503, "no_nodes")
        monkeypatch.setattr(heartbeats, "EVERY_S", 0.01)
        gate.clear()
        async with served.api.client.post(url, json=body) as response:
            assert (response.status, await response.content.readline()) == (200, b": waiting\n")
            gate.set()
            last = (await response.text()).strip().split("\n\n")[-1]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "no_nodes"
        assert served.api.context.recent.latest(1)[0].status == "NoNodes"


async def test_a_client_that_leaves_ends_what_is_held(checkpoint: Path) -> None:
    never = asyncio.Event()
    async with tiers(checkpoint, {"name": "early", "cascade": EARLY}) as served:
        served.small.script = lambda request: [SURE, never]
        async with aiohttp.ClientSession() as client:
            body = {"model": "early", "prompt": "In", "stream": True}
            asked = asyncio.create_task(client.post(f"{served.api.url}/v1/completions", json=body))
            await served.small.until(lambda: bool(served.small.running))
            asked.cancel()
        await served.small.until(lambda: not served.small.running)
        assert (len(served.small.cancelled), served.large.requests) == (1, [])
