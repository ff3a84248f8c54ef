"""A node whose host is in trouble gets nothing new while others can serve, says why, and comes back."""

from __future__ import annotations

import asyncio
import io
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import count, islice
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from playwright.async_api import async_playwright, expect
from rich.console import Console

from moonpool.client import Client, Reply
from moonpool.commands.status import cluster_view
from moonpool.local.cluster import LocalCluster
from moonpool.prefill_node.node import PrefillNode
from moonpool.runtime.health.monitor import NodeUnfit
from moonpool.runtime.service.lifecycle import ServiceContext
from tests.cluster.conftest import another, eventually, kill, small_config, started
from tests.dashboard.conftest import CHROMIUM, NEEDS_BROWSER, SCREENSHOTS
from tests.runtime.health.stand_in import UUID, gpu_stand_in

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A filesystem of 64 MiB."""
    mount = tmp_path_factory.mktemp("disk")
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(mount)], check=False).returncode:
        pytest.skip("needs the right to mount a file system; CI has it")
    yield mount
    subprocess.run(["umount", "-l", str(mount)], check=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    config = small_config()
    config = replace(config, cluster=replace(config.cluster, prefill=1, decode=1))
    async with LocalCluster(config, directory=directory) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(cluster: LocalCluster, disk: Path) -> AsyncIterator[str]:
    """One more prefill node, that keeps blocks on the small disk; and "poor", a decode node that wants more
    memory than any host has."""
    quick = ("health.interval_s=0.1", "health.bad_readings=2", "health.good_readings=3")
    on_disk = (f"store.ssd.path={disk}", "store.ssd.capacity_nbytes=16MiB", "health.disk_free_nbytes=16MiB")
    children = [
        another(cluster, "small", "prefill", *quick, *on_disk),
        another(cluster, "poor", "decode", *quick, "health.host_memory_free=0.999"),
    ]
    async with started(*children):
        yield "small"


async def ask(client: Client, number: int) -> str:
    """Have a prompt of its own computed; says where."""
    reply = Reply()
    async for _ in client.complete(f"{number} In the beginning God created ", reply, max_tokens=2):
        pass
    return str((await client.timeline(reply.id))["summary"]["prefill_node"])


async def seen(client: Client, name: str, state: str) -> dict[str, Any]:
    async def holds() -> bool:
        nodes = {node["node_id"]: node for node in (await client.cluster())["nodes"]}
        return name in nodes and nodes[name]["state"] == state

    await eventually(holds)
    return next(node for node in (await client.cluster())["nodes"] if node["node_id"] == name)


async def events_of(client: Client, name: str) -> list[tuple[str, str]]:
    async for now in client.live():
        return [(event["kind"], event["text"]) for event in now["events"] if event["node"] == name]
    return []


async def test_a_full_disk_spares_its_node_until_there_is_room_again(
    cluster: LocalCluster, client: Client, node: str, disk: Path
) -> None:
    await seen(client, node, "ready")
    (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - (8 << 20)))
    ill = await seen(client, node, "unhealthy")
    (reason,) = ill["reasons"]
    assert str(disk) in reason
    assert "less than 0.02 GiB" in reason
    # The node may have looked while the file was being written.
    assert ill["health"]["disk_free_nbytes"] < 16 << 20
    placed = [await ask(client, number) for number in range(4)]
    assert set(placed) == {"prefill-0"}
    answer = await client.cluster()
    assert f"node {node} is unhealthy: {reason}" in answer["degraded"]
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(cluster_view(client.url, answer))
    shown = console.export_text()
    assert "unhealthy" in shown
    assert reason in shown
    async with aiohttp.ClientSession() as session:
        async with session.get(ill["metrics_url"]) as page:
            assert 'moonpool_node_health{check="disk_space"} 0.0' in await page.text()
        async with session.get(f"{client.url}/metrics") as page:
            assert 'moonpool_cluster_nodes{role="prefill",state="unhealthy"} 1.0' in await page.text()
    assert ("unhealthy", reason) in await events_of(client, node)

    (disk / "other").unlink()
    await seen(client, node, "ready")
    assert (await events_of(client, node))[-1][0] == "healthy"
    numbers = count(10)

    async def placed_there() -> bool:
        # Many at once: one by one they may all be estimated to be quicker at the other node.
        return node in await asyncio.gather(*(ask(client, number) for number in islice(numbers, 8)))

    await eventually(placed_there)


@pytest.mark.slow
@NEEDS_BROWSER
async def test_the_dashboard_says_so_in_colour_and_in_words(
    cluster: LocalCluster, client: Client, node: str
) -> None:
    await seen(client, "poor", "unhealthy")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        await page.goto(f"{cluster.url}/#/fleet?node=poor")
        row = page.locator("#nodes tbody tr", has_text="poor")
        await expect(row.locator(".status > span")).to_have_text(re.compile("^unhealthy"))
        await expect(row.locator(".status > span")).to_have_class(re.compile(r"\bbad\b"))
        await expect(row).to_contain_text("host memory: ")
        facts = page.locator("dl", has_text="host's memory, CPU")
        await expect(facts).to_contain_text(re.compile(r"GB free, \d+"))
        await page.goto(f"{cluster.url}/#/cluster")
        await expect(page.locator('#map [data-node="poor"]')).to_have_class("node bad")
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        await page.locator("#map").screenshot(path=SCREENSHOTS / "unhealthy.png")
        await browser.close()


async def test_a_node_whose_gpu_is_lost_drains_and_ends(
    cluster: LocalCluster, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is one that NVML's stand-in tells of: the node computes on the CPU meanwhile."""
    state = gpu_stand_in(monkeypatch)
    monkeypatch.setattr("moonpool.engine.node.node.gpu_uuids", lambda device: (UUID,))
    config = replace(
        cluster.config,
        node=replace(cluster.config.node, id="with-gpu", port=0, metrics_port=0),
        health=replace(cluster.config.health, interval_s=0.1),
    )
    running = asyncio.create_task(PrefillNode(config).run(ServiceContext("prefill")))
    well = await seen(client, "with-gpu", "ready")
    assert well["health"]["gpus"][0]["temperature_celsius"] == 50
    state.lost = 1
    with pytest.raises(NodeUnfit, match="GPU 3 is lost"):
        await asyncio.wait_for(running, 60)

    async def gone() -> bool:
        return "with-gpu" not in {node["node_id"] for node in (await client.cluster())["nodes"]}

    await eventually(gone)


async def test_where_every_node_is_unhealthy_they_serve_all_the_same(
    cluster: LocalCluster, client: Client, node: str
) -> None:
    await seen(client, "poor", "unhealthy")
    assert await decoded_by(client, "And God said") == "decode-0"
    kill(cluster, "decode-0")

    async def alone() -> bool:
        return (
            "every decode node is unhealthy, and they serve nevertheless"
            in (await client.cluster())["degraded"]
        )

    await eventually(alone)
    assert await decoded_by(client, "And the earth was") == "poor"


async def decoded_by(client: Client, prompt: str) -> str:
    reply = Reply()
    async for _ in client.complete(prompt, reply, max_tokens=4):
        pass
    return str((await client.timeline(reply.id))["summary"]["decode_node"])
