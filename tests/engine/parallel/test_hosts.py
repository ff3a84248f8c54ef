"""A model whose ranks are on several machines: one machine plays all of them, each with a rank host."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import psutil
import pytest

from engine.parallel.group import RankGroup
from engine.parallel.rank_hosts import RankHosts
from runtime.child import Child
from runtime.options import TransferOptions
from tests.engine.parallel.conftest import serving
from tests.engine.parallel.test_exact import MODELS, NUM_TOKENS, SHAPE, prompts

SECRET = "as long as it is the same"


def rank_host(port: int, *sets: str, name: str = "far-1") -> Child:
    command = [sys.executable, "-m", "engine.parallel.rank_host", "--leader", f"127.0.0.1:{port}"]
    for item in (f"node.id={name}", f"transfer.secret={SECRET}", *sets):
        command += ["--set", item]
    return Child(name, command, None, speaks=True)


def door(num_hosts: int = 1, timeout_s: float = 5.0, port: int = 0) -> RankHosts:
    return RankHosts(num_hosts, f"127.0.0.1:{port}", "near", timeout_s, TransferOptions(secret=SECRET))


@asynccontextmanager
async def far_ranks(
    world_size: int, *, timeout_s: float = 5.0, num_hosts: int = 2
) -> AsyncIterator[tuple[RankGroup, list[Child]]]:
    """A started group, and the rank hosts of its other machines."""
    hosts = door(num_hosts - 1, timeout_s)
    group = RankGroup(world_size, timeout_s, hosts)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(group.close)
        starting = asyncio.create_task(group.start(threads=1))
        await asyncio.sleep(0)
        children = [rank_host(hosts.port, name=f"far-{i}") for i in range(1, num_hosts)]
        for child in children:
            await child.start()
            stack.push_async_callback(child.stop, 5.0)
        await starting
        yield group, children


@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 2, "link": "gloo"},
        pytest.param({"tp": 2, "pp": 2, "link": "gloo"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_greedy_tokens_equal_transformers(plan: dict[str, Any], make_checkpoint) -> None:
    options = {**plan, "hosts": 2, "listen": "127.0.0.1:0"}
    words = {"max_batch_tokens": 32, "piece_tokens": 16, "share_tokens": 1}
    family, shape = MODELS["qwen2"]
    reference = make_checkpoint(family, **SHAPE, **shape)
    expected = [reference.greedy(prompt, NUM_TOKENS) for prompt in prompts()]
    async with far_ranks(plan.get("tp", 1) * plan["pp"]) as (group, (host,)):
        for _ in range(2):  # a rank host's ranks take one model after the other, too
            async with serving(reference.path, group, **words, **options) as driver:
                sequences = [driver.sequence(prompt, max_tokens=NUM_TOKENS) for prompt in prompts()]
                results = await driver.run(*sequences)
                assert [result.token_ids for result in results] == expected
                far = [rank for rank in group.ranks if rank.where]
                assert {rank.pid for rank in far} == {
                    child.pid for child in psutil.Process(host.pid).children()
                }
                assert len(far) == group.world_size // 2
