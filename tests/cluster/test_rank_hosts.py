"""A node with ranks on two machines, one of which is lost and comes again; torchrun starts the far ones."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from moonpool.client import Client, Reply
from moonpool.local.cluster import LocalCluster
from moonpool.local.played_hosts import NodeOverHosts
from moonpool.runtime.network.sockets import free_port
from moonpool.runtime.service.child import Child
from tests.cluster.conftest import eventually, nodes, small_config
from tests.cluster.test_ranks import GREEDY, is_back, serves_exactly, whole
from tests.processes import are_gone, children_of, descendants_of
from tests.transfer.cables import obstacle

TIMEOUT_S = 2.0
WHERE = "tp 2 × pp 2 on 127.0.0.1, far (127.0.0.1)"


def daemon(directory: Path, name: str, *command: str, options: tuple[str, ...], ready: bool) -> Child:
    settings = [word for option in (f"node.id={name}", *options) for word in ("--set", option)]
    log = directory / f"{name}.log"
    return Child(name, [sys.executable, "-m", *command, *settings], log, sends_json=ready)


def torchrun(num_ranks: int) -> tuple[str, ...]:
    return (
        "torch.distributed.run",
        *("--standalone", f"--nproc-per-node={num_ranks}", "--max-restarts=9", "--shutdown-timeout=1"),
        *("-m", "moonpool.engine.ranks.worker"),
    )


def ranks_of(launcher: Child) -> list[psutil.Process]:
    """Those that torchrun runs now."""
    found = children_of(launcher.pid)
    return [process for process in found if "moonpool.engine.ranks.worker" in process.cmdline()]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["namespace", "loopback"])
async def test_a_local_cluster_plays_a_second_machine_with_half_of_the_stages(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks, tensors and calls find their way there, and a rank that dies there joins the next life."""
    if how == "loopback":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    elif reason := obstacle():
        pytest.skip(reason)
    config = small_config()
    parallel = replace(config.engine.parallel, pp=2, timeout_s=20.0)
    config = replace(
        config,
        engine=replace(config.engine, parallel=parallel),
        cluster=replace(config.cluster, prefill=1, decode=1),
    )
    said: list[str] = []
    async with (
        LocalCluster(config, directory=tmp_path, hosts=2, report=said.append) as cluster,
        Client(cluster.url) as client,
    ):
        launchers = [node._launcher for node in cluster.nodes if isinstance(node, NodeOverHosts)]
        far = [rank for launcher in launchers for rank in ranks_of(launcher)]
        assert len(far) == 2
        own = os.readlink("/proc/self/ns/net")
        spaces = {os.readlink(f"/proc/{rank.pid}/ns/net") for rank in far}
        assert len(spaces) == 1
        assert (own in spaces) == (how == "loopback")
        address = "127.0.0.1" if how == "loopback" else cluster._host.far
        assert any("is the network namespace of" in sentence for sentence in said) == (how == "namespace")
        for node in (await nodes(client)).values():
            assert node["ranks"] == f"tp 1 × pp 2 on 127.0.0.1, host-1 ({address})"
        await serves_exactly(client)
        expected = await whole(client, "In those days ", max_tokens=8)
        before = (await nodes(client))["decode-0"]
        os.kill(far[-1].pid, signal.SIGKILL)
        await eventually(lambda: is_back(client, before), timeout_s=120)
        assert await whole(client, "In those days ", max_tokens=8) == expected
        there = [child.pid for child in (*launchers, cluster._host._holder) if child is not None]
        started = [process for pid in there for process in (psutil.Process(pid), *descendants_of(pid))]
    assert are_gone(started)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("whom", ["far", "near"])
async def test_a_machine_lost_while_decoding_costs_no_token(
    tmp_path: Path, whom: str, number: signal.Signals
) -> None:
    """far: a rank there; near: the node itself."""
    config = small_config()
    config = replace(
        config,
        security=replace(config.security, cluster_key="of the whole cluster"),
        cluster=replace(config.cluster, prefill=1, decode=1),
    )
    async with LocalCluster(config, directory=tmp_path) as cluster, Client(cluster.url) as client:
        secret, port = "security.cluster_key=of the whole cluster", free_port()
        leader = ("--leader", f"127.0.0.1:{port}")
        far = daemon(tmp_path, "far", *torchrun(2), *leader, options=(secret,), ready=False)
        node = ("moonpool.node", "--role", "decode", "--config", str(tmp_path / "cluster.toml"))
        options = (
            "node.port=0",
            "engine.parallel.tp=2",
            "engine.parallel.pp=2",
            "engine.parallel.hosts=2",
            f"engine.parallel.listen=127.0.0.1:{port}",
            f"engine.parallel.timeout_s={TIMEOUT_S}",
        )
        near = daemon(tmp_path, "near", *node, options=options, ready=True)
        try:
            await asyncio.gather(far.start(), near.start())
            await near.wait_ready(60)
            assert near.ready["ranks"] == WHERE
            await loses_it(client, near, far, whom, number)
            assert secret.partition("=")[2] not in (tmp_path / "far.log").read_text()
        finally:
            for child in (far, near):
                child.kill()
                await child.wait()


async def loses_it(client: Client, near: Child, launcher: Child, whom: str, number: signal.Signals) -> None:
    ranks = ranks_of(launcher)
    assert len(ranks) == 2
    lost = near.pid if whom == "near" else ranks[1].pid

    async def joined() -> bool:
        return "near" in await nodes(client)

    await eventually(joined)
    assert (await nodes(client))["near"]["ranks"] == WHERE
    prompt = "And the LORD said unto him " * 8
    expected = await whole(client, prompt)
    before = dict[str, Any]()
    cut_off: list[str] = []

    async def stream() -> None:
        reply = Reply()
        async for _ in client.complete(prompt, reply, **GREEDY):
            if not before and len(reply.pieces_s) >= 20:
                told = (await client.timeline(reply.id))["summary"]
                if told["decode_node"] == "near" and not before:
                    before.update((await nodes(client))["near"])
                    cut_off.append(reply.id)
                    os.kill(lost, number)
        assert reply.text == expected

    # Of four some are with each of the two decode nodes.
    async with asyncio.timeout(60):
        while not before:
            await asyncio.gather(*(stream() for _ in range(4)))
    assert "retry" in [event["event"] for event in (await client.timeline(cut_off[0]))["events"]]

    # torchrun ends those of its ranks that cannot end themselves, and starts all of them again.
    async def far_ranks_are_gone() -> bool:
        return are_gone(ranks, 0.0)

    await eventually(far_ranks_are_gone)
    if whom == "near" and number == signal.SIGSTOP:
        os.kill(lost, signal.SIGCONT)
    elif whom == "near":
        await near.wait()
        await near.start()

    async def serves_again() -> bool:
        if number == signal.SIGKILL and whom == "near":
            node = (await nodes(client)).get("near", {"state": "gone"})
            return node["state"] == "ready" and node["pid"] != before["pid"]
        return await is_back(client, before)

    await eventually(serves_again)
    await serves_exactly(client)
