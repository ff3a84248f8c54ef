"""Streams go on at another conductor when theirs dies or ends: no gap, no repetition, nothing left behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from moonpool.client import Client, Reply
from moonpool.kvstore.index.redis.client import connect
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.service.child import Child
from tests.cluster.conftest import another, eventually

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NUM_TOKENS = 300
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 11},
    {"temperature": 0.8, "seed": 7, "presence_penalty": 0.7, "repetition_penalty": 1.1},
    {"n": 2, "temperature": 0.9, "seed": 5},
]
ADMIN_KEY = "sk-ops-0123456789abcdef"
BUSY_S = 60.0  # what a busy machine takes beside a bound


@asynccontextmanager
async def conductors(cluster: LocalCluster, *options: str, count: int = 2) -> AsyncIterator[list[Child]]:
    """Conductors that see all nodes, and each other, and leave at once when asked to."""
    options = ("conductor.leave_s=0", *options)
    children = [another(cluster, f"resume-{i}", "conductor", *options) for i in range(count)]
    async with AsyncExitStack() as stack:
        for child in children:
            await child.start()
            stack.push_async_callback(child.stop, 10)
        for child in children:
            await child.wait_ready(60)
            async with Client(str(child.ready["url"]), api_key=ADMIN_KEY) as client:

                async def sees_all(client: Client = client) -> bool:
                    seen = await client.cluster()
                    states = [node["state"] for node in seen["nodes"]]
                    return states == ["ready"] * len(cluster.nodes) and seen["num_other_conductors"] == count

                await eventually(sees_all)
        yield children


async def until(replies: list[Reply], num_pieces: int) -> None:
    async def all_have() -> bool:
        return all(len(reply.pieces_s) >= num_pieces for reply in replies)

    await eventually(all_have)


async def read(client: Client, reply: Reply, number: int) -> None:
    sampling = SAMPLINGS[number % len(SAMPLINGS)]
    async for _ in client.complete(f"{number}. And it came to pass", reply, **{**GREEDY, **sampling}):
        pass


async def nothing_left(cluster: LocalCluster, client: Client) -> None:
    async def idle() -> bool:
        loads = [node["load"] for node in (await client.cluster())["nodes"]]
        return all(
            load["num_running"] == load["num_waiting"] == 0 and load["num_free_blocks"] == load["num_blocks"]
            for load in loads
        )

    bound_s = cluster.config.node.orphan_s + cluster.config.store.lease_ttl_s
    await eventually(idle, timeout_s=BUSY_S + bound_s)


@pytest.mark.parametrize("ending", ["kill", "term"])
async def test_streams_go_on_at_another_conductor(cluster: LocalCluster, client: Client, ending: str) -> None:
    expected = [Reply() for _ in range(8)]
    await asyncio.gather(*(read(client, reply, number) for number, reply in enumerate(expected)))
    assert not any(reply.num_resumed for reply in expected)
    async with conductors(cluster) as (first, second):
        async with Client(str(first.ready["url"]), others=[str(second.ready["url"])]) as both:
            replies = [Reply() for _ in expected]
            reading = [asyncio.create_task(read(both, reply, i)) for i, reply in enumerate(replies)]
            await until(replies, 10)
            first.kill() if ending == "kill" else first.terminate()
            await asyncio.gather(*reading)
            if ending == "term":
                assert await asyncio.wait_for(first.wait(), 60) == 0
        # On a busy machine the first of them may have been sent whole when the last have begun.
        assert sum(bool(reply.num_resumed) for reply in replies) >= 2
        for number, (reply, one) in enumerate(zip(replies, expected, strict=True)):
            assert reply.usage["completion_tokens"] == one.usage["completion_tokens"]
            if "n" in SAMPLINGS[number % len(SAMPLINGS)]:  # its choices come in any order
                assert sorted(reply.text) == sorted(one.text), number
            else:
                assert reply.text == one.text, number
    await nothing_left(cluster, client)


async def events(response: aiohttp.ClientResponse, most: int) -> list[tuple[str, str]]:
    """Id and data of the first ``most`` events."""
    found, event_id = list[tuple[str, str]](), ""
    async for line in response.content:
        if line.startswith(b"id: "):
            event_id = line[4:].decode().strip()
        elif line.startswith(b"data: "):
            found.append((event_id, line[6:].decode().strip()))
            if len(found) == most:
                break
    return found


def tokens_of(found: list[tuple[str, str]]) -> list[tuple[Any, ...]]:
    """Each event's text with its tokens and their offsets; logprobs differ in their last digits."""
    choices = [choice for _, data in found[:-1] for choice in json.loads(data)["choices"]]
    return [
        (choice["text"], *((choice["logprobs"] or {}).get(name) for name in ("tokens", "text_offset")))
        for choice in choices
    ]


async def test_a_stream_goes_on_after_each_of_its_events(cluster: LocalCluster) -> None:
    body = {
        "prompt": "In the beginning",
        **GREEDY,
        "max_tokens": 40,
        "logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True, "resumable": True},
    }
    url = f"{cluster.url}/v1/completions"
    async with aiohttp.ClientSession() as http:
        async with http.post(url, json=body) as response:
            whole = await events(response, 1 << 30)
        assert whole[-1][1] == "[DONE]"
        for nth in [*range(0, len(whole) - 2, 9), len(whole) - 3]:
            async with http.post(url, json=body, headers={"Last-Event-ID": whole[nth][0]}) as response:
                assert response.status == 200, await response.text()
                rest = await events(response, 1 << 30)
            assert rest[-1][1] == "[DONE]"
            assert tokens_of(rest) == tokens_of(whole[nth + 1 :])
            usage = [json.loads(one[-2][1])["usage"]["completion_tokens"] for one in (rest, whole)]
            assert usage == [40, 40]


