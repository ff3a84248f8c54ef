"""Three cells, each a cluster with its own Redis, and a router in front: one region of two, one of one."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from moonpool.local.cluster import LocalCluster
from moonpool.runtime.service.child import Child
from tests.cluster.conftest import eventually, kill, small_config, started

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = "And it came to pass in those days that the word of the LORD came unto "
TENANTS = """
read_keys = ["sk-read"]
admin_keys = ["sk-ops"]
[free]
keys = ["sk-free"]
[acme]
keys = ["sk-acme"]
regions = ["eu"]
"""
REGIONS = {"eu-1": "eu", "eu-2": "eu", "us-1": "us"}


@dataclass
class Reply:
    """``cell``: that answered; ``events``: of a stream, parsed."""

    status: int
    cell: str
    answer: Any
    events: list[Any]

    @property
    def _choices(self) -> Iterator[dict[str, Any]]:
        return (choice for event in self.events for choice in event.get("choices", ()))

    @property
    def texts(self) -> dict[int, str]:
        """By choice."""
        found: dict[int, str] = {}
        for choice in self._choices:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
        return found

    @property
    def tokens(self) -> dict[int, list[int]]:
        """By choice; where they were asked for."""
        found: dict[int, list[int]] = {}
        for choice in self._choices:
            found.setdefault(choice["index"], []).extend(choice["token_ids"])
        return found

    @property
    def text(self) -> str:
        return self.texts[0]


@dataclass
class Front:
    url: str
    cells: dict[str, LocalCluster]
    session: aiohttp.ClientSession

    async def ask(
        self, prompt: str, key: str = "free", *, begun: asyncio.Event | None = None, **more: Any
    ) -> Reply:
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, **more}
        headers = {"Authorization": f"Bearer sk-{key}"}
        async with self.session.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
            cell, events = response.headers.get("x-moonpool-cell", ""), list[Any]()
            if not more.get("stream") or response.status != 200:
                return Reply(response.status, cell, await response.json(), events)
            async for line in response.content:
                if line.startswith(b"data: {"):
                    events.append(json.loads(line.removeprefix(b"data: ")))
                    if begun is not None:
                        begun.set()
            return Reply(response.status, cell, None, events)

    async def num_copied(self, cell: str) -> float:
        """Hot prefixes that a cell has read from others."""
        headers, name = {"Authorization": "Bearer sk-read"}, "moonpool_router_prefix_copies_total"
        async with self.session.get(f"{self.url}/metrics", headers=headers) as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f'{name}{{cell="{cell}"}}'))

    async def num_known(self, cell: str) -> float:
        """Blocks that the conductor of a cell knows of."""
        name = "moonpool_index_mirror_blocks "
        async with self.cells[cell].client() as client:
            lines = (await client.metrics()).splitlines()
        return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))

    async def usable(self) -> set[str]:
        headers = {"Authorization": "Bearer sk-read"}
        async with self.session.get(f"{self.url}/v1/cluster", headers=headers) as response:
            return {one["name"] for one in (await response.json())["cells"] if one["usable"]}

    async def until_usable(self, *names: str) -> None:
        async def as_expected() -> bool:
            return await self.usable() == set(names)

        await eventually(as_expected)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    directory: Path = tmp_path_factory.mktemp("cells")
    tenants = directory / "tenants.toml"
    tenants.write_text(TENANTS)
    config = small_config()
    config = replace(
        config,
        conductor=replace(config.conductor, tenants_path=str(tenants)),
        cluster=replace(config.cluster, prefill=0, decode=0, both=1),
    )
    cells: dict[str, LocalCluster] = {}
    async with AsyncExitStack() as stack:
        for name, region in REGIONS.items():
            (directory / name).mkdir()
            own = replace(config, node=replace(config.node, region=region))
            cells[name] = await stack.enter_async_context(LocalCluster(own, directory=directory / name))
        # The options of a cell's processes have the cluster's key, as those of a router should.
        command = [sys.executable, "-m", "moonpool.conductor.cells"]
        command += ["--config", str(directory / "eu-1" / "cluster.toml"), "--set", "conductor.port=0"]
        command += ["--set", "router.read_key=sk-read"]
        for name, region in REGIONS.items():
            command += ["--cell", f"{name}={cells[name].url},region={region}"]
        router = Child("router", command, directory / "router.log", sends_json=True)
        await stack.enter_async_context(started(router))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        running = Front(str(router.ready["url"]), cells, session)
        await running.until_usable(*REGIONS)
        yield running


async def test_a_prefix_stays_in_its_cell_and_hits(front: Front) -> None:
    used = set()
    for number in range(6):
        prompt = f"{number} {PROMPT * 8}"
        first = await front.ask(prompt)
        assert first.status == 200, first.answer
        again = await front.ask(prompt + "Samuel")
        assert again.cell == first.cell
        assert again.answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 64
        used.add(first.cell)
    assert used == {"eu-1", "eu-2"}, "the router's own region has room"


async def test_a_hot_cell_spills_over(front: Front) -> None:
    alone = await front.ask(PROMPT * 8, max_tokens=64, ignore_eos=True, stream=True)
    together = await asyncio.gather(
        *(front.ask(PROMPT * 8, max_tokens=64, ignore_eos=True, stream=True) for _ in range(8))
    )
    assert {one.cell for one in together} == {"eu-1", "eu-2"}
    assert {one.text for one in together} == {alone.text}


async def test_a_drained_cell_gets_nothing_new_and_is_used_again(front: Front) -> None:
    home = (await front.ask(PROMPT * 8)).cell
    [other] = {"eu-1", "eu-2"} - {home}
    cluster = front.cells[home]
    async with cluster.client() as client:
        await client.drain("both-0")
    await front.until_usable(other, "us-1")
    for _ in range(4):
        assert (await front.ask(PROMPT * 8)).cell == other
    await cluster.children["both-0"].wait()
    await cluster.restart("both-0")
    await front.until_usable(*REGIONS)

    numbers = count()

    async def at_home() -> bool:
        # Another prompt each time: one that is asked often is hot, and divided among cells.
        return (await front.ask(f"{next(numbers)} {PROMPT * 8}")).cell == home

    await eventually(at_home)


async def test_a_drained_cells_hot_prefix_is_found_where_its_requests_go(front: Front) -> None:
    # So long that even an idle machine reads it faster than it computes it.
    prompt = "The hot one. " + PROMPT * 60
    known = {cell: await front.num_known(cell) for cell in REGIONS}
    home = (await front.ask(prompt)).cell
    [other] = {"eu-1", "eu-2"} - {home}
    before = await front.num_copied(other)

    async def found_next_time() -> bool:
        return await front.num_known(home) >= known[home] + 60

    await eventually(found_next_time)
    for _ in range(2):
        assert (await front.ask(prompt)).cell == home, "it is not asked for so often that both have it"

    async def copied() -> bool:
        return await front.num_copied(other) > before

    await eventually(copied)
    cluster = front.cells[home]
    async with cluster.client() as client:
        await client.drain("both-0")
    await front.until_usable(other, "us-1")
    reply = await front.ask(prompt)
    usage = reply.answer["usage"]
    assert reply.cell == other
    assert usage["prompt_tokens_details"]["cached_tokens"] > 0.9 * usage["prompt_tokens"] > 800
    await cluster.children["both-0"].wait()
    await cluster.restart("both-0")
    await front.until_usable(*REGIONS)


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 11},
    {"n": 2, "temperature": 0.9, "seed": 5},
    {"temperature": 0.8, "seed": 7, "presence_penalty": 0.7},
]


async def respond(
    front: Front, begun: asyncio.Event | None = None, **more: Any
) -> tuple[str, list[dict[str, Any]]]:
    """The cell that began a stream of the Responses API, and its events."""
    body = {"input": PROMPT * 8, "max_output_tokens": 300, "temperature": 0, "stream": True, **more}
    headers, events = {"Authorization": "Bearer sk-free"}, list[dict[str, Any]]()
    async with front.session.post(f"{front.url}/v1/responses", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if line.startswith(b"data: {"):
                events.append(json.loads(line.removeprefix(b"data: ")))
                if begun is not None and len(events) > 8:
                    begun.set()
    return response.headers["x-moonpool-cell"], events


def comparable(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without ids and times, which each response has of its own, and what happened to be cached."""
    hidden = ("id", "item_id", "created_at", "input_tokens_details")

    def without(value: Any) -> Any:
        if isinstance(value, list):
            return [without(one) for one in value]
        if isinstance(value, dict):
            return {name: without(one) for name, one in value.items() if name not in hidden}
        return value

    found: list[dict[str, Any]] = without(events)
    return found


