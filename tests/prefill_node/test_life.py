"""The life of a node in this process: a start that fails, background tasks that fail, a drain."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonpool.engine.errors import RankLost
from moonpool.kvstore.blocks.keys import pack
from moonpool.node.node import ComputeNode
from moonpool.prefill_node.node import PrefillNode
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import PortInUse
from moonpool.runtime.service import lifecycle
from moonpool.runtime.service.lifecycle import ServiceBroken, ServiceContext


def config_of(*, port: int = 0) -> Config:
    """Small, with a Redis that does not answer."""
    config = Config()
    return replace(
        config,
        model=replace(config.model, device="cpu"),
        node=replace(config.node, id="one", port=port, metrics_port=0),
        engine=replace(config.engine, pool_nbytes=16 << 20),
        store=replace(config.store, host=replace(config.store.host, capacity_nbytes=16 << 20)),
        index=replace(config.index, redis_url="unix:///nonexistent/redis.sock"),
    )


@pytest.fixture(autouse=True)
async def leaves_nothing() -> AsyncIterator[None]:
    """Neither tasks nor threads of a node outlive it, except those of pools of threads that are shared."""
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    yield
    assert not [task for task in asyncio.all_tasks() - tasks if task is not asyncio.current_task()]
    for thread in set(threading.enumerate()) - threads:
        if (thread.name.rpartition("_")[0] or thread.name) in ("health", "moonpool-step", "moonpool-blocks"):
            # It was told to end, and may still be about it.
            await asyncio.to_thread(thread.join, 30)
            assert not thread.is_alive(), thread.name
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(None)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.remove_signal_handler(number)


async def supervised(make: Callable[[Config], PrefillNode], context: ServiceContext) -> None:
    """As the daemon runs it."""

    async def main(config: Config, service: ServiceContext) -> None:
        await make(config).run(service)

    await lifecycle._supervise(main, config_of(), context)


async def test_a_start_that_fails_half_way_closes_what_it_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        node = PrefillNode(config_of(port=port))
        with pytest.raises(PortInUse):
            await node.run(ServiceContext("prefill"))
    assert node.engine._task is not None
    assert node.engine._task.done()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sweep", "_refresh_expert_load", "_enforce_quotas"])
async def test_a_background_task_that_fails_ends_the_node(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: PrefillNode) -> Any:
        raise KeyError("lease")

    async def fail_later(self: PrefillNode) -> None:
        fail(self)

    monkeypatch.setattr(PrefillNode, method, fail if method == "sweep" else fail_later)
    with pytest.raises(ServiceBroken, match="ended unexpectedly: KeyError: 'lease'"):
        await asyncio.wait_for(supervised(PrefillNode, ServiceContext("prefill")), 60)


@asynccontextmanager
async def serving(node: PrefillNode, context: ServiceContext) -> AsyncIterator[node_pb2_grpc.PrefillNodeStub]:
    running = asyncio.create_task(node.run(context))
    try:
        while node.state != "ready":  # its own event loop's work
            assert not running.done(), running
            await asyncio.sleep(0.01)
        async with rpc.channel(node.rpc_address) as channel:
            yield node_pb2_grpc.PrefillNodeStub(channel)
        await asyncio.wait_for(running, 60)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def test_a_drain_waits_for_prompts_that_are_being_gathered() -> None:
    node, context = PrefillNode(config_of()), ServiceContext("prefill")
    begun, goes_on = asyncio.Event(), asyncio.Event()
    gather = node._gather

    async def slow(*arguments: Any) -> Any:
        begun.set()
        await goes_on.wait()
        return await gather(*arguments)

    node._gather = slow  # type: ignore[method-assign]
    async with serving(node, context) as stub:
        work = node_pb2.Work(
            request_id="r",
            token_ids=bytes(4 * 40),
            num_prompt_tokens=40,
            root_key=bytes(16),
            block_keys=pack([]),
            sampling=node_pb2.Sampling(max_tokens=4, ignore_eos=True),
            left_s=60,
        )
        call = stub.Prefill(node_pb2.PrefillRequest(work=work))
        await asyncio.wait_for(begun.wait(), 60)
        context.draining.set()
        while node.state != "draining":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert node.num_requests() == 1
        goes_on.set()
        assert (await call).token.has_token


async def test_a_node_that_switched_its_role_keeps_its_folder_on_disk(tmp_path: Path) -> None:
    config = config_of()
    ssd = replace(config.store.ssd, path=str(tmp_path), capacity_nbytes=64 << 20)
    config = replace(config, node=replace(config.node, id=""), store=replace(config.store, ssd=ssd))
    node, context = ComputeNode(config, "both"), ServiceContext("both")
    async with serving(node, context):
        await node.switch("decode", 0)
        assert node.engine._loop is not None
        node.engine._loop.fail(RankLost(1, "it ended"))
        async with asyncio.timeout(60):
            while node.num_starts == 1 or node.state != "ready":  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert node.role == "decode"
        # Beside what the disk's check writes.
        assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["both"]
        context.draining.set()