async def test_a_response_goes_on_after_its_events(cluster: LocalCluster) -> None:
    body = {
        "input": "In the beginning",
        "temperature": 0,
        "max_output_tokens": 40,
        "stream": True,
        "stream_options": {"resumable": True},
    }
    url = f"{cluster.url}/v1/responses"
    async with aiohttp.ClientSession() as http:
        async with http.post(url, json=body) as response:
            whole = await events(response, 1 << 30)
        named = [nth for nth in range(1, len(whole)) if whole[nth][0] != whole[nth - 1][0]]
        for nth in (*named[::9], named[-1]):
            async with http.post(url, json=body, headers={"Last-Event-ID": whole[nth][0]}) as response:
                assert response.status == 200, await response.text()
                rest = await events(response, 1 << 30)
            assert [data for _, data in rest[:-1]] == [data for _, data in whole[nth + 1 : -1]]
            ends = [json.loads(one[-1][1])["response"] for one in (rest, whole)]
            assert ends[0]["output"] == ends[1]["output"]
            assert ends[0]["usage"]["output_tokens"] == ends[1]["usage"]["output_tokens"]


async def test_who_may_not_go_on_with_a_stream_is_told_why(cluster: LocalCluster, tmp_path: Path) -> None:
    keys = {"a": "sk-tenant-a-0123456789abcdef", "b": "sk-tenant-b-0123456789abcdef"}
    file = tmp_path / "tenants.toml"
    tenants = "".join(f'[{name}]\nkeys = ["{key}"]\n' for name, key in keys.items())
    file.write_text(f'admin_keys = ["{ADMIN_KEY}"]\n{tenants}')
    body = {
        "prompt": "Of the kings",
        **GREEDY,
        "max_tokens": 30,
        "stream": True,
        "stream_options": {"resumable": True},
    }
    async with conductors(cluster, f"conductor.tenants_path={file}", count=1) as (child,):
        url = f"{child.ready['url']}/v1/completions"

        async def resumed(last_id: str, tenant: str = "a", **other: Any) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {keys[tenant]}", "Last-Event-ID": last_id}
            async with (
                aiohttp.ClientSession() as http,
                http.post(url, json=body | other, headers=headers) as response,
            ):
                return response.status, await response.text()

        async with aiohttp.ClientSession() as http:
            headers = {"Authorization": f"Bearer {keys['a']}"}
            async with http.post(url, json=body, headers=headers) as response:
                last_id = (await events(response, 5))[-1][0]
        assert (await resumed(last_id))[0] == 200
        status, text = await resumed(last_id, "b")
        assert (status, "no stream of yours" in text) == (404, True)
        status, text = await resumed("A" * 32 + last_id[32:])
        assert (status, "no conductor of this cluster" in text) == (403, True)
        status, text = await resumed(last_id, prompt="Of the queens")
        assert (status, "another request" in text) == (409, True)
        status, text = await resumed(last_id[:32] + ":nothing")
        assert (status, "no id of an event" in text) == (400, True)
        name, position = last_id.split(":")
        count = int(position.split("-")[0])
        status, text = await resumed(f"{name}:{count}-00000000")
        assert (status, "came out differently" in text) == (409, True)
        redis = connect(cluster.config.index.redis_url)
        try:
            # As they do a while after their stream.
            kept = [key async for key in redis.scan_iter(match="*:stream:*")]
            assert kept
            await redis.delete(*kept)
        finally:
            await redis.aclose()
        status, text = await resumed(last_id)
        assert (status, "can no longer be resumed" in text) == (410, True)


async def test_a_conversation_goes_on_at_another_conductor(cluster: LocalCluster, tmp_path: Path) -> None:
    keys = {"a": "sk-tenant-a-0123456789abcdef", "b": "sk-tenant-b-0123456789abcdef"}
    file = tmp_path / "tenants.toml"
    tenants = "".join(f'[{name}]\nkeys = ["{key}"]\n' for name, key in keys.items())
    file.write_text(f'admin_keys = ["{ADMIN_KEY}"]\n{tenants}')

    async def respond(child: Child, tenant: str = "a", **fields: Any) -> tuple[int, dict[str, Any]]:
        body = {"input": "And it came to pass", "max_output_tokens": 8, **fields}
        headers = {"Authorization": f"Bearer {keys[tenant]}"}
        url = f"{child.ready['url']}/v1/responses"
        async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as response:
            return response.status, await response.json()

    async with conductors(cluster, f"conductor.tenants_path={file}") as (first, second):
        status, begun = await respond(first)
        assert status == 200, begun
        first.kill()
        await first.wait()
        status, longer = await respond(second, previous_response_id=begun["id"])
        assert status == 200, longer
        assert longer["usage"]["input_tokens"] > begun["usage"]["total_tokens"]
        status, refused = await respond(second, "b", previous_response_id=begun["id"])
        assert (status, refused["error"]["code"]) == (404, "previous_response_not_found")
