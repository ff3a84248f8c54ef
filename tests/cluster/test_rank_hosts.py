"""A node with ranks on two machines, one of which is lost and comes again; torchrun starts the far ones."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from moonpool.client import Client, Reply
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.service.child import Child
from tests.cluster.conftest import eventually, nodes, small_config
from tests.cluster.test_ranks import GREEDY, is_back, serves_exactly, whole
from tests.processes import children_of

TIMEOUT_S = 2.0
WHERE = "tp 2 × pp 2 on 127.0.0.1, far (127.0.0.1)"


def a_free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


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
        secret, port = "security.cluster_key=of the whole cluster", a_free_port()
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
        return not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)

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
