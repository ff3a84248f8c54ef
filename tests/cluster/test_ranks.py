"""Nodes of several ranks, cut differently: served exactly, and a rank that dies or stops costs no token."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
import tokenizers
import torch
from rich.console import Console

from moonpool.client import Client, Reply
from moonpool.commands.status import cluster_view
from moonpool.doctor.diagnosis import check_cluster
from moonpool.errors import ApiError
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.options import Config, ParallelOptions
from tests.cluster import hasty_node
from tests.cluster.conftest import eventually, nodes, small_config
from tests.lazily import Lazily
from tests.processes import children_of, stop

transformers = Lazily("transformers")

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEMO = Path(__file__).parents[2] / "moonpool" / "demo" / "model"
TIMEOUT_S = 5.0
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}


def config_of(*, prefill: int, decode: int, plans: tuple[str, str] = ("tp=2", "pp=2")) -> Config:
    """Prefill nodes of two tensor-parallel ranks, decode nodes of two stages, or of other ``plans``."""
    config = small_config()
    return replace(
        config,
        engine=replace(config.engine, parallel=ParallelOptions(timeout_s=TIMEOUT_S)),
        cluster=replace(
            config.cluster,
            prefill=prefill,
            decode=decode,
            prefill_options=(f"engine.parallel.{plans[0]}",),
            decode_options=(f"engine.parallel.{plans[1]}",),
        ),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    directory: Path = tmp_path_factory.mktemp("ranks")
    loaded: dict[str, tuple[int, int]] = {}

    def hear(name: str, nbytes_done: int, nbytes_total: int) -> None:
        loaded[name] = nbytes_done, nbytes_total

    config = config_of(prefill=1, decode=2)
    async with LocalCluster(config, directory=directory, loaded=hear) as running:
        # As it was read, by all ranks of each.
        assert loaded.keys() == {"prefill-0", "decode-0", "decode-1"}
        assert all(done == total for done, total in loaded.values())
        yield running


async def whole(client: Client, prompt: str, **parameters: Any) -> str:
    reply = Reply()
    async for _ in client.complete(prompt, reply, **{**GREEDY, **parameters}):
        pass
    return reply.text


def rank_pid(cluster: LocalCluster, name: str) -> int:
    """Of the node's only rank that does not lead."""
    (child,) = children_of(cluster.children[name].pid)
    return child.pid


async def test_two_plans_serve_what_one_process_serves(cluster: LocalCluster, client: Client) -> None:
    seen = await nodes(client)
    assert seen["prefill-0"]["ranks"] == "tp 2 × pp 1"
    assert seen["decode-0"]["ranks"] == "tp 1 × pp 2"
    assert seen["decode-0"]["join_s"] > 0
    await serves_exactly(client)


async def serves_exactly(client: Client) -> None:
    prompt = "In the beginning " * 20
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    expected = model.generate(ids, max_new_tokens=48, min_new_tokens=48, do_sample=False, eos_token_id=None)
    expected_text = tokenizer.decode(expected[0, ids.shape[1] :].tolist())
    for _ in range(2):  # the second time from what both nodes keep
        assert await whole(client, prompt, max_tokens=48) == expected_text


@pytest.mark.parametrize("decode", ["tp=1", pytest.param("tp=2", marks=pytest.mark.slow)])
async def test_prompts_whose_tokens_ranks_share_out_are_decoded_elsewhere(
    tmp_path: Path, decode: str
) -> None:
    config = config_of(prefill=1, decode=1, plans=("cp=2", decode))
    async with LocalCluster(config, directory=tmp_path) as cluster, Client(cluster.url) as client:
        assert (await nodes(client))["prefill-0"]["ranks"] == "tp 1 × pp 1 × cp 2"
        await serves_exactly(client)


async def is_back(client: Client, before: dict[str, Any]) -> bool:
    """In another life of the same process."""
    node = (await nodes(client)).get(before["node_id"])
    if node is None or node["state"] != "ready" or node["epoch"] == before["epoch"]:
        return False
    assert node["pid"] == before["pid"]
    assert node["num_starts"] > before["num_starts"]  # a rank that gets no core may cost it another life
    assert 0 < node["join_s"] < 300  # as long as a test may take
    return True


