"""Placements shown with the answer, to those who ask."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.conductor.views import REQUEST, cluster, node, placed


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_where_it_was_computed_and_why_when_asked(api: Any, stream: bool) -> None:
    placement = placed(REQUEST, cluster([node("p0"), node("p1")], [node("d0")], {"p1": 10}))

    def script(request: Any) -> list[Any]:
        timeline = api.core.timelines[request.request_id]
        timeline.add("queued", 0.0)
        timeline.add("placed", 0.25, attempt=0, placement=placement)
        summary = timeline.summary
        summary.prefix_outcome, summary.prefix_missed = "hit", "salted"
        summary.prompt_tokens, summary.cached_tokens = 10, 6
        summary.host_tokens, summary.fetched_tokens = 4, 2
        return list(api.core.says("Hi."))

    api.core.script = script
    body = {"prompt": "In the", "stream": stream}
    for header, explains in (("1", True), ("0", False)):
        options = {"json": body, "headers": {"x-moonpool-explain": header}}
        async with api.client.post(api.url + "/v1/completions", **options) as response:
            text = await response.text()
            assert response.status == 200, text
        answers = [
            line.removeprefix("data: ") for line in text.split("\n\n") if line not in ("", "data: [DONE]")
        ]
        said = json.loads(answers[-1]).get("moonpool")
        if not explains:
            assert said is None
            continue
        (sequence,) = said
        assert sequence["prefix"] == {
            "outcome": "hit",
            "missed": "salted",
            "prompt_tokens": 10,
            "cached_tokens": 6,
            "cached_from": {"host": 4, "fetched": 2},
        }
        (one,) = sequence["placements"]
        assert (one["at_s"], one["attempt"]) == (0.25, 0)
        assert one["placement"]["prefill"] == "p1"
        assert one["placement"]["reason"] == "locality"
        assert {c["node_id"] for c in one["placement"]["prefill_candidates"]} == {"p0", "p1"}
    options = {"json": body, "headers": {"x-moonpool-explain": "yes"}}
    async with api.client.post(api.url + "/v1/completions", **options) as response:
        assert response.status == 400
        assert "x-moonpool-explain must be 0 or 1" in (await response.json())["error"]["message"]


async def test_the_list_of_requests_says_what_came_of_each_prefix(api: Any) -> None:
    goes_on = asyncio.Event()

    def script(request: Any) -> list[Any]:
        summary = api.core.timelines[request.request_id].summary
        summary.prefix_outcome, summary.prefix_missed = "hit", "dropped"
        summary.pool_tokens = 1
        return list(api.core.says("Hi.", goes_on))

    async def listed() -> tuple[str, str, str, dict[str, int]]:
        async with api.client.get(api.url + "/v1/requests") as response:
            [one] = (await response.json())["data"]
        return one["status"], one["prefix_outcome"], one["prefix_missed"], one["cached_from"]

    api.core.script = script
    body = {"prompt": ["In", "the"], "stream": True}
    async with api.client.post(api.url + "/v1/completions", json=body) as response:
        await response.content.readline()
        assert await listed() == ("running", "hit", "dropped", {"pool": 1}), "known from the placement on"
        goes_on.set()
        assert response.status == 200
        await response.read()
    assert await listed() == ("done", "hit", "dropped", {"pool": 1})


async def test_a_request_may_carry_its_slo(api: Any) -> None:
    options: dict[str, Any] = {"json": {"prompt": "In the"}}
    both = {"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "12.5"}
    for headers, expected in ((None, (0.0, 0.0)), (both, (0.5, 0.0125))):
        options["headers"] = headers
        async with api.client.post(api.url + "/v1/completions", **options) as response:
            assert response.status == 200, await response.text()
        asked = api.core.requests[-1]
        assert (asked.slo_ttft_s, asked.slo_tbt_s) == expected
    for wrong in ("soon", "0", "-5", "nan", "inf", "1e30"):
        options["headers"] = {"x-slo-ttft-ms": wrong}
        async with api.client.post(api.url + "/v1/completions", **options) as response:
            assert response.status == 400, wrong
            message = (await response.json())["error"]["message"]
            assert message == (
                f"the header x-slo-ttft-ms must be a number of milliseconds above 0, got '{wrong}'"
            )
