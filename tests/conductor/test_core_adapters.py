"""LoRA adapters in the conductor: found without a call, changed on all nodes or none, part of block keys."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moonpool.conductor.errors import NoNodes
from moonpool.conductor.fleet.errors import AdapterFailed, AdapterInvalid, AdapterMissing
from tests.conductor.core_nodes import PROMPT, Broken, RedisProcess, Wrong, continuation, request, running
from tests.conductor.views import REQUEST, cluster, node, placed


async def test_an_adapter_is_loaded_on_all_nodes_or_on_none(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0", namespace="adapters0") as made:
        adapters, nodes = made.conductor.adapters, made.nodes
        assert adapters.find("voice") is None
        loaded = await adapters.load("voice", "/a", replace=False)
        assert (
            adapters.find("voice") == loaded == nodes["p0"].adapters["voice"] == nodes["d0"].adapters["voice"]
        )
        assert adapters.all() == [loaded]
        for error, kind in (
            (Wrong("its files are corrupt"), AdapterInvalid),
            (Broken("defect"), AdapterFailed),
        ):
            nodes["d0"].adapter_error = error
            with pytest.raises(kind, match=str(error)):
                await adapters.load("other", "/b", replace=False)
            assert adapters.find("other") is None
            assert not nodes["p0"].adapters.keys() & {"other"}
        nodes["d0"].adapter_error = None
        await adapters.unload("voice")
        assert adapters.find("voice") is None
        assert not nodes["p0"].adapters and not nodes["d0"].adapters
        with pytest.raises(AdapterMissing):
            await adapters.unload("voice")


async def test_adapters_of_records_are_found(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0", namespace="adapters1") as made:
        first = await made.conductor.adapters.load("voice", "/a", replace=False)
        made.conductor.adapters._changes.clear()  # as another conductor, which asks no node
        for one in made.nodes.values():
            await one.announce()
        await made.until(lambda: made.conductor.adapters.find("voice") == first)
        # Of two records the newer one counts, until the other node has it too.
        second = await made.conductor.adapters.load("voice", "/b", replace=True)
        made.conductor.adapters._changes.clear()
        await made.nodes["d0"].announce()
        await made.until(lambda: made.conductor.adapters.find("voice") == second)
        for one in made.nodes.values():
            one.adapters.clear()
            await one.announce()
        await made.until(lambda: not made.conductor.adapters.all())


async def test_a_load_that_takes_long_is_known_when_it_is_done(
    redis: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(redis.url, "p0", "d0", namespace="adapters6") as made:
        adapters, late_s = made.conductor.adapters, 0.0
        monkeypatch.setattr(adapters, "_unix_clock", lambda: 1e9 + late_s)
        ask_all = adapters._ask_all

        async def slowly(*arguments: Any) -> Any:
            nonlocal late_s
            late_s += 50.0  # a busy machine, or large files
            return await ask_all(*arguments)

        monkeypatch.setattr(adapters, "_ask_all", slowly)
        loaded = await adapters.load("voice", "/a", replace=False)
        assert adapters.find("voice") == loaded


async def test_names_are_asked_for_once_and_unknown_ones_cost_no_call(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0", namespace="adapters5") as made:
        adapters = made.conductor.adapters
        for name in "edcba":
            await adapters.load(name, f"/{name}", replace=False)
        adapters._changes.clear()
        for one in made.nodes.values():
            await one.announce()
        members = made.conductor._deps.registry.computing()
        await made.until(lambda: all(one.adapters.names() == set("abcde") for one in members))
        await made.until(lambda: not any(one.adapters.asking for one in members))
        # In pages; again only after a change of the names.
        asked = {name: one.num_listed for name, one in made.nodes.items()}
        for _ in range(3):
            for one in made.nodes.values():
                await one.announce()
            for number in range(100):
                assert await adapters.awaited(f"random-{number}") is None
        assert {name: one.num_listed for name, one in made.nodes.items()} == asked


async def test_names_that_no_adapter_may_have(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0", namespace="adapters2") as made:
        for name in ("", "tiny", "a b", "x" * 129, "../a"):
            with pytest.raises(AdapterInvalid, match="lora_name"):
                await made.conductor.adapters.load(name, "/a", replace=False)
        with pytest.raises(AdapterInvalid, match="absolute"):
            await made.conductor.adapters.load("voice", "a", replace=False)


async def test_without_nodes_nothing_is_loaded(redis: RedisProcess) -> None:
    async with running(redis.url, namespace="adapters3") as made:
        with pytest.raises(NoNodes):
            await made.conductor.adapters.load("voice", "/a", replace=False)


async def test_requests_tell_their_adapter_and_share_no_blocks(redis: RedisProcess) -> None:
    async with running(redis.url, "p0", "d0", namespace="adapters4") as made:
        adapters = made.conductor.adapters
        first = await adapters.load("voice", "/a", replace=False)
        second = await adapters.load("voice", "/b", replace=True)
        other = await adapters.load("other", "/b", replace=False)
        assert second.digest == other.digest
        roots = set()
        for i, adapter in enumerate((None, first, second, other)):
            assert await made.generate(request(f"r{i}", adapter=adapter)) == continuation(PROMPT, 8)
            works = [work for one in made.nodes.values() for work in one.works if work.request_id == f"r{i}"]
            assert len(works) == 2
            for work in works:
                assert work.HasField("adapter") == (adapter is not None)
                assert adapter is None or work.adapter == adapter
            roots |= {work.root_key for work in works}
        # By name and content.
        assert len(roots) == 4


def test_a_request_goes_where_its_adapter_is_in_memory() -> None:
    asked = replace(REQUEST, adapter="ab")
    prefill, decode = [node("p0"), node("p1")], [node("d0"), node("d1")]
    prefill[1].resident_adapters = decode[1].resident_adapters = frozenset({"ab"})
    placement = placed(asked, cluster(prefill, decode))
    assert placement.prefill.node_id == "p1"
    assert placement.decode is not None
    assert placement.decode.node_id == "d1"
    # A load costs as a fetch: a long queue outweighs it.
    prefill[1].queue.add("running", order_s=0.0, compute_s=1.0, now_s=0.0)
    assert placed(asked, cluster(prefill, decode)).prefill.node_id == "p0"


def test_a_hot_adapter_is_replicated_and_a_cold_one_gathered() -> None:
    asked = replace(REQUEST, adapter="ab")
    nodes = [node(f"p{i}") for i in range(3)]
    nodes[1].resident_adapters = frozenset({"ab"})
    for one in nodes:
        one.adapter_load_s = 0.2
    decode = [node("d0")]
    # Few requests: the node that has it, in spite of a short queue. Many: another one loads it, too.
    for queue_s, gathered in ((0.1, True), (0.5, False)):
        nodes[1].queue.add(f"running {queue_s}", order_s=0.0, compute_s=queue_s, now_s=0.0)
        assert (placed(asked, cluster(nodes, decode)).prefill.node_id == "p1") == gathered
