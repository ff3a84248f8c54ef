"""Clusters that are misconfigured on purpose: the doctor names each cause, with figures and what to do."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import re
import shutil
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rich.console import Console

from moonpool.client import Client
from moonpool.doctor.diagnosis import check_cluster
from moonpool.doctor.diagnosis import doctor as whole_doctor
from moonpool.doctor.finding import Finding
from moonpool.local.cluster import LocalCluster
from moonpool.prefill_node.node import PrefillNode
from moonpool.runtime.config.options import Config
from moonpool.runtime.service.lifecycle import ServiceContext
from tests.cluster.conftest import another, eventually, small_config, started
from tests.lazily import Lazily

openai = Lazily("openai")

pytestmark = pytest.mark.asyncio(loop_scope="module")

AHEAD_S = 5.0
PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form, and void. "


class Relay:
    """A way to Redis that can be cut."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self.path = directory / "relay.sock"
        self._redis = redis_url.removeprefix("unix://").partition("?")[0]
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self.path)

    async def cut(self) -> None:
        self._server.close()
        self.path.unlink(missing_ok=True)
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(self._redis)
        self._writers += [writer, back]
        with contextlib.suppress(OSError):
            await asyncio.gather(_copy(reader, back), _copy(there, writer))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(1 << 16):
        target.write(data)
        await target.drain()
    target.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    config = small_config()
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=1, decode=1),
        conductor=replace(config.conductor, policy="round-robin"),
    )
    async with LocalCluster(config, directory=directory) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def relay(cluster: LocalCluster) -> AsyncIterator[Relay]:
    relay = Relay(cluster.directory, cluster.config.index.redis_url)
    await relay.start()
    yield relay
    await relay.cut()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def misfits(cluster: LocalCluster, relay: Relay, client: Client) -> AsyncIterator[None]:
    """A node of another block size; and one of TCP only, without checksums, whose Redis can be cut."""
    on_its_own = (
        "transfer.transports=tcp",
        "transfer.checksum=false",
        f"index.redis_url=unix://{relay.path}",
    )
    children = [
        another(cluster, "coarse", "prefill", "engine.block_size=32"),
        another(cluster, "apart", "prefill", *on_its_own),
    ]
    async with started(*children):

        async def all_seen() -> bool:
            return len((await client.cluster())["nodes"]) == 4

        await eventually(all_seen)
        yield


async def doctor(cluster: LocalCluster, *, redis: bool = False) -> list[Finding]:
    return await check_cluster(cluster.url, cluster.config if redis else Config())


async def finds(
    cluster: LocalCluster, what: str, pattern: str, *, state: str = "wrong", redis: bool = False
) -> Finding:
    """What the doctor says, once it does."""
    found: list[Finding] = []

    async def holds() -> list[Any]:
        found[:] = [
            finding
            for finding in await doctor(cluster, redis=redis)
            if finding.what == what and re.search(pattern, finding.fact)
        ]
        return found

    await eventually(holds)
    assert found[0].state == state
    assert found[0].advice
    return found[0]


async def ask(cluster: LocalCluster, prompt: str, **more: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as api:
        await api.completions.create(
            model=Config().model.served_name, prompt=prompt, max_tokens=2, extra_body=more
        )


async def test_a_salt_that_changes_with_the_request_is_the_cause_of_no_hit(cluster: LocalCluster) -> None:
    for number in range(12):
        await ask(cluster, PROMPT, cache_salt=f"request {number}")
    whole = await finds(cluster, "cache hits", "0 of 12 requests")
    assert "0.0% of" in whole.fact
    cause = await finds(
        cluster, "tenants, salts", "12 different .* sent 12 requests, 12 of them a single one; 11"
    )
    assert "cache_salt" in cause.advice
    output = io.StringIO()
    assert await whole_doctor(Config(), cluster.url, Console(file=output), as_json=True) == 1
    assert {"what": cause.what, "state": "wrong", "fact": cause.fact, "advice": cause.advice} in json.loads(
        output.getvalue()
    )


async def test_a_policy_that_ignores_where_blocks_are_is_the_cause(
    cluster: LocalCluster, misfits: None
) -> None:
    """Every second request goes where the prefix is not; and what was computed there goes by TCP."""
    for number in range(12):
        await ask(cluster, f"{number} {PROMPT}")
        await ask(cluster, f"{number} {PROMPT}")
    cause = await finds(cluster, "placement", "conductor.policy is round-robin")
    assert "goodput" in cause.advice
    path = await finds(cluster, "apart to decode-0", "tcp though both are on one host", state="slow")
    assert "transfer.transports of apart lacks shm" in path.advice


async def test_what_does_not_fit_together_is_named(cluster: LocalCluster, misfits: None) -> None:
    """Nodes' options; and another conductor, with another tokenizer."""
    coarse = await finds(cluster, "coarse", "incompatible: .*engine.block_size")
    assert "engine.block_size" in coarse.advice
    await finds(cluster, "transfer.checksum", "apart: false")
    await finds(cluster, "engine.block_size", "coarse: 32")
    await finds(cluster, "apart", "transfer.checksum is off", state="slow")
    model = cluster.directory / "model"
    shutil.copytree(Config().model.directory, model)
    with (model / "tokenizer.json").open("a") as file:
        file.write("\n")
    options = ("node.metrics_port=0", f"model.path={model}", "model.name=moonpool-demo")
    async with started(another(cluster, "other", "conductor", *options)):
        other = await finds(cluster, "conductors", "another tokenizer")
        assert "model.path" in other.advice


@pytest.mark.slow
async def test_a_clock_that_is_ahead_is_told_with_what_it_breaks(cluster: LocalCluster) -> None:
    config = replace(cluster.config, node=replace(cluster.config.node, id="ahead", port=0, metrics_port=0))
    context = ServiceContext("prefill")
    node = PrefillNode(config)
    node.clock = lambda: time.time() + AHEAD_S
    running = asyncio.create_task(node.run(context))
    try:
        found = await finds(cluster, "ahead", r"clock is (4\.9\d|5\.0\d) s ahead")
        assert "calls are refused from 30 s on" in found.fact
        assert "NTP" in found.advice
    finally:
        context.draining.set()
        await running


async def test_a_node_that_is_cut_from_redis_is_found_alive(
    cluster: LocalCluster, misfits: None, relay: Relay
) -> None:
    await relay.cut()
    found = await finds(cluster, "apart", "runs and answers at .* lease in the index has ended", redis=True)
    assert "index.redis_url" in found.advice
