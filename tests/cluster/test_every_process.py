"""What holds for every kind of process of a cluster: what its log says, and its page of metrics."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.local.cluster import LocalCluster
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from tests.cluster.conftest import eventually, small_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMTOOL = shutil.which("promtool")
SECRET = "xyzzy plugh"  # nothing that the code would ever say
MOVED_TOKENS = 1500  # the request still decodes when its node is seen and killed
PROMPT = f"{SECRET}, whispered the keeper of the book. " * 12
RUN = re.compile(
    r"\b\d+\b(?:[,\s]+\b\d+\b){3,}"
)  # numbers one after the other, as token ids would be written


class Logged:
    """A cluster whose logs are JSON and say everything, and requests of every kind it was asked."""

    def __init__(self, cluster: LocalCluster, client: aiohttp.ClientSession) -> None:
        self.cluster = cluster
        self._client = client
        self.pages: dict[str, str] = {}
        self.token_ids: list[int] = []

    async def ask(self, request_id: str, **fields: Any) -> tuple[int, dict[str, Any]]:
        body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True, **fields}
        headers = {"x-request-id": request_id, "authorization": f"Bearer {SECRET}"}
        url = f"{self.cluster.url}/v1/completions"
        async with self._client.post(url, json=body, headers=headers) as answer:
            return answer.status, await answer.json()

    async def read(self, url: str) -> str:
        async with self._client.get(url) as answer:
            assert answer.status == 200
            return await answer.text()

    def lines(self) -> list[dict[str, Any]]:
        """Every whole line of every process, but for Redis and those that tell a parent how far it is."""
        return [
            self._parsed(path.name, line)
            for path in sorted(self.cluster.directory.glob("*.log"))
            if path.name != "redis.log"
            for line in path.read_text().splitlines(keepends=True)
            # A half-written one is read the next time.
            if line.endswith("\n") and not line.startswith(('{"ready"', '{"loaded"'))
        ]

    def _parsed(self, name: str, line: str) -> dict[str, Any]:
        try:
            return dict(json.loads(line))
        except ValueError:
            raise AssertionError(f"{name} has a line that is no record: {line!r}") from None


async def lend_to_store(cluster: LocalCluster) -> None:
    """The store node copies what the prefill node holds, so that it is asked for it later."""
    redis = connect(cluster.config.index.redis_url)
    index = KVIndex(redis, cluster.config.index.namespace)

    async def held_by(name: str) -> set[block_keys.BlockKey]:
        return set((await index.snapshot()).get(name, {}))

    await eventually(lambda: held_by("prefill-0"))
    records, chain = await index.nodes(), list((await index.snapshot())["prefill-0"])
    source = node_pb2.KvAddress.FromString(records["prefill-0"].kv_address)
    async with rpc.channel(records["store-0"].rpc_address) as channel:
        copy = node_pb2.ReplicateRequest(source=source, keys=block_keys.pack(chain))
        await node_pb2_grpc.NodeStub(channel).Replicate(copy)

    async def copied() -> bool:
        return set(chain) <= await held_by("store-0")

    await eventually(copied)
    await redis.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def logged(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Logged]:
    config = small_config()
    config = replace(
        config,
        log=replace(config.log, level="debug", format="json"),
        cluster=replace(config.cluster, prefill=1, decode=2, store=1),
        # It fetches the longer prefix, although a decode node could compute the little that is missing there.
        conductor=replace(config.conductor, policy="kv-aware"),
    )
    directory = tmp_path_factory.mktemp("logged")
    async with LocalCluster(config, directory=directory) as cluster, aiohttp.ClientSession() as client:
        run = Logged(cluster, client)
        status, answer = await run.ask("first")
        assert status == 200
        run.token_ids = answer["choices"][0]["token_ids"]
        await lend_to_store(cluster)
        # A prefill node that begins anew reads the prefix from another node.
        os.kill(cluster.children["prefill-0"].pid, signal.SIGKILL)
        await cluster.children["prefill-0"].wait()
        await cluster.restart("prefill-0")

        async def fetches() -> bool:
            await run.ask("again")
            return any(line.get("message", "").startswith("Node/Lease") for line in run.lines())

        await eventually(fetches)
        assert (await run.ask("wrong-1", temperature=SECRET))[0] == 400
        assert (await run.ask("wrong-2", model=SECRET))[0] == 404
        running = asyncio.create_task(run.ask("moved", max_tokens=MOVED_TOKENS, ignore_eos=True))

        async def decoding_is_killed() -> list[str]:
            nodes = json.loads(await run.read(f"{cluster.url}/v1/cluster"))["nodes"]
            found = [
                node["node_id"] for node in nodes if node["role"] == "decode" and node["load"]["own_decodes"]
            ]
            for name in found:
                os.kill(cluster.children[name].pid, signal.SIGKILL)
            return found

        await eventually(decoding_is_killed)
        assert (await running)[0] == 200
        urls = {"conductor": f"{cluster.url}/metrics"}

        async def all_are_ready() -> bool:
            nodes = json.loads(await run.read(f"{cluster.url}/v1/cluster"))["nodes"]
            urls.update({node["role"]: node["metrics_url"] for node in nodes if node["state"] == "ready"})
            return len(urls) == 4

        await eventually(all_are_ready)  # one that a busy disk made unhealthy for a while included
        run.pages = {role: await run.read(url) for role, url in urls.items()}
        yield run


async def test_every_line_is_one_record_that_says_who_and_what(logged: Logged) -> None:
    for line in logged.lines():
        assert line.keys() >= {"time", "level", "process", "logger", "message"}
    assert {line["process"] for line in logged.lines()} == {
        *("conductor", "prefill-0", "decode-0", "decode-1", "store-0")
    }


async def test_no_log_repeats_what_people_wrote_or_were_answered(logged: Logged) -> None:
    assert len(logged.token_ids) == 8
    for line in logged.lines():
        text = json.dumps(line)
        assert "xyzzy" not in text and "plugh" not in text, text
        assert not RUN.search(line["message"]), text


async def test_each_process_names_the_request_it_works_for(logged: Logged) -> None:
    of_request: dict[str, set[str]] = {}
    for line in logged.lines():
        name = re.match(r"cmpl-(first|again|moved|wrong-\d)", line.get("request_id", ""))
        if name:
            of_request.setdefault(name[1], set()).add(line["process"].split("-")[0])
        else:
            assert "cmpl-" not in line["message"], f"about a request, and not under its id: {line}"
    assert of_request["first"] >= {"conductor", "prefill", "decode"}
    assert of_request["again"] >= {"conductor", "prefill", "decode", "store"}
    said = [line["message"] for line in logged.lines() if line.get("request_id", "").startswith("cmpl-moved")]
    end = f"length after {MOVED_TOKENS} tokens"
    for sentence in ("placed on prefill-0, then decode-", "attempt 0 after ", end):
        assert any(sentence in message for message in said), said


@pytest.mark.skipif(not PROMTOOL, reason="needs promtool: apt install prometheus; CI has it")
async def test_every_page_of_metrics_is_clean(logged: Logged) -> None:
    assert PROMTOOL is not None
    assert logged.pages.keys() == {"conductor", "prefill", "decode", "store"}
    for role, page in logged.pages.items():
        check = [PROMTOOL, "check", "metrics"]
        done = await asyncio.to_thread(subprocess.run, check, input=page, capture_output=True, text=True)
        # Colons are against the rules, and in the names that vLLM's dashboards look for.
        said = [line for line in done.stderr.splitlines() if not line.startswith("vllm:")]
        assert not said, f"{role}: {said}"