@pytest.mark.alone  # another process that takes the cores makes other ranks as slow
async def test_a_rank_that_is_stopped_now_and_then_is_named_within_10_s(
    cluster: LocalCluster, client: Client
) -> None:
    """On the dashboard, which shows what is degraded, and by the doctor."""
    pids = {name: rank_pid(cluster, name) for name in ("decode-0", "decode-1")}

    ended = False

    async def ask() -> None:
        while not ended:
            await whole(client, "And the LORD said unto him ")

    async def shown() -> str:
        async for now in client.live():
            return next((text for text in now["degraded"] if "rank 1 of 2 is slow" in text), "")
        return ""

    assert not await shown()

    async def told() -> bool:
        """What the doctor says of the node that was shown; it asks the node as it is by then."""
        found = await check_cluster(cluster.url, cluster.config)
        return any(one.what == name and "rank 1 of 2 is slow" in one.fact for one in found)

    async def stall() -> None:
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids.values():
                os.kill(pid, number)
            await asyncio.sleep(0.2 if number == signal.SIGSTOP else 0.8)

    asking = [asyncio.ensure_future(ask()) for _ in range(2)]
    began_s = time.monotonic()
    try:
        sentence = ""
        # A second each, and longer only where the machine stands still.
        for _ in range(10):
            await stall()
            if sentence := await shown():
                break
        assert sentence
        print(f"named after {time.monotonic() - began_s:.1f} s: {sentence}")
        name = sentence.removeprefix("node ").split(":")[0]
        assert name in pids
        while not await told():
            assert time.monotonic() - began_s < 150
            await stall()
    finally:
        ended = True
        await asyncio.gather(*asking)


class HastyCluster(LocalCluster):
    """Its nodes act on slow ranks from their first second on: see ``hasty_node``."""

    async def _create_children(self) -> None:
        await super()._create_children()
        for child in self.nodes:
            child._command[child._command.index("moonpool.node")] = hasty_node.__name__


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("policy", ["drain", "regroup"])
async def test_a_node_with_a_rank_that_stays_slow_hands_its_requests_on(tmp_path: Path, policy: str) -> None:
    """And serves again: in another process by its supervisor, or with another rank."""
    config = config_of(prefill=1, decode=2, plans=("tp=1", "tp=2"))
    own = (*config.cluster.decode_options, f"engine.parallel.slow_rank={policy}")
    config = replace(
        config,
        cluster=replace(config.cluster, decode_options=own),
        # The default would leave the slow node alone, so that there is nothing to judge.
        conductor=replace(config.conductor, policy="round-robin"),
    )
    prompts = [f"{number}. And it came to pass in those days " * 4 for number in range(3)]
    greedy = {**GREEDY, "max_tokens": 900}
    async with (
        HastyCluster(config, directory=tmp_path, restart=True) as cluster,
        Client(cluster.url) as client,
    ):
        expected = await asyncio.gather(*(whole(client, prompt, **greedy) for prompt in prompts))
        before, slow = (await nodes(client))["decode-0"], rank_pid(cluster, "decode-0")
        replies: list[Reply] = []

        async def ask(prompt: str, text: str) -> None:
            while (await nodes(client)).get("decode-0", {}).get("epoch") == before["epoch"]:
                reply = Reply()
                async for _ in client.complete(prompt, reply, **greedy):
                    pass
                assert reply.text == text
                replies.append(reply)

        async def serves() -> bool:
            return (await nodes(client)).get("decode-0", {}).get("state") == "ready"

        asking = asyncio.gather(*map(ask, prompts, expected))
        began_s = time.monotonic()
        while await serves() and psutil.pid_exists(slow):
            assert time.monotonic() - began_s < 200
            for number, pause_s in ((signal.SIGSTOP, 0.2), (signal.SIGCONT, 0.3)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(slow, number)
                await asyncio.sleep(pause_s)
        await asking
        print(f"{policy}: drained after {time.monotonic() - began_s:.0f} s")
        causes = list[str]()
        for reply in replies:
            events = (await client.timeline(reply.id))["events"]
            assert "retry" not in [event["event"] for event in events]
            causes += [event["cause"] for event in events if event["event"] == "migrated"]
        assert "drain" in causes
        await eventually(serves)
        after = (await nodes(client))["decode-0"]
        assert after["epoch"] != before["epoch"]
        assert rank_pid(cluster, "decode-0") != slow
        assert (after["pid"] == before["pid"]) == (policy == "regroup")
        said = (tmp_path / "decode-0.log").read_text()
        assert f"the node drains to {policy}" in said
        async with aiohttp.ClientSession() as session, session.get(after["metrics_url"]) as page:
            metrics = await page.text()
        for name in ("rank_detect", "regroup"):
            counted = f'moonpool_{name}_seconds_count{{class="slow"}} 1.0'
            assert (counted in metrics) == (policy == "regroup"), "another process counts anew"
        assert await asyncio.gather(*(whole(client, prompt, **greedy) for prompt in prompts)) == expected


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGKILL, id="kill"),
        pytest.param(signal.SIGSTOP, id="stop", marks=pytest.mark.slow),
    ],
)
async def test_a_rank_lost_while_decoding_costs_no_token(
    cluster: LocalCluster, client: Client, number: signal.Signals
) -> None:
    # Long enough that it has not ended when the rank is gone.
    prompt, greedy = "And the LORD said unto him " * 8, {**GREEDY, "max_tokens": 800}
    expected = await whole(client, prompt, **greedy)
    # On a busy machine the request may arrive in few pieces, or have ended before its rank was lost: then
    # once more.
    for _ in range(5):
        reply, before = Reply(), dict[str, Any]()
        async for _ in client.complete(prompt, reply, **greedy):
            if not before and len(reply.pieces_s) >= 20:
                name = (await client.timeline(reply.id))["summary"]["decode_node"]
                before = (await nodes(client))[name]
                os.kill(rank_pid(cluster, name), number)
        assert reply.text == expected
        if not before:
            continue
        await eventually(lambda before=before: is_back(client, before))  # type: ignore[misc]
        if "retry" in [event["event"] for event in (await client.timeline(reply.id))["events"]]:
            break
    else:
        pytest.fail("five times the request had ended before its rank was lost")
    again = await whole(client, prompt, **{**greedy, "max_tokens": 100})
    assert again and expected.startswith(again)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "number"),
    [("tp=2", signal.SIGKILL), ("tp=2", signal.SIGSTOP), ("cp=2", signal.SIGKILL)],
    ids=str,
)
async def test_a_rank_lost_while_prefilling_costs_no_request(
    tmp_path: Path, plan: str, number: signal.Signals
) -> None:
    config = config_of(prefill=2, decode=1, plans=(plan, "pp=2"))
    async with (
        LocalCluster(config, directory=tmp_path) as cluster,
        Client(cluster.url) as client,
    ):
        prompt = "The words of the preacher, the son of David. " * 300
        task = asyncio.ensure_future(whole(client, prompt, max_tokens=32))
        busy: list[dict[str, Any]] = []
        while not busy and not task.done():
            busy = [n for n in (await nodes(client)).values() if n["load"]["own_prefills"]]
        assert busy, "it was over too soon"
        os.kill(rank_pid(cluster, busy[0]["node_id"]), number)
        text = await task
        await eventually(lambda: is_back(client, busy[0]))
        assert await whole(client, prompt, max_tokens=32) == text


