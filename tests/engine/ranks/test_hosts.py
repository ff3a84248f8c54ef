"""A model whose ranks are on several machines: one machine plays all of them, each with a rank host."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import psutil
import pytest

from moonpool.engine.errors import RankLost, RankRefused
from moonpool.engine.ranks.group import RankGroup
from moonpool.engine.ranks.hosts.listener import HostListener
from moonpool.runtime.config.options import SecurityOptions
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import Caller
from moonpool.runtime.service.child import Child
from tests.engine.ranks.conftest import serving
from tests.engine.ranks.test_exact import MODELS, NUM_TOKENS, SHAPE, named, prompts
from tests.engine.ranks.test_group import edited
from tests.processes import children_of

SECRET = "as long as it is the same"


def rank_host(port: int, name: str, log: Path | None, *options: str) -> Child:
    command = [sys.executable, "-m", "moonpool.engine.ranks.hosts.daemon", "--leader", f"127.0.0.1:{port}"]
    for item in (f"node.id={name}", f"security.cluster_key={SECRET}", *options):
        command += ["--set", item]
    return Child(name, command, log, sends_json=True)


def door(num_hosts: int = 1, timeout_s: float = 5.0, port: int = 0) -> HostListener:
    return HostListener(num_hosts, f"127.0.0.1:{port}", "near", timeout_s)


@pytest.fixture(autouse=True)
def identity() -> Iterator[None]:
    before = process.current()
    process.use(process.Security(SecurityOptions(cluster_key=SECRET), Caller("node", "near")))
    yield
    process.use(before)


@asynccontextmanager
async def far_ranks(
    world_size: int, *, timeout_s: float = 5.0, num_hosts: int = 2, log: Path | None = None
) -> AsyncIterator[tuple[RankGroup, list[Child]]]:
    """A started group, and the rank hosts of its other machines."""
    hosts = door(num_hosts - 1, timeout_s)
    group = RankGroup(world_size, timeout_s, hosts)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(group.close)
        starting = asyncio.create_task(group.start(threads=1))
        await asyncio.sleep(0)
        children = [rank_host(hosts.port, name=f"far-{i}", log=log) for i in range(1, num_hosts)]
        for child in children:
            await child.start()
            stack.push_async_callback(child.stop, 5.0)
        await starting
        yield group, children


@pytest.mark.parametrize(
    "plan",
    [
        {"pp": 2},
        *(
            pytest.param(plan, marks=pytest.mark.slow)
            for plan in ({"tp": 2, "pp": 2}, {"tp": 2, "pp": 2, "link": "gloo"}, {"cp": 2, "pp": 2})
        ),
    ],
    ids=named,
)
async def test_greedy_tokens_equal_transformers(plan: dict[str, Any], make_checkpoint) -> None:
    options = {**plan, "hosts": 2, "listen": "127.0.0.1:0"}
    words = {"max_batch_tokens": 32, "micro_batch_tokens": 16, "cp_min_tokens": 1}
    family, shape = MODELS["qwen2"]
    reference = make_checkpoint(family, **SHAPE, **shape)
    expected = [reference.greedy(prompt, NUM_TOKENS) for prompt in prompts()]
    async with far_ranks(prod(plan.get(name, 1) for name in ("tp", "pp", "cp"))) as (group, (host,)):
        for _ in range(2):  # a rank host's ranks take one model after the other, too
            async with serving(reference.path, group, **words, **options) as driver:
                sequences = [driver.sequence(prompt, max_tokens=NUM_TOKENS) for prompt in prompts()]
                results = await driver.run(*sequences)
                assert [result.token_ids for result in results] == expected
                far = [rank for rank in group.ranks if rank.where]
                assert {rank.pid for rank in far} == {child.pid for child in children_of(host.pid)}
                assert len(far) == group.world_size // 2


class Lost:
    """What is done to a rank host or one of its ranks, and what the leader says of it then."""

    def __init__(self, whom: str, number: signal.Signals, says: str) -> None:
        self.whom, self.number, self.says = whom, number, says

    def __str__(self) -> str:
        return f"{self.whom}-{self.number.name}"


LOSSES = [
    # Its host reports it, and its connection breaks: whichever is noticed first.
    Lost(
        "rank",
        signal.SIGKILL,
        r"rank 1 is lost: (it ended by signal 9|torch\.distributed: .*) on far-1 \(127\.0\.0\.1\)",
    ),
    Lost("rank", signal.SIGSTOP, r"rank 1 is lost: it has been silent for \d\.. s on far-1 \(127\.0\.0\.1\)"),
    Lost("host", signal.SIGKILL, r"rank 1 is lost: its rank host is gone: .* on far-1 \(127\.0\.0\.1\)"),
    # Its rank finds out too, by its silent leader, and ends: whichever is noticed first.
    Lost("host", signal.SIGSTOP, r"rank 1 is lost: .* on far-1 \(127\.0\.0\.1\)"),
]


@pytest.mark.parametrize(
    "lost",
    [*(pytest.param(lost, marks=pytest.mark.slow) for lost in LOSSES[:-1]), LOSSES[-1]],
    ids=str,
)
async def test_a_machine_lost_in_the_middle_of_steps_is_noticed_and_comes_again(
    lost: Lost, make_checkpoint
) -> None:
    """By both sides, within the timeout; and nobody is left over."""
    timeout_s = 2.0
    options = {"pp": 2, "hosts": 2, "listen": "127.0.0.1:0", "timeout_s": timeout_s}
    path = make_checkpoint("qwen2", **SHAPE).path
    async with far_ranks(2, timeout_s=timeout_s) as (group, (host,)):
        async with serving(path, group, **options) as driver:
            driver.engine.add(driver.sequence(list(range(1, 20)), max_tokens=200, ignore_eos=True))
            await driver.until(lambda: driver.num_steps >= 10)
            (rank,), port = group.ranks, group._listener.port
            began_s = time.monotonic()
            os.kill(rank.pid if lost.whom == "rank" else host.pid, lost.number)
            with pytest.raises(RankLost):
                await asyncio.wait_for(driver.engine.wait(), 60)
            assert re.search(lost.says, str(group.lost))
            await until_gone(rank.pid)
            # The machine is shared: what takes longer than this is not the bound.
            assert time.monotonic() - began_s < timeout_s + 6
        if lost.whom == "host" and lost.number == signal.SIGSTOP:
            os.kill(host.pid, signal.SIGCONT)
        elif lost.whom == "host":
            await host.start()
        # The node's next life listens where the last one did.
        hosts = door(timeout_s=timeout_s, port=port)
        hosts.open()
        (found,) = await asyncio.wait_for(hosts.gather(), 60)
        assert found.name == "far-1 (127.0.0.1)"
        hosts.close("the test is over")
        found.close("the test is over")


@pytest.mark.slow
async def test_another_checkpoint_at_the_same_path_is_refused_by_name_on_both_sides(
    make_checkpoint, tmp_path, monkeypatch
) -> None:
    path = make_checkpoint("qwen2", **SHAPE).path
    other = edited(path, tmp_path / "other", lambda tensors: tensors["model.norm.weight"].add_(1))
    says = r"rank 1 on far-1 \(127\.0\.0\.1\) is refused: its model is \w+, the group's \w+"
    options = {"pp": 2, "hosts": 2, "listen": "127.0.0.1:0"}
    async with far_ranks(2, log=tmp_path / "far.log") as (group, _):
        (rank,) = group.ranks
        load = rank.load
        monkeypatch.setattr(
            rank, "load", lambda part, progress: load(replace(part, model=str(other)), progress)
        )
        with pytest.raises(RankRefused, match=says):
            async with serving(path, group, **options):
                pass
        async with asyncio.timeout(60):
            while not re.search(says, (tmp_path / "far.log").read_text()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def until_gone(pid: int) -> None:
    """Or dead and not yet buried, as a parent that is stopped leaves it."""

    def lives() -> bool:
        try:
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    async with asyncio.timeout(60):
        while lives():  # noqa: ASYNC110  (the kernel tells only its parent)
            await asyncio.sleep(0.005)
