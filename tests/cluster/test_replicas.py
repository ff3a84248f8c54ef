"""Nodes of two replicas: one node to their operator, two places to the conductor, exact whatever dies."""

from __future__ import annotations

import asyncio
import os
import re
import signal
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

from moonpool.client import Client, Reply
from moonpool.commands.status import state_of
from moonpool.conductor.observing.replica_groups import holders
from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.index.redis.kv_index import replay
from moonpool.local.cluster import LocalCluster
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from tests.cluster.conftest import eventually, kill, nodes, small_config
from tests.lazily import Lazily
from tests.processes import are_gone, children_of, descendants_of

transformers = Lazily("transformers")

pytestmark = pytest.mark.asyncio(loop_scope="module")

DEMO = Path(__file__).parents[2] / "moonpool" / "demo" / "model"
SILENT_S = 5.0  # longer than a busy machine or disk stops a replica
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = small_config()
    two = ("engine.parallel.dp=2", f"engine.parallel.timeout_s={SILENT_S}")
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=1, decode=1, prefill_options=two, decode_options=two),
    )
    async with LocalCluster(config, directory=tmp_path_factory.mktemp("replicas")) as running:
        yield running


async def ask(client: Client, prompt: str, **parameters: Any) -> Reply:
    reply = Reply()
    async for _ in client.complete(prompt, reply, **{**GREEDY, **parameters}):
        pass
    return reply


async def summary(client: Client, reply: Reply) -> dict[str, Any]:
    found: dict[str, Any] = (await client.timeline(reply.id))["summary"]
    return found


async def replicas(client: Client) -> dict[str, dict[str, Any]]:
    return {one["node_id"]: one for node in (await nodes(client)).values() for one in holders(node)}


async def all_are_ready(client: Client) -> bool:
    return all(node["state"] == "ready" for node in (await nodes(client)).values())


def family(cluster: LocalCluster, name: str) -> list[psutil.Process]:
    return descendants_of(cluster.children[name].pid)


async def test_they_are_one_node_and_answer_as_one_process_does(
    cluster: LocalCluster, client: Client
) -> None:
    seen = await nodes(client)
    assert seen.keys() == {"prefill-0", "decode-0"}
    assert [seen[name]["ranks"] for name in seen] == ["dp 2", "dp 2"]
    assert (await replicas(client)).keys() == {"prefill-0.0", "prefill-0.1", "decode-0.0", "decode-0.1"}
    assert seen["prefill-0"]["pid"] == cluster.children["prefill-0"].pid
    prompt = "In the beginning " * 20
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    expected = model.generate(ids, max_new_tokens=48, min_new_tokens=48, do_sample=False, eos_token_id=None)
    expected_text = tokenizer.decode(expected[0, ids.shape[1] :].tolist())
    used: set[str] = set()
    # At once, so that they spread over all; then from what these keep.
    for _ in range(2):
        asked = await asyncio.gather(*(ask(client, prompt, max_tokens=48) for _ in range(6)))
        assert {reply.text for reply in asked} == {expected_text}
        for reply in asked:
            told = await summary(client, reply)
            used |= {told["prefill_node"], told["decode_node"]}
    assert used >= {"decode-0.0", "decode-0.1"}