@pytest.mark.slow
async def test_a_prompt_that_ends_nodes_is_refused_after_two(tmp_path: Path) -> None:
    """Ranks are stopped first, so that each is killed in a step with the prompt."""
    config = config_of(prefill=3, decode=1, plans=("tp=2", "tp=1"))
    # Ranks that are stopped for a while must not count as lost.
    engine = replace(config.engine, parallel=replace(config.engine.parallel, timeout_s=60.0))
    config = replace(config, engine=engine)
    async with LocalCluster(config, directory=tmp_path) as cluster, Client(cluster.url) as client:
        expected = await whole(client, "In the beginning ", max_tokens=8)
        before = await nodes(client)
        ranked = [name for name in before if name.startswith("prefill")]
        for name in ranked:
            stop(rank_pid(cluster, name))
        task = asyncio.ensure_future(whole(client, "The words of the preacher. " * 20, max_tokens=32))
        killed: list[str] = []
        while not task.done() and len(killed) < 3:
            busy = [n for n, node in (await nodes(client)).items() if node["load"]["own_prefills"]]
            for name in set(busy) - set(killed):
                os.kill(rank_pid(cluster, name), signal.SIGKILL)
                killed.append(name)
        with pytest.raises(
            ApiError, match="2 nodes lost a rank or their device in a step with it"
        ) as refused:
            await task
        assert refused.value.status == 400
        assert all(name in str(refused.value) for name in killed)
        assert len(killed) == 2
        (spared,) = set(ranked) - set(killed)
        os.kill(rank_pid(cluster, spared), signal.SIGCONT)
        for name in killed:
            await eventually(lambda name=name: is_back(client, before[name]))
        assert await whole(client, "In the beginning ", max_tokens=8) == expected


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
async def test_a_lost_leaders_ranks_end_and_its_requests_go_on(
    cluster: LocalCluster, client: Client, number: signal.Signals
) -> None:
    """Continued, it begins a new life; started again, it is another process."""
    prompt = "And the LORD spake again unto him " * 8
    expected = await whole(client, prompt)
    reply, before = Reply(), dict[str, Any]()
    rank = 0
    async for _ in client.complete(prompt, reply, **GREEDY):
        if not before and len(reply.pieces_s) >= 20:
            name = (await client.timeline(reply.id))["summary"]["decode_node"]
            before = (await nodes(client))[name]
            rank = rank_pid(cluster, name)
            os.kill(int(before["pid"]), number)
    assert before, "it was over too soon"
    assert reply.text == expected

    async def ended() -> bool:
        return not psutil.pid_exists(rank) or psutil.Process(rank).status() == psutil.STATUS_ZOMBIE

    async def another_serves() -> bool:
        node = (await nodes(client)).get(before["node_id"])
        return node is not None and node["state"] == "ready" and node["pid"] != before["pid"]

    await eventually(ended)
    if number == signal.SIGSTOP:
        os.kill(int(before["pid"]), signal.SIGCONT)
        await eventually(lambda: is_back(client, before))
    else:
        await cluster.restart(before["node_id"])
        await eventually(another_serves)
    assert await whole(client, prompt) == expected


