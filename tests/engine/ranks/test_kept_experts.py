"""A placement of experts that was applied is there for the next life, or refused with a reason."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moonpool.engine.node.kept_experts import KeptExperts
from moonpool.engine.setup import EngineSetup
from moonpool.engine.sharding.expert_placement import ExpertPlacement
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import EngineOptions, ModelOptions, ParallelOptions
from moonpool.runtime.message_checks import check_message
from tests.engine.ranks.test_exact import MIXTURES, SHAPE
from tests.kvstore.redis_servers import Server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    with tempfile.TemporaryDirectory(prefix="mp") as directory:
        server = Server(Path(directory))
        await server.start()
        yield server
        await server.kill()


@pytest.fixture
async def index(server: Server) -> AsyncIterator[KVIndex]:
    redis = connect(server.url)
    yield KVIndex(redis, timeout_s=30.0)
    await redis.aclose()


@pytest.fixture
def setup(make_checkpoint: Any) -> EngineSetup:
    family, words = MIXTURES["qwen3-moe"]
    return setup_of(make_checkpoint(family, **SHAPE | words).path, tp=2, ep=2)


def setup_of(path: Path, **sizes: Any) -> EngineSetup:
    options = EngineOptions(parallel=ParallelOptions(**sizes))
    return EngineSetup.choose(path, options, ModelOptions(device="cpu"), None)


def placement_for(setup: EngineSetup) -> ExpertPlacement:
    """Expert 0 of each layer on both ranks."""
    assert setup.config.moe is not None
    even = ExpertPlacement.even(setup.config.num_layers, setup.config.moe.num_experts, 2)
    return ExpertPlacement(2, tuple(((0, 1), *layer[1:]) for layer in even.layers))


async def kept(index: KVIndex, setup: EngineSetup, name: str = "decode-0") -> ExpertPlacement | None:
    """What another process of the node begins with."""
    return await KeptExperts(name, is_named=True).load(index, setup)


async def test_what_was_applied_is_there_for_another_process_of_the_node(
    index: KVIndex, setup: EngineSetup
) -> None:
    node = KeptExperts("decode-0", is_named=True)
    assert await node.load(index, setup) is None
    placement = placement_for(setup)
    assert await node.save(index, placement) == ""
    assert await node.load(index, setup) == await kept(index, setup) == placement
    assert await kept(index, setup, "decode-1") is None
    assert setup.placing(placement).assignment(8).plan.experts == placement


async def test_what_does_not_fit_any_more_is_refused_with_a_reason(
    index: KVIndex, setup: EngineSetup, make_checkpoint: Any, caplog: pytest.LogCaptureFixture
) -> None:
    node = KeptExperts("decode-0", is_named=True)
    await node.load(index, setup)
    await node.save(index, placement_for(setup))
    family, words = MIXTURES["qwen2-moe"]
    other = setup_of(make_checkpoint(family, **SHAPE | words).path, tp=2, ep=2)
    wider = setup_of(setup.config.path, tp=4, ep=2)
    by_file = replace(setup, plan=replace(setup.plan, experts=placement_for(setup)))
    for now, reason in (
        (other, "it is for model "),
        (wider, "it is for plan tp 2 × pp 1, ep 2, and this node has tp 4 × pp 1, ep 2"),
        (by_file, "and this node has tp 2 × pp 1, ep 2 by plan "),
    ):
        caplog.clear()
        assert await kept(index, now) is None
        assert "begins without the placement of experts that was applied to it" in caplog.text
        assert reason in caplog.text


async def test_a_strangers_placement_is_refused(
    index: KVIndex, setup: EngineSetup, caplog: pytest.LogCaptureFixture
) -> None:
    node = KeptExperts("decode-0", is_named=True)
    await node.load(index, setup)
    await node.save(index, placement_for(setup))
    (key,) = await index.command("KEYS", "*experts*")
    entry = await index.command("HGET", key, "decode-0")
    await index.command("HSET", key, "decode-1", entry)  # of another node
    assert await kept(index, setup, "decode-1") is None
    assert "wrote it for this place" in caplog.text


async def test_without_redis_or_a_name_only_this_process_keeps_it(
    server: Server, index: KVIndex, setup: EngineSetup, caplog: pytest.LogCaptureFixture
) -> None:
    nameless, placement = KeptExperts("decode-host-7", is_named=False), placement_for(setup)
    assert await nameless.load(index, setup) is None
    assert "node.id is not set" in await nameless.save(index, placement)
    assert await nameless.load(index, setup) == placement
    assert await index.command("KEYS", "*experts*") == []
    await server.kill()
    node = KeptExperts("decode-0", is_named=True)
    assert await node.load(index, setup) is None
    assert "did not answer HGET" in caplog.text
    assert "did not answer HSET" in await node.save(index, placement)
    assert await node.load(index, setup) == placement


def test_the_placement_of_a_large_model_is_no_message_too_long() -> None:
    text = ExpertPlacement.even(61, 256, 64).to_json()
    assert len(text) > 64 << 10
    check_message(node_pb2.PlaceExpertsRequest(placement=text))
