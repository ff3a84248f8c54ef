"""A conductor of two workers behind one port: one of them dies, and all end together."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio

from moonpool.client import Client, Reply
from moonpool.conductor.workers import reserved_port
from moonpool.kvstore.index.redis.client import connect
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.errors import PortInUse
from tests.cluster.conftest import eventually, small_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_TOKENS = 400
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
PROMPT = "And it came to pass"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = small_config()
    config = replace(config, conductor=replace(config.conductor, workers=2))
    async with LocalCluster(config, directory=tmp_path_factory.mktemp("workers")) as running:
        yield running


class Workers:
    """A connection to each worker, by conductor id."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.sessions: dict[str, aiohttp.ClientSession] = {}

    async def connect(self) -> None:
        """Connect until there is a connection to two workers: the kernel chooses for each."""

        async def both() -> bool:
            # One connection a session, which is kept.
            session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1))
            seen = await cluster_of(session, self.url)
            ready = [node["state"] for node in seen["nodes"]]
            other = self.sessions.get(seen["conductor_id"])
            if set(ready) == {"ready"} and seen["num_other_conductors"] == 1 and other is None:
                self.sessions[seen["conductor_id"]] = session
            else:
                await session.close()
            return len(self.sessions) == 2

        await eventually(both)

    async def close(self) -> None:
        await asyncio.gather(*(session.close() for session in self.sessions.values()))


async def cluster_of(session: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    async with session.get(f"{url}/v1/cluster") as answer:
        seen: dict[str, Any] = await answer.json()
        return seen


@pytest_asyncio.fixture(loop_scope="module")
async def workers(cluster: LocalCluster) -> AsyncIterator[Workers]:
    found = Workers(cluster.url)
    try:
        await found.connect()
        yield found
    finally:
        await found.close()


def pids_of(cluster: LocalCluster) -> dict[str, int]:
    """Of the workers that began with the conductor, by conductor id."""
    return {one["conductor_id"]: one["pid"] for one in cluster.children["conductor"].ready["replicas"]}


async def test_both_serve_and_one_answers_to_what_the_other_has_stored(workers: Workers) -> None:
    one, two = workers.sessions.values()
    url = f"{workers.url}/v1/responses"
    body = {"input": "In the beginning", "max_output_tokens": 8, "temperature": 0}
    async with one.post(url, json=body) as answer:
        first = await answer.json()
        assert answer.status == 200, first
    async with two.post(url, json=body | {"previous_response_id": first["id"]}) as answer:
        second = await answer.json()
        assert answer.status == 200, second
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]

    async def is_known(session: aiohttp.ClientSession) -> bool:
        async with session.get(f"{workers.url}/v1/requests/{second['id']}/timeline") as answer:
            return answer.status == 200 and (await answer.json())["api"]["id"] == second["id"]

    # Whichever worker is asked, once the other answers: the machine may stop it for seconds.
    for session in (one, two):
        await eventually(lambda session=session: is_known(session))
        async with session.get(f"{workers.url}/v1/requests/nobodys/timeline") as answer:
            assert answer.status == 404


async def test_a_killed_worker_takes_no_stream_along_and_is_back(
    cluster: LocalCluster, workers: Workers
) -> None:
    expected = Reply()
    redis = connect(cluster.config.index.redis_url)
    async with Client(cluster.url) as client, redis:
        async for _ in client.complete(PROMPT, expected, **GREEDY):
            pass
        replies: list[Reply] = []
        reading: list[asyncio.Task[None]] = []
        before: set[bytes] = set()

        async def records() -> set[bytes]:
            return {key async for key in redis.scan_iter(match="*:stream:*")}

        async def read(reply: Reply) -> None:
            async with Client(cluster.url) as own:
                async for _ in own.complete(PROMPT, reply, **GREEDY):
                    pass

        async def both_stream() -> bool:
            if all(task.done() for task in reading):
                # Not begun, or all came to one worker, or ended before they were looked at.
                await asyncio.gather(*reading)
                before.update(await records())
                replies[:] = [Reply() for _ in range(8)]
                reading[:] = [asyncio.create_task(read(reply)) for reply in replies]
            running = [
                (await cluster_of(one, cluster.url))["num_requests"] for one in workers.sessions.values()
            ]
            # A stream of which nothing is written in Redis yet cannot be resumed.
            written = await records() - before
            begun = len(written) == len(replies) and all(len(reply.pieces_s) >= 5 for reply in replies)
            return begun and all(running)

        await eventually(both_stream)
        doomed, pid = next(iter(pids_of(cluster).items()))
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*reading)
        assert sum(bool(reply.num_resumed) for reply in replies) >= 1
        assert [reply.text for reply in replies] == [expected.text] * len(replies)
    again = Workers(cluster.url)
    try:
        await again.connect()
        assert doomed not in again.sessions
        assert len(again.sessions.keys() & workers.sessions.keys()) == 1
        # Whichever worker is asked tells the metrics of both.
        for session in again.sessions.values():
            async with session.get(f"{cluster.url}/metrics") as answer:
                page = await answer.text()
            number = [line for line in page.splitlines() if line.startswith("moonpool_replica_starts_total")]
            assert sorted(float(line.split()[-1]) for line in number) == [1.0, 2.0]
            for replica in ("0", "1"):
                nodes = f'moonpool_cluster_nodes{{replica="{replica}",role="decode",state="ready"}} 2.0'
                assert nodes in page, page[:2000]
    finally:
        await again.close()


async def test_workers_end_together_and_finish_their_streams(cluster: LocalCluster) -> None:
    conductor = cluster.children["conductor"]
    async with Client(cluster.url) as client:
        expected = Reply()
        async for _ in client.complete(PROMPT, expected, **GREEDY):
            pass
        replies = [Reply() for _ in range(4)]

        async def read(reply: Reply) -> None:
            async with Client(cluster.url) as own:
                async for _ in own.complete(PROMPT, reply, **GREEDY):
                    pass

        reading = [asyncio.create_task(read(reply)) for reply in replies]

        async def all_stream() -> bool:
            return all(len(reply.pieces_s) >= 5 for reply in replies)

        await eventually(all_stream)
        conductor.terminate()
        await asyncio.gather(*reading)
    # No worker had left its streams to another one that ended as well.
    assert [reply.num_resumed for reply in replies] == [0] * len(replies)
    assert [reply.text for reply in replies] == [expected.text] * len(replies)
    assert await asyncio.wait_for(conductor.wait(), 60) == 0
    assert not any(psutil.pid_exists(pid) for pid in pids_of(cluster).values())


async def test_a_second_conductor_does_not_share_the_port() -> None:
    with reserved_port("127.0.0.1", 0) as port, pytest.raises(PortInUse, match=r"conductor\.port"):
        listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", port, reuse_port=True)
        async with listening:
            with reserved_port("127.0.0.1", port):
                pass
