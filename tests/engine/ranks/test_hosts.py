"""A model whose ranks are on several machines: one plays all of them, and these tests their launcher."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonpool.engine.errors import RankLost, RankRefused
from moonpool.engine.ranks.group import RankGroup
from moonpool.engine.ranks.rank_listener import RankListener
from moonpool.runtime.config.options import ParallelOptions, SecurityOptions
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import Caller
from moonpool.runtime.service.child import Child
from tests.engine.ranks.conftest import TIMEOUT_S, serving
from tests.engine.ranks.test_exact import MODELS, NUM_TOKENS, SHAPE, named, prompts
from tests.engine.ranks.test_group import edited
from tests.transfer.cables import Cabled, obstacle

SECRET = "as long as it is the same"


def far_rank(
    port: int,
    options: ParallelOptions,
    rank: int,
    log: Path | None,
    *settings: str,
    prefix: tuple[str, ...] = (),
    host: str = "127.0.0.1",
) -> Child:
    """As a launcher starts it: ``rank`` among the ranks of the other machines."""
    per_host = options.ranks_per_host
    name = f"far-{1 + rank // per_host}"
    command = [*prefix, sys.executable, "-m", "moonpool.engine.ranks.worker", "--leader", f"{host}:{port}"]
    for item in (f"node.id={name}", f"security.cluster_key={SECRET}", *settings):
        command += ["--set", item]
    launched = {
        "RANK": rank,
        "LOCAL_RANK": rank % per_host,
        "WORLD_SIZE": options.world_size - per_host,
        "LOCAL_WORLD_SIZE": per_host,
    }
    return Child(name, command, log, environment={key: str(value) for key, value in launched.items()})


@pytest.fixture(autouse=True)
def identity() -> None:
    process.use(process.Security(SecurityOptions(cluster_key=SECRET), Caller("node", "near")))


@asynccontextmanager
async def far_ranks(
    options: ParallelOptions,
    log: Path | None = None,
    prefix: tuple[str, ...] = (),
    host: str = "127.0.0.1",
) -> AsyncIterator[tuple[RankGroup, list[Child]]]:
    """A started group, and the processes of its other machines."""
    listener = RankListener(options, "near")
    group = RankGroup(options.world_size, options.timeout_s, listener)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(group.close)
        starting = asyncio.create_task(group.start(threads=1))
        await asyncio.sleep(0)
        num_far = options.world_size - options.ranks_per_host
        children = [
            far_rank(listener.port, options, rank, log, prefix=prefix, host=host) for rank in range(num_far)
        ]
        for child in children:
            await child.start()
            stack.push_async_callback(_end, child)
        await starting
        yield group, children


async def _end(child: Child) -> None:
    child.kill()
    await child.wait()


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
    options = {**plan, "hosts": 2, "listen": "127.0.0.1:0", "timeout_s": TIMEOUT_S}
    words = {"max_batch_tokens": 32, "micro_batch_tokens": 16, "cp_min_tokens": 1}
    family, shape = MODELS["qwen2"]
    reference = make_checkpoint(family, **SHAPE, **shape)
    expected = reference.greedy_each(prompts(), NUM_TOKENS)
    async with far_ranks(ParallelOptions(**options)) as (group, children):
        for _ in range(2):  # ranks of another machine take one model after the other, too
            async with serving(reference.path, group, **words, **options) as driver:
                sequences = [driver.sequence(prompt, max_tokens=NUM_TOKENS) for prompt in prompts()]
                results = await driver.run(*sequences)
                assert [result.token_ids for result in results] == expected
                far = [rank for rank in group.ranks if rank.where]
                assert {rank.pid for rank in far} == {child.pid for child in children}
                assert len(far) == group.world_size // 2


# The kernel gives up a connection as well, and Gloo then: whichever is noticed first.
SILENT = "it has been silent for|its call has ended,|torch.distributed: "
LOSSES = {
    # Its connections break: whichever is noticed first.
    signal.SIGKILL: r"rank 1 is lost: (its call has ended,|torch\.distributed:) .* on far-1 \(127\.0\.0\.1\)",
    signal.SIGSTOP: r"rank 1 is lost: it has been silent for \d+\.\d s on far-1 \(127\.0\.0\.1\)",
}


@pytest.mark.parametrize("number", [pytest.param(signal.SIGKILL, marks=pytest.mark.slow), signal.SIGSTOP])
async def test_a_machine_lost_in_the_middle_of_steps_is_noticed_and_comes_again(
    number: signal.Signals, make_checkpoint
) -> None:
    """In time; a stopped rank ends as soon as it runs again."""
    # On a busy machine a rank that is well is silent for a while, too. The end of a process is told.
    timeout_s = 5.0 if number is signal.SIGSTOP else TIMEOUT_S
    words = {"pp": 2, "hosts": 2, "listen": "127.0.0.1:0", "timeout_s": timeout_s}
    options = ParallelOptions(**words)
    path = make_checkpoint("qwen2", **SHAPE).path
    async with far_ranks(options) as (group, (child,)):
        async with serving(path, group, **words) as driver:
            driver.engine.add(driver.sequence(list(range(1, 20)), max_tokens=200, ignore_eos=True))
            await driver.until(lambda: driver.num_steps >= 10)
            port = group._listener.port
            began_s = time.monotonic()
            os.kill(child.pid, number)
            with pytest.raises(RankLost):
                await asyncio.wait_for(driver.engine.wait(), 60)
            assert re.search(LOSSES[number], str(group.lost))
            # Sooner than by any other limit. The machine is shared: it takes a moment where that is free.
            assert time.monotonic() - began_s < 30
        if number == signal.SIGSTOP:
            os.kill(child.pid, signal.SIGCONT)
        await asyncio.wait_for(child.wait(), 60)
        # The launcher starts it again; the node's next life listens where the last one did.
        await child.start()
        listener = RankListener(replace(options, listen=f"127.0.0.1:{port}"), "near")
        listener.open()
        found = await listener.gather()
        assert found[1].where == "far-1 (127.0.0.1)"
        assert found[1].pid == child.pid
        listener.close("the test is over")
        await listener.wait_closed()


@pytest.fixture
def cabled() -> Iterator[Cabled]:
    if reason := obstacle():
        pytest.skip(reason)
    with closing(Cabled()) as there:
        yield there


@pytest.mark.slow
@pytest.mark.alone  # other tests lay cables too
async def test_a_cut_cable_ends_the_group_on_both_sides(
    cabled: Cabled, tmp_path: Path, make_checkpoint
) -> None:
    """Between two network namespaces: no end is told. Tensors and calls find their way before."""
    here = cabled.hosts[0].rpartition(".")[0] + ".1"
    words = {"pp": 2, "hosts": 2, "listen": f"{here}:0", "trusted_network": True}
    options = ParallelOptions(**words)
    family, shape = MODELS["qwen2"]
    reference = make_checkpoint(family, **SHAPE, **shape)
    expected = reference.greedy_each(prompts(), NUM_TOKENS)
    inside = ("ip", "netns", "exec", cabled.name)
    async with far_ranks(options, tmp_path / "far.log", inside, here) as (group, (child,)):
        async with serving(reference.path, group, **words) as driver:
            results = await driver.run(*(driver.sequence(one, max_tokens=NUM_TOKENS) for one in prompts()))
            assert [result.token_ids for result in results] == expected
            assert group.ranks[0].where == f" on far-1 ({cabled.hosts[0]})"
            driver.engine.add(driver.sequence(list(range(1, 20)), max_tokens=200, ignore_eos=True))
            first = driver.num_steps
            await driver.until(lambda: driver.num_steps >= first + 10)
            cabled.pull(0)
            with pytest.raises(RankLost, match=SILENT):
                await asyncio.wait_for(driver.engine.wait(), 60)
        assert await asyncio.wait_for(child.wait(), 60) != 0
    said = (tmp_path / "far.log").read_text()
    assert re.search("the leader has been silent for|node near ended its group here: ", said)


async def test_a_rank_ends_with_its_group_and_says_why(tmp_path: Path) -> None:
    """Not in order: so that its launcher starts it again."""
    options = ParallelOptions(pp=2, hosts=2, listen="127.0.0.1:0", timeout_s=TIMEOUT_S)
    async with far_ranks(options, log=tmp_path / "far.log") as (group, (child,)):
        group.abort(RankLost(0, "for the test"))
        assert await asyncio.wait_for(child.wait(), 60) == 1
        says = "node near ended its group here: rank 0 is lost: for the test"
        assert says in (tmp_path / "far.log").read_text()


@pytest.mark.slow
async def test_another_checkpoint_at_the_same_path_is_refused_by_name_on_both_sides(
    make_checkpoint, tmp_path, monkeypatch
) -> None:
    path = make_checkpoint("qwen2", **SHAPE).path
    other = edited(path, tmp_path / "other", lambda tensors: tensors["model.norm.weight"].add_(1))
    says = r"rank 1 on far-1 \(127\.0\.0\.1\) is refused: its model is \w+, the group's \w+"
    options = {"pp": 2, "hosts": 2, "listen": "127.0.0.1:0", "timeout_s": TIMEOUT_S}
    async with far_ranks(ParallelOptions(**options), log=tmp_path / "far.log") as (group, _):
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