async def test_a_killed_cell_is_replaced_within_the_region_and_then_by_another(front: Front) -> None:
    """The last test: cells are gone."""
    home = (await front.ask(PROMPT * 8)).cell
    [other] = {"eu-1", "eu-2"} - {home}
    long = {"max_tokens": 300, "ignore_eos": True, "stream": True, "return_token_ids": True}
    expected = [await front.ask(PROMPT * 8, **long, **one) for one in SAMPLINGS]
    for number in count():
        # Of another prompt than the completions', which is hot by now.
        first = f"{number} {PROMPT * 8}"
        cell, earlier = await respond(front, input=first, max_output_tokens=8)
        if cell == home:
            break
    turns: list[dict[str, Any]] = [
        {"input": first},
        {"input": "And?", "previous_response_id": earlier[-1]["response"]["id"]},
        {
            "input": "And?",
            "previous_response_id": earlier[-1]["response"]["id"],
            "temperature": 0.9,
            "seed": 3,
        },
    ]
    whole_turns = [(await respond(front, **one))[1] for one in turns]
    begun_turns = [asyncio.Event() for _ in turns]
    begun = [asyncio.Event() for _ in SAMPLINGS]
    streams = [
        asyncio.create_task(front.ask(PROMPT * 8, begun=event, **long, **one))
        for event, one in zip(begun, SAMPLINGS, strict=True)
    ]
    responses = [
        asyncio.create_task(respond(front, event, **one))
        for event, one in zip(begun_turns, turns, strict=True)
    ]
    await asyncio.gather(*(event.wait() for event in (*begun, *begun_turns)))
    # On a busy machine one may end before the last has begun: only the lost cell has that one.
    cut_off = [response for response in responses if not response.done()]
    assert cut_off
    for name in front.cells[home].children:
        kill(front.cells[home], name)
    for whole, stream in zip(expected, streams, strict=True):
        reply = await stream
        assert "error" not in reply.events[-1], reply.events[-1]
        assert {index: len(tokens) for index, tokens in reply.tokens.items()} == dict.fromkeys(
            reply.tokens, 300
        )
        assert (reply.tokens, reply.texts) == (whole.tokens, whole.texts), "nothing is doubled or missing"
        assert len({event["id"] for event in reply.events}) == 1
    assert home in {stream.result().cell for stream in streams}
    for turn, response in zip(whole_turns, responses, strict=True):
        _, events = await response
        assert [event.get("sequence_number") for event in events] == list(range(len(events))), events[-1]
        assert comparable(events) == comparable(turn), "the end has the whole text and its usage"
        assert len({event["response"]["id"] for event in events if "response" in event}) == 1
        if response not in cut_off:
            continue
        # The next turn is asked for by the name of a cell that is gone.
        follows = {"previous_response_id": events[-1]["response"]["id"], "max_output_tokens": 4}
        cell, after = await respond(front, input="And?", **follows)
        assert cell == other and after[-1]["type"].startswith("response."), after[-1]
    assert [response.result()[0] for response in responses[1:]] == [home, home], "which made the one before"
    # At once, without an answer that fails: connections are refused before the router has asked.
    found = await asyncio.gather(*(front.ask(f"{number} {PROMPT}", "acme") for number in range(6)))
    assert {(one.status, one.cell) for one in found} == {(200, other)}
    assert (await front.ask(PROMPT * 8)).cell == other
    for name in front.cells[other].children:
        kill(front.cells[other], name)
    assert (await front.ask(PROMPT * 8)).cell == "us-1"
    confined = await front.ask(PROMPT * 8, "acme")
    assert (confined.status, confined.answer["error"]["code"]) == (503, "no_cells")
    assert "tenant acme is confined to eu" in confined.answer["error"]["message"]
    headers = {"Authorization": "Bearer sk-ops"}
    listed = f"{front.cells['us-1'].url}/v1/requests?limit=200"
    async with front.session.get(listed, headers=headers) as response:
        seen = (await response.json())["data"]
    assert {one["tenant"] for one in seen} == {"free"}