async def test_prompts_spread_and_each_next_turn_finds_its_prefix(
    cluster: LocalCluster, client: Client
) -> None:
    block_size = cluster.config.engine.block_size
    await eventually(lambda: all_are_ready(client))
    # So many that even a replica that was measured on a busy machine, and is taken to be slow, gets some.
    prefixes = [f"{number} And the LORD spake unto Moses, saying, " * 40 for number in range(10)]

    async def num_known() -> int:
        return int((await client.cluster())["index"]["num_blocks"])

    known_before = await num_known()
    replies = await asyncio.gather(*(ask(client, prefix, max_tokens=4) for prefix in prefixes))
    first = [await summary(client, reply) for reply in replies]
    assert {told["prefill_node"] for told in first} == {"prefill-0.0", "prefill-0.1"}
    num_blocks = sum(told["prompt_tokens"] // block_size for told in first)

    async def published() -> bool:
        return await num_known() >= known_before + num_blocks

    await eventually(published)
    for prefix, before in zip(prefixes, first, strict=True):
        told = await summary(client, await ask(client, f"{prefix} Amen", max_tokens=4))
        assert told["cached_tokens"] > 400
        # At a replica that has it, or read from that one.
        has_it = {before["prefill_node"], before["decode_node"]}
        assert told["prefill_node"] in has_it or told["fetched_tokens"] > 400


async def held(stub: node_pb2_grpc.NodeStub) -> list[BlockKey]:
    """What it holds, prefixes before what continues them."""
    return list(replay([one.changes async for one in stub.ListBlocks(node_pb2.ListBlocksRequest())]))


async def test_a_replica_reads_blocks_of_its_sibling_from_its_memory(client: Client) -> None:
    seen = await replicas(client)
    num_read = 0
    for source, target in (("prefill-0.0", "prefill-0.1"), ("prefill-0.1", "prefill-0.0")):
        async with (
            rpc.channel(seen[source]["rpc_address"]) as there,
            rpc.channel(seen[target]["rpc_address"]) as here,
        ):
            from_, to = node_pb2_grpc.NodeStub(there), node_pb2_grpc.NodeStub(here)
            status = await from_.Status(node_pb2.StatusRequest())
            known = set(await held(to))
            keys = [key for key in await held(from_) if key not in known]
            reply = await to.Replicate(
                node_pb2.ReplicateRequest(source=status.kv, keys=block_keys.pack(keys))
            )
            assert reply.num_read == len(keys)
            num_read += reply.num_read
    assert num_read > 0
    async with (
        aiohttp.ClientSession() as session,
        session.get((await nodes(client))["prefill-0"]["metrics_url"]) as answer,
    ):
        page = await answer.text()
    ways = set(re.findall(r'^moonpool_transfer_bytes_total\{[^}]*path="(\w+)"', page, re.MULTILINE))
    assert ways == {"shm"}


async def test_one_page_of_metrics_shows_both(client: Client) -> None:
    for node in (await nodes(client)).values():
        async with aiohttp.ClientSession() as session, session.get(node["metrics_url"]) as answer:
            page = await answer.text()
        for replica in ("0", "1"):
            assert f'moonpool_node_join_seconds{{replica="{replica}"}}' in page
        assert page.count("# TYPE moonpool_node_join_seconds") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
async def test_a_replica_lost_while_decoding_costs_no_token_and_comes_back(
    cluster: LocalCluster, client: Client, number: signal.Signals
) -> None:
    """Nobody continues the stopped one: its node starts it again, and says so until it serves."""
    prompt = "And the LORD said unto him " * 8
    long = {**GREEDY, "max_tokens": 600}  # so that it is not over before the signal
    expected = (await ask(client, prompt, **long)).text
    reply, before = Reply(), dict[str, dict[str, Any]]()
    name = ""

    async def says_so() -> bool:
        return state_of((await nodes(client))["decode-0"]) == "1 of 2 serve"

    async def is_gone() -> bool:
        return not lost.is_running()

    async for _ in client.complete(prompt, reply, **long):
        if not before and len(reply.pieces_s) >= 20:
            name = (await summary(client, reply))["decode_node"]
            before = await replicas(client)
            lost = psutil.Process(before[name]["pid"])
            lost.send_signal(number)
            # From now on: it may be back before all the answers below are there.
            said = asyncio.create_task(eventually(says_so))
            gone = asyncio.create_task(eventually(is_gone, timeout_s=SILENT_S + 30))
    assert before, "it was over too soon"
    assert reply.text == expected
    assert "retry" in [event["event"] for event in (await client.timeline(reply.id))["events"]]
    assert (await ask(client, prompt, **long)).text == expected  # of the sibling, or of the new one

    async def is_back() -> bool:
        one = (await replicas(client)).get(name)
        return one is not None and one["state"] == "ready" and one["epoch"] != before[name]["epoch"]

    await said
    await gone
    await eventually(is_back)
    after = await replicas(client)
    sibling = next(other for other in before if other.startswith("decode") and other != name)
    assert after[sibling]["epoch"] == before[sibling]["epoch"]
    assert after[name]["num_starts"] == before[name]["num_starts"] + 1
    assert 0 < after[name]["join_s"] < 300  # as long as a test may take
    assert (await nodes(client))["decode-0"]["pid"] == cluster.children["decode-0"].pid
    assert (await ask(client, prompt, **long)).text == expected


async def test_sigterm_drains_both(cluster: LocalCluster, client: Client) -> None:
    prompt = "And it came to pass " * 8
    expected = (await ask(client, prompt)).text
    members = family(cluster, "decode-0")
    begun = [asyncio.Event() for _ in range(4)]

    async def stream(begins: asyncio.Event) -> str:
        reply = Reply()
        async for _ in client.complete(prompt, reply, **GREEDY):
            if len(reply.pieces_s) == 2:  # the first is the prefill node's
                begins.set()
        return reply.text

    streams = [asyncio.create_task(stream(one)) for one in begun]
    await asyncio.gather(*(one.wait() for one in begun))
    os.kill(cluster.children["decode-0"].pid, signal.SIGTERM)
    assert await asyncio.gather(*streams) == [expected] * 4
    assert await cluster.children["decode-0"].wait() == 0
    assert are_gone(members)


async def test_a_killed_node_leaves_no_process(cluster: LocalCluster, client: Client) -> None:
    members = family(cluster, "prefill-0")
    assert len(members) == 2
    kill(cluster, "prefill-0")
    assert are_gone(members)


@pytest.mark.slow
async def test_replicas_of_several_ranks_lose_one_and_find_their_disks_again(tmp_path: Path) -> None:
    config = small_config()
    config = replace(
        config,
        cluster=replace(
            config.cluster,
            prefill=1,
            decode=1,
            prefill_options=("engine.parallel.dp=2",),
            decode_options=("engine.parallel.dp=2", "engine.parallel.tp=2"),
        ),
        store=replace(
            config.store,
            write_policy="write-through",
            # A disk that stands still for a while is waited for.
            ssd=replace(config.store.ssd, path=str(tmp_path / "disk"), deadline_s=30.0),
            flush_s=30.0,
        ),
    )
    prompts = [f"{number} The words of the preacher, the son of David. " * 40 for number in range(4)]
    texts: list[list[str]] = []
    for life in range(2):
        directory = tmp_path / str(life)
        directory.mkdir()
        async with LocalCluster(config, directory=directory) as cluster, Client(cluster.url) as client:
            replies = await asyncio.gather(*(ask(client, prompt, max_tokens=24) for prompt in prompts))
            told = [await summary(client, reply) for reply in replies]
            texts.append([reply.text for reply in replies])
            # In the second life each prompt but its last tokens is on the disk of one of the two.
            assert all(bool(one["cached_tokens"] > 400) == bool(life) for one in told)
            decode = (await nodes(client))["decode-0"]
            assert decode["ranks"] == "dp 2 × tp 2 × pp 1"
            before = decode["replicas"][0]
            (rank,) = children_of(before["pid"])
            rank.kill()

            async def is_in_another_life(before: dict[str, Any] = before, client: Client = client) -> bool:
                one = (await replicas(client)).get(before["node_id"])
                return one is not None and one["state"] == "ready" and one["epoch"] != before["epoch"]

            await eventually(is_in_another_life)
            # The leader mended itself: the node had nothing to do.
            assert (await replicas(client))[before["node_id"]]["pid"] == before["pid"]
            await eventually(lambda client=client: all_are_ready(client))
            assert (await ask(client, prompts[0], max_tokens=24)).text == texts[0][0]
            # Whoever of a node is told to drain, all of it drains.
            async with rpc.channel((await replicas(client))["prefill-0.1"]["rpc_address"]) as channel:
                await node_pb2_grpc.NodeStub(channel).Drain(node_pb2.DrainRequest())
            assert await asyncio.wait_for(cluster.children["prefill-0"].wait(), 60) == 0
    assert texts[0] == texts[1]
    assert {path.name for path in (tmp_path / "disk").iterdir()} == {
        *("prefill-0.0", "prefill-0.1", "decode-0.0", "decode-0.1")
    }
