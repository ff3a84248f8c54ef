"""Tenants of a real cluster: keys at the door, and a bound on what each may keep in the cache."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from click.testing import CliRunner
from rich.console import Console

from moonpool.cli import cli
from moonpool.client import Client
from moonpool.commands.run_report import cluster_facts
from moonpool.commands.top import Rates, top_view
from moonpool.errors import ApiError
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.observing.metrics_server import metrics_headers
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from tests.cluster.conftest import eventually, small_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

QUOTA_BLOCKS = 8
BLOCK_NBYTES = 96 << 10  # of the model that ships, in float32


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    directory: Path = tmp_path_factory.mktemp("tenants")
    file = directory / "tenants.toml"
    config = small_config()
    file.write_text(
        'read_keys = ["sk-read"]\n'
        f'[small]\nkeys = ["sk-small"]\ncached_nbytes = {QUOTA_BLOCKS * BLOCK_NBYTES}\n'
        '[other]\nkeys = ["sk-other"]\nread_keys = ["sk-page"]\n'
    )
    config = replace(
        config,
        conductor=replace(config.conductor, tenants_path=str(file)),
        cluster=replace(config.cluster, prefill=1, decode=1),
    )
    async with LocalCluster(config, directory=directory) as running:
        yield running


async def test_a_tenant_keeps_no_more_than_its_quota_and_others_keep_theirs(shared: LocalCluster) -> None:
    async with aiohttp.ClientSession() as session:

        async def ask(key: str, prompt: list[int]) -> int:
            body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
            headers = {"Authorization": f"Bearer {key}"}
            async with session.post(f"{shared.url}/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200, await response.text()
                usage = (await response.json())["usage"]
                return int(usage["prompt_tokens_details"]["cached_tokens"])

        async def metrics_of_nodes() -> dict[str, dict[str, float]]:
            """By role."""
            async with Client(shared.url, api_key="sk-read") as client:
                cluster = await client.cluster()
            assert cluster["block_nbytes"] == BLOCK_NBYTES
            key = metrics_headers(
                Security(shared.config.security, Caller("operator", "a test"), serves=False)
            )
            found = {}
            for node in cluster["nodes"]:
                async with session.get(node["metrics_url"]) as response:
                    assert response.status == 401, "the page counts by tenant"
                async with session.get(node["metrics_url"], headers=key) as response:
                    lines = [line.rpartition(" ") for line in (await response.text()).splitlines()]
                found[node["role"]] = {
                    name: float(value) for name, _, value in lines if name.startswith("moonpool_")
                }
            return found

        async with session.post(f"{shared.url}/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 401
        other = [10 + i for i in range(320)]  # 20 blocks, and no quota
        await ask("sk-other", other)
        prompts = [[100 * n + 10 + i for i in range(96)] for n in range(6)]  # 6 blocks each
        for prompt in prompts:
            await ask("sk-small", prompt)

        async def trimmed() -> bool:
            nodes = await metrics_of_nodes()
            for found in nodes.values():
                tiers = ("pool", "host")
                held = [found[f'moonpool_tenant_blocks{{tenant="small",tier="{tier}"}}'] for tier in tiers]
                if sum(held) > QUOTA_BLOCKS:
                    return False
            lost = nodes["prefill"]['moonpool_tenant_evicted_blocks_total{reason="quota",tenant="small"}']
            return lost >= 20

        await eventually(trimmed)
        assert await ask("sk-other", other) >= 300, "the other tenant's blocks are all there"
        assert await ask("sk-small", prompts[-1]) >= 80, "the latest chain is what it kept"
        assert await ask("sk-small", prompts[0]) == 0
        found = (await metrics_of_nodes()).values()  # a decode node computes what little is not cached there
        assert any(0.1 < one.get("moonpool_prefix_hit_ratio", 0) < 1 for one in found)
        tokens = 'moonpool_tenant_prompt_tokens_total{source="pool",tenant="other"}'
        assert sum(one.get(tokens, 0) for one in found) >= 300
        await eventually(trimmed)  # the last prompt too


async def test_commands_with_a_tenants_key_show_what_the_tenant_may_see(shared: LocalCluster) -> None:
    async with aiohttp.ClientSession() as session:
        ids = {}
        for key in ("sk-other", "sk-small"):
            async with session.post(
                f"{shared.url}/v1/completions",
                json={"prompt": "Tell me of it.", "max_tokens": 2},
                headers={"Authorization": f"Bearer {key}"},
            ) as response:
                ids[key] = (await response.json())["id"]
    async with Client(shared.url, api_key="sk-page") as client:
        facts = await cluster_facts(client, seconds=0.1, num_requests=9)
        with pytest.raises(ApiError, match="403: GET /v1/cluster shows the whole cluster"):
            await client.cluster()
    listed = [one["id"] for one in facts["timelines"]]
    assert ids["sk-other"] in listed and ids["sk-small"] not in listed
    assert ids["sk-small"] not in json.dumps(facts)
    screen = io.StringIO()
    Console(file=screen, width=200).print(top_view(shared.url, facts["samples"][-1], Rates()))
    assert ids["sk-other"] in screen.getvalue() and "tenant other" in screen.getvalue()


@pytest.mark.parametrize("given", ["option", "variable"])
async def test_a_command_takes_its_key_from_an_option_or_the_environment(
    shared: LocalCluster, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = [] if given == "variable" else ["--api-key", "sk-read"]
    if given == "variable":
        monkeypatch.setenv("MOONPOOL_API_KEY", "sk-read")
    for command in (["status"], ["top"]):
        arguments = [*command, "--url", shared.url, *key]
        done = await asyncio.to_thread(CliRunner().invoke, cli, arguments)
        assert done.exit_code == 0, done.output
        assert "sk-read" not in done.output