@pytest.mark.slow
async def test_a_lost_ranks_blocks_are_void_but_for_what_the_disk_kept(tmp_path: Path) -> None:
    """The next life has another epoch, nothing in memory, and takes up from disk what is whole there."""
    prompt = "The words of the preacher, the son of David. " * 40
    config = config_of(prefill=1, decode=1)
    # A disk that stands still for a while is waited for.
    ssd = replace(config.store.ssd, path=str(tmp_path / "disk"), deadline_s=30.0)
    config = replace(
        config,
        cluster=replace(config.cluster, decode_options=()),
        store=replace(config.store, write_policy="write-through", ssd=ssd, flush_s=30.0),
        # The prefill node serves the prompt again, although the decode node has most of it.
        conductor=replace(config.conductor, policy="kv-aware"),
    )
    directory = tmp_path / "cluster"
    directory.mkdir()
    async with LocalCluster(config, directory=directory) as cluster, Client(cluster.url) as client:
        first = await whole(client, prompt, max_tokens=24)

        async def used(tier: str) -> int:
            (found,) = [t for t in (await nodes(client))["prefill-0"]["tiers"] if t["name"] == tier]
            return int(found["num_used_blocks"])

        # Of 16 tokens; the prompt's last ones are no whole block, or are computed in any case.
        async def kept() -> bool:
            return await used("ssd") >= 30

        await eventually(kept)
        before = (await nodes(client))["prefill-0"]
        os.kill(rank_pid(cluster, "prefill-0"), signal.SIGKILL)
        await eventually(lambda: is_back(client, before))
        assert await used("ssd") >= 30
        sources = []
        for _ in range(2):
            reply = Reply()
            async for _ in client.complete(prompt, reply, **GREEDY | {"max_tokens": 24}):
                pass
            assert reply.text == first
            summary = (await client.timeline(reply.id))["summary"]
            sources.append((summary["ssd_tokens"], summary["pool_tokens"]))
        # Nothing was left in the pool of the life that ended; what came from disk is there now.
        assert sources[0] == (480, 0)
        assert sources[1][0] == 0
        assert sources[1][1] >= 480
        now = (await nodes(client))["prefill-0"]
        async with aiohttp.ClientSession() as session, session.get(now["metrics_url"]) as page:
            lines = (await page.text()).splitlines()
        (join_s,) = [line.split()[1] for line in lines if line.startswith("moonpool_node_join_seconds ")]
        assert float(join_s) == pytest.approx(now["join_s"], abs=1e-3)
        table = io.StringIO()
        Console(width=300, file=table).print(cluster_view(cluster.url, await client.cluster()))
        assert f"{now['join_s']:.1f} s" in table.getvalue()


@pytest.mark.slow
async def test_blocks_on_disk_serve_any_plan(tmp_path: Path) -> None:
    """Keys do not know how a node is cut, nor do the blocks that leave its pool."""
    prompt = "The words of the preacher, the son of David. " * 40
    texts: list[str] = []
    from_disk: list[int] = []
    for i, plan in enumerate(("tp=2", "pp=2", "tp=1")):
        config = config_of(prefill=1, decode=1)
        config = replace(
            config,
            cluster=replace(config.cluster, prefill_options=(f"engine.parallel.{plan}",), decode_options=()),
            store=replace(
                config.store,
                write_policy="write-through",
                ssd=replace(config.store.ssd, path=str(tmp_path / "disk"), deadline_s=30.0),
                flush_s=30.0,
            ),
        )
        directory = tmp_path / str(i)
        directory.mkdir()
        async with LocalCluster(config, directory=directory) as cluster, Client(cluster.url) as client:
            reply = Reply()
            async for _ in client.complete(prompt, reply, **GREEDY | {"max_tokens": 24}):
                pass
            texts.append(reply.text)
            from_disk.append((await client.timeline(reply.id))["summary"]["ssd_tokens"])
    assert texts == [texts[0]] * 3
    # All but the prompt's last tokens, after the first time.
    assert from_disk == [0, 480, 480]
