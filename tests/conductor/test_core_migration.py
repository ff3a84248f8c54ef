"""A request's tokens come from one decode node, then from another: in order, each once, whatever fails."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from moonpool.conductor.errors import MigrationFailed
from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.protos import node_pb2
from tests.conductor.core_nodes import (
    PROMPT,
    Broken,
    Cluster,
    RedisProcess,
    ScriptedNode,
    continuation,
    request,
    running,
)

NUM_TOKENS = 12
PAUSE = 5  # the source's token before which it waits
STOP = 8  # the first token that comes from the target


class Scene:
    """One request on ``source``, which waits before its token ``PAUSE`` until ``go_on``. ``target`` takes it
    over as of token ``STOP``."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.paused, self.go_on, self.taking, self.take = (asyncio.Event() for _ in range(4))
        for name in ("d0", "d1"):
            cluster.nodes[name].script = self._script
            cluster.nodes[name].take = self._take
        self.tokens = asyncio.create_task(cluster.generate(request(max_tokens=NUM_TOKENS)))

    async def _script(self, node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
        if work.attempt == 0 and index == PAUSE:
            self.paused.set()
            await self.go_on.wait()

    async def _take(self, decode: node_pb2.DecodeRequest) -> list[int]:
        assert decode.from_attempt == 0
        self.taking.set()
        await self.take.wait()
        return PROMPT + continuation(PROMPT, STOP)

    async def begin(self) -> asyncio.Task[object]:
        await self.paused.wait()
        run = self.cluster.conductor._deps.runs["r"]
        await self.cluster.until(lambda: run.decodes_on)  # its first tokens have arrived
        self.source = self.cluster.nodes[self.summary.decode_node]
        self.target = self.cluster.nodes["d1" if self.source.node_id == "d0" else "d0"]
        move = asyncio.create_task(self.cluster.conductor.migrate("r", self.target.node_id))
        await self.taking.wait()
        return move

    @property
    def summary(self):  # type: ignore[no-untyped-def]
        timeline = self.cluster.conductor.timeline("r")
        assert timeline is not None
        return timeline.summary


@asynccontextmanager
async def scene(redis: RedisProcess, name: str) -> AsyncIterator[Scene]:
    async with running(redis.url, "p0", "d0", "d1", namespace=name) as cluster:
        begun = Scene(cluster)
        try:
            async with asyncio.timeout(30):
                yield begun
        finally:
            begun.tokens.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await begun.tokens


def metrics() -> list[float]:
    """Moves and stays that were asked for, blocks read before and after the stop, downtimes and stages."""
    found = [core_metrics.migrations.labels("asked", outcome) for outcome in ("moved", "stayed")]
    found += [core_metrics.migrated_blocks.labels(kind) for kind in ("running", "stopped")]
    histograms = (core_metrics.migration_downtime_s, core_metrics.migration_stages)
    counts = [sum(bucket.get() for bucket in one._buckets) for one in histograms]
    return [one._value.get() for one in found] + counts


async def test_tokens_of_the_target_wait_for_those_of_the_source(redis: RedisProcess) -> None:
    before = metrics()
    async with scene(redis, "order") as it:
        move = await it.begin()
        it.take.set()
        # The target has sent all its tokens before the source's are there.
        await it.cluster.until(lambda: not it.target._tasks)
        assert not move.done()
        (told,) = it.cluster.conductor.cluster()["migrations"]
        assert [told[name] for name in ("request_id", "source", "target", "cause")] == [
            *("r", it.source.node_id, it.target.node_id, "asked")
        ]
        it.go_on.set()
        assert await it.tokens == continuation(PROMPT, NUM_TOKENS)
        await move
        assert it.cluster.conductor.cluster()["migrations"] == []
        assert [after - one for after, one in zip(metrics(), before, strict=True)] == [1, 0, 1, 0, 1, 1]
        assert it.summary.decode_node == it.target.node_id
        await it.cluster.until(lambda: ("r", 0) in it.source.cancelled)
        assert "migrated" in it.cluster.names("r")
        assert "retry" not in it.cluster.names("r")


@pytest.mark.parametrize("state", ["waiting", "left alone"])
async def test_a_move_that_is_asked_for_needs_free_blocks_only(redis: RedisProcess, state: str) -> None:
    """Though others wait there, perhaps for the next step, or new requests do not go there."""
    async with scene(redis, state.replace(" ", "-")) as it:
        it.take.set()
        await it.paused.wait()
        run = it.cluster.conductor._deps.runs["r"]
        await it.cluster.until(lambda: run.decodes_on)
        name = "d1" if it.summary.decode_node == "d0" else "d0"
        target, member = it.cluster.nodes[name], it.cluster.conductor._deps.registry.members[name]
        if state == "waiting":
            target.load = replace(target.load, num_waiting=1)
            await target.announce()
            await it.cluster.until(lambda: member.view.num_waiting == 1)
        else:
            member.breaker.lost()
            assert member.view not in it.cluster.conductor._deps.registry.fleet("decode")
        move = asyncio.create_task(it.cluster.conductor.migrate("r", ""))
        await asyncio.wait(
            (move, taking := asyncio.create_task(it.taking.wait())), return_when="FIRST_COMPLETED"
        )
        taking.cancel()
        it.go_on.set()
        assert await it.tokens == continuation(PROMPT, NUM_TOKENS)
        assert (await move).target == name


async def test_a_source_that_went_on_meanwhile_does_no_harm(redis: RedisProcess) -> None:
    async with scene(redis, "both") as it:
        move = await it.begin()
        it.go_on.set()
        assert await it.tokens == continuation(PROMPT, NUM_TOKENS)
        with pytest.raises(MigrationFailed):
            await move
        await it.cluster.until(lambda: ("r", 1) in it.target.cancelled)


@pytest.mark.parametrize("fault", ["dies", "refuses"])
async def test_a_target_that_fails_leaves_the_request_where_it_was(redis: RedisProcess, fault: str) -> None:
    before = metrics()
    async with scene(redis, f"target-{fault}") as it:

        async def refuses(decode: node_pb2.DecodeRequest) -> list[int]:
            it.taking.set()
            it.target.tell(
                decode.conductor_id,
                node_pb2.TokenOut(
                    request_id="r", attempt=1, finish_reason=node_pb2.FINISH_ERROR, error="no room"
                ),
            )
            await asyncio.Event().wait()
            return []

        if fault == "refuses":
            it.cluster.nodes["d0"].take = it.cluster.nodes["d1"].take = refuses
        move = await it.begin()
        if fault != "refuses":
            await it.target.die()
        with pytest.raises(MigrationFailed):
            await move
        it.go_on.set()
        assert await it.tokens == continuation(PROMPT, NUM_TOKENS)
        assert it.summary.decode_node == it.source.node_id
        assert "stayed" in it.cluster.names("r")
        assert "retry" not in it.cluster.names("r")
    assert [after - one for after, one in zip(metrics(), before, strict=True)] == [0, 1, 0, 0, 0, 0]


async def test_a_source_that_dies_before_its_last_tokens_arrive(redis: RedisProcess) -> None:
    """The target continues after tokens that nobody has: they are computed again."""
    async with scene(redis, "source") as it:
        move = await it.begin()
        it.take.set()
        await it.cluster.until(lambda: not it.target._tasks)
        await it.source.die()
        assert await it.tokens == continuation(PROMPT, NUM_TOKENS)
        with pytest.raises(MigrationFailed):
            await move
        assert "retry" in it.cluster.names("r")


async def test_a_target_that_dies_after_the_switch(redis: RedisProcess) -> None:
    async with scene(redis, "late") as it:
        move = await it.begin()

        async def dies(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            if work.attempt == 1 and index == STOP + 2:
                # Before, the source would go on.
                await it.cluster.until(lambda: "migrated" in it.cluster.names("r"))
                await node.die()

        it.target.script = dies
        it.take.set()
        it.go_on.set()
        assert await it.tokens == continuation(PROMPT, NUM_TOKENS)
        await asyncio.wait((move,))
        assert it.cluster.names("r").count("retry") == 1


async def test_a_target_that_breaks_after_the_switch(redis: RedisProcess) -> None:
    async with scene(redis, "broken") as it:
        move = await it.begin()

        async def breaks(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            if work.attempt == 1 and index == STOP:
                raise Broken("out of luck")

        it.target.script = breaks
        it.take.set()
        it.go_on.set()
        assert await it.tokens == continuation(PROMPT, NUM_TOKENS)
        await asyncio.wait((move,))


async def test_a_client_that_goes_away_ends_both(redis: RedisProcess) -> None:
    async with scene(redis, "gone") as it:
        move = await it.begin()
        it.tokens.cancel()
        with pytest.raises(MigrationFailed):
            await move
        await it.cluster.until(lambda: ("r", 0) in it.source.cancelled)
        await it.cluster.until(lambda: ("r", 1) in it.target.cancelled)
        loads = [node["load"]["own_decodes"] for node in it.cluster.conductor.cluster()["nodes"]]
        assert not any(loads)


async def test_a_node_that_drains_hands_its_requests_on(redis: RedisProcess) -> None:
    async with scene(redis, "drain") as it:
        it.take.set()
        await it.paused.wait()
        source = it.cluster.nodes[it.summary.decode_node]
        source.state = "draining"
        await source.announce()
        await it.taking.wait()
        target = it.cluster.nodes["d1" if source.node_id == "d0" else "d0"]
        await it.cluster.until(lambda: not target._tasks)  # else the source might end first
        it.go_on.set()
        assert await it.tokens == continuation(PROMPT, NUM_TOKENS)
        await it.cluster.until(lambda: "migrated" in it.cluster.names("r"))
        assert it.summary.decode_node != source.node_id
