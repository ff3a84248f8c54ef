"""Laws of the mirror and the publisher, against a real Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeLoad, NodeRecord
from tests.kvstore.nodes import FakeNode, chain, key, next_batch
from tests.kvstore.redis_servers import Server, until
from tests.processes import stop

# A lease that does not lapse while it is renewed, however busy the machine is.
LONG_S = 30.0
# For the tests in which leases lapse.
TTL_S = 1.0


class Watcher:
    """Counts who joined and who left."""

    def __init__(self, index: KVIndex, lease_ttl_s: float = LONG_S) -> None:
        self.ahead_s = 0.0  # of its clock
        self.joined: list[tuple[str, int]] = []
        self.left: list[tuple[str, int, str]] = []
        self.news: list[str] = []
        self.mirror = IndexMirror(
            index,
            lease_ttl_s=lease_ttl_s,
            on_joined=self._joined,
            on_left=self._left,
            on_status=self.news.append,
            clock=lambda: time.monotonic() + self.ahead_s,
            tick_s=0.1,
        )

    def _joined(self, record: NodeRecord) -> None:
        self.joined.append((record.node_id, record.epoch))

    def _left(self, record: NodeRecord, reason: str) -> None:
        self.left.append((record.node_id, record.epoch, reason))


@pytest.fixture
async def watcher(index: KVIndex) -> AsyncIterator[Watcher]:
    async with watching(Watcher(index)) as watcher:
        yield watcher


@pytest.fixture
async def impatient(index: KVIndex) -> AsyncIterator[Watcher]:
    """One that believes after ``TTL_S`` that a lease has lapsed."""
    async with watching(Watcher(index, TTL_S)) as watcher:
        yield watcher


@asynccontextmanager
async def watching(watcher: Watcher) -> AsyncIterator[Watcher]:
    await watcher.mirror.start()
    yield watcher
    watcher.mirror._copy.blocks.check_integrity()
    await watcher.mirror.close()


@pytest.fixture
async def nodes(index: KVIndex) -> AsyncIterator[dict[str, FakeNode]]:
    nodes = {name: FakeNode(index, name, lease_ttl_s=LONG_S) for name in "ab"}
    for node in nodes.values():
        await node.start()
    yield nodes
    for node in nodes.values():
        await node.publisher.close()


async def said(nodes: dict[str, FakeNode], mirror: IndexMirror) -> None:
    for node in nodes.values():
        await node.settled()
    await mirror.caught_up()


async def test_what_nodes_say_is_what_the_mirror_finds(
    watcher: Watcher, nodes: dict[str, FakeNode], index: KVIndex
) -> None:
    nodes["a"].hold(100)
    nodes["b"].hold(30, tier=Tier.HOST)
    await said(nodes, watcher.mirror)
    assert watcher.mirror.longest_prefix(chain(128)) == {"a": 100, "b": 30}
    assert watcher.mirror.tier_of("b", key(0)) is Tier.HOST
    nodes["a"].hold(0)
    nodes["b"].hold(31)
    await said(nodes, watcher.mirror)
    assert watcher.mirror.longest_prefix(chain(128)) == {"b": 31}
    assert watcher.mirror.tier_of("b", key(0)) is Tier.POOL
    assert [watcher.mirror.num_blocks_of(name) for name in "abc"] == [0, 31, 0]
    late = IndexMirror(index, lease_ttl_s=TTL_S)
    await late.start()
    assert late.longest_prefix(chain(128)) == {"b": 31}
    await late.close()


async def test_a_node_is_seen_joining_changing_its_state_and_gone(watcher: Watcher, index: KVIndex) -> None:
    node = await FakeNode(index, "a").start()
    await watcher.mirror.caught_up()
    assert watcher.joined == [("a", 1)]
    node.record = replace(node.record, state="draining", load=NodeLoad(num_running=2))
    await node.settled()
    await watcher.mirror.caught_up()
    assert watcher.mirror.nodes == {"a": node.record}
    await node.publisher.close()
    await until(gone(watcher, "a"))
    assert watcher.left == [("a", 1, "left")]
    assert watcher.mirror.nodes == {}


async def test_a_killed_node_is_dropped_with_all_its_blocks_when_its_lease_ends(
    impatient: Watcher, nodes: dict[str, FakeNode], index: KVIndex
) -> None:
    nodes["a"].hold(10)
    nodes["b"].hold(5)
    await said(nodes, impatient.mirror)
    await nodes["a"].kill()
    await index.heartbeat(nodes["a"].record, TTL_S)  # its last one
    await until(gone(impatient, "a"))
    assert impatient.left == [("a", 1, "lapsed")]
    assert impatient.mirror.longest_prefix(chain(10)) == {"b": 5}
    assert (await index.snapshot()).keys() == {"b"}


async def test_a_new_life_of_a_node_has_none_of_the_old_ones_blocks(
    watcher: Watcher, nodes: dict[str, FakeNode], index: KVIndex
) -> None:
    nodes["a"].hold(10)
    await said(nodes, watcher.mirror)
    reborn = await FakeNode(index, "a", epoch=2).start()
    await watcher.mirror.caught_up()
    assert watcher.mirror.longest_prefix(chain(10)) == {}
    assert watcher.left == [("a", 1, "restarted")]
    reborn.hold(3)
    nodes["a"].hold(20)  # the old life does not know yet
    await until(lambda: asyncio.sleep(0.001, nodes["a"].publisher.superseded))
    await reborn.settled()
    await watcher.mirror.caught_up()
    assert watcher.mirror.longest_prefix(chain(20)) == {"a": 3}
    await nodes.pop("a").kill()
    await reborn.publisher.close()


async def test_a_redis_killed_and_started_empty_loses_nothing(
    watcher: Watcher, nodes: dict[str, FakeNode], server: Server, index: KVIndex
) -> None:
    nodes["a"].hold(3000)
    nodes["b"].hold(10)
    await said(nodes, watcher.mirror)
    await server.kill()
    await until(lambda: asyncio.sleep(0.001, not watcher.mirror.connected))
    nodes["a"].hold(2500)
    nodes["b"].hold(20)
    await until(lambda: asyncio.sleep(0.001, not any(node.publisher.connected for node in nodes.values())))
    assert watcher.mirror.longest_prefix(chain(4000)) == {"a": 3000, "b": 10}
    watcher.ahead_s = LONG_S  # the lease runs out while Redis is away
    await server.start()
    fewest = 3000
    while watcher.mirror.longest_prefix(chain(4000)) != {"a": 2500, "b": 20}:
        fewest = min(fewest, watcher.mirror.longest_prefix(chain(4000)).get("a", 0))
        await asyncio.sleep(0)
    assert fewest >= 2500
    await said(nodes, watcher.mirror)
    assert watcher.left == []
    assert await index.snapshot() == {name: node.held for name, node in nodes.items()}
    watcher.mirror._copy.blocks.check_integrity()


async def test_a_hole_in_the_stream_keeps_nodes_that_are_about_to_register_again(
    watcher: Watcher, nodes: dict[str, FakeNode], server: Server, index: KVIndex
) -> None:
    nodes["a"].hold(10)
    nodes["b"].hold(10)
    await said(nodes, watcher.mirror)
    # A number that the next Redis does not reach.
    watcher.mirror._follower._behind = (1 << 30, 0.0)
    await server.kill()
    await nodes.pop("a").kill()
    await server.start()
    nodes["b"].publisher.announce()
    await until(lambda: asyncio.sleep(0.001, watcher.mirror._copy.missing.keys() == {"a"}))
    await said(nodes, watcher.mirror)
    assert not any("(gap)" in one for one in watcher.news)
    await index.command("HINCRBY", index._meta, "seq", 1)
    nodes["b"].hold(20)
    await until(lambda: asyncio.sleep(0.001, watcher.mirror.longest_prefix(chain(20)).get("b") == 20))
    assert any("(gap)" in one for one in watcher.news)
    assert watcher.left == []
    assert watcher.mirror._copy.missing.keys() == {"a"}


async def test_a_node_that_dies_while_redis_is_away_is_dropped_afterwards(
    watcher: Watcher, nodes: dict[str, FakeNode], server: Server
) -> None:
    nodes["a"].hold(10)
    nodes["b"].hold(10)
    await said(nodes, watcher.mirror)
    await server.kill()
    await nodes["a"].kill()
    await server.start()
    nodes["b"].publisher.announce()
    await until(lambda: asyncio.sleep(0.001, watcher.mirror._copy.missing.keys() == {"a"}))
    watcher.ahead_s = 2 * LONG_S  # as long as a node has to come back
    await until(gone(watcher, "a"))
    assert watcher.left == [("a", 1, "lapsed")]
    assert watcher.mirror.longest_prefix(chain(10)) == {"b": 10}


async def test_a_flushed_index_is_noticed_and_published_anew(
    watcher: Watcher, nodes: dict[str, FakeNode], redis: Any
) -> None:
    nodes["a"].hold(10)
    await said(nodes, watcher.mirror)
    # The new stream begins below the number the mirror waits for, and its connection does not break.
    await redis.flushall()
    nodes["a"].hold(11)
    await said(nodes, watcher.mirror)
    assert watcher.mirror.longest_prefix(chain(20)) == {"a": 11}
    assert watcher.left == []


@pytest.mark.parametrize("next_call", ["heartbeat", "batch"])
async def test_a_redis_that_comes_back_with_an_older_history_is_told_what_it_lost(
    watcher: Watcher, nodes: dict[str, FakeNode], server: Server, index: KVIndex, redis: Any, next_call: str
) -> None:
    node = nodes["a"]
    node.hold(5)
    await said(nodes, watcher.mirror)
    await redis.save()
    node.hold(2)
    await node.settled()
    node.hold(7, 3)
    await said(nodes, watcher.mirror)
    before = await redis.hget("{test}:meta", "instance")
    await server.kill()
    await server.start()
    assert before and await redis.hget("{test}:meta", "instance") == before
    # No call was under way: the next one opens a connection as if nothing had happened.
    if next_call == "batch":
        node.hold(3, 4)
        await node.publisher.flush()
    else:
        await node.settled()
    assert await index.snapshot() == {"a": node.held, "b": {}}
    await said(nodes, watcher.mirror)
    # A mirror that took other events of the same numbers for the next ones doubts the node, and reads it.
    await until(lambda: asyncio.sleep(0.001, watcher.mirror.held_by("a") == node.held))
    assert await watcher.mirror.check() == 0
    assert watcher.left == []


async def test_an_older_history_is_noticed_after_a_drop_too(
    watcher: Watcher, nodes: dict[str, FakeNode], server: Server, index: KVIndex, redis: Any
) -> None:
    """A log that starts anew must not end before the one that Redis goes back to."""
    node = nodes["a"]
    for count in range(1, 10):
        node.hold(count)
        await node.settled()
    await said(nodes, watcher.mirror)
    await redis.save()
    epoch = watcher.mirror.nodes["a"].epoch
    await redis.zadd("{test}:leases", {"a": 1})
    assert await index.drop("a", epoch)
    await said(nodes, watcher.mirror)  # it registers again, with the same epoch
    await server.kill()
    await server.start()
    await said(nodes, watcher.mirror)
    assert await index.snapshot() == {"a": node.held, "b": {}}
    await until(lambda: asyncio.sleep(0.001, watcher.mirror.held_by("a") == node.held))


async def test_no_node_is_dropped_because_redis_stood_still(
    impatient: Watcher, nodes: dict[str, FakeNode], server: Server
) -> None:
    assert server.process is not None
    for node in nodes.values():
        node.publisher._ttl_s = TTL_S
    nodes["a"].hold(10)
    await said(nodes, impatient.mirror)
    await asyncio.sleep(TTL_S)  # long enough for the mirror to believe lapsed leases
    stop(server.process.pid)
    await asyncio.sleep(2 * TTL_S)
    server.process.send_signal(18)
    await said(nodes, impatient.mirror)
    assert impatient.left == []
    assert impatient.mirror.longest_prefix(chain(10)) == {"a": 10}


async def test_a_hole_in_the_stream_makes_the_mirror_read_everything(
    watcher: Watcher, nodes: dict[str, FakeNode], index: KVIndex, redis: Any
) -> None:
    nodes["a"].hold(10)
    await said(nodes, watcher.mirror)
    await nodes["b"].kill()
    await watcher.mirror.caught_up()
    # A change that reached the log, and was trimmed from the stream before the mirror came to it.
    async with redis.pipeline(transaction=True) as pipe:
        pipe.rpush(index._own("a")[1], next_batch(index, "a", b"\x00\x01\x00\x00\x00" + key(10)))
        pipe.hincrby(index._meta, "seq", 1)
        await pipe.execute()
    await index.publish("a", 1, [(key(11), Tier.POOL)])
    await watcher.mirror.caught_up()
    assert watcher.mirror.longest_prefix(chain(20)) == {"a": 12}
    found, over = watcher.news
    assert found.startswith("everything is read again (gap): events ")
    assert over.startswith("in step with Redis again: 12 blocks of ")


async def test_another_history_under_the_same_numbers_is_noticed(
    watcher: Watcher, index: KVIndex, redis: Any
) -> None:
    await index.register(NodeRecord("a", 1, "prefill"), 5)
    await index.publish("a", 1, [(key(0), Tier.POOL)])
    await watcher.mirror.caught_up()
    # As after a fail-over to a replica that lacked the last change, and has gone on with another one.
    seq = (await index.watch()).seq
    index._registered["a"].position -= 1
    theirs = next_batch(index, "a", b"\x00\x01\x00\x00\x00" + key(0, 7))
    async with redis.pipeline(transaction=True) as pipe:
        pipe.delete(index._events, index._own("a")[1])
        pipe.rpush(index._own("a")[1], theirs)
        pipe.xadd(index._events, {"k": "B", "n": "a", "e": "1", "d": theirs}, id=f"{seq}-0")
        pipe.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await pipe.execute()
    await until(lambda: asyncio.sleep(0, watcher.mirror.longest_prefix([key(0, 7)]) == {"a": 1}))
    await watcher.mirror.caught_up()
    assert watcher.mirror.longest_prefix([key(0)]) == {}


async def test_a_broken_entry_is_skipped(watcher: Watcher, index: KVIndex) -> None:
    await index.register(NodeRecord("a", 1, "prefill"), 5)
    await index.publish_changes("a", 1, b"\x00\xff\xff\xff\xff")
    await index.publish("a", 1, [(key(0), Tier.POOL)])
    await watcher.mirror.caught_up()
    assert watcher.mirror.longest_prefix(chain(2)) == {"a": 1}


async def test_a_publisher_without_redis_lets_its_node_start(server: Server, index: KVIndex) -> None:
    await server.kill()
    node = FakeNode(index, "a")
    node.hold(3)
    await node.start()
    assert not node.publisher.connected
    await server.start()
    await node.settled()
    assert await index.snapshot() == {"a": node.held}
    await node.publisher.close()


@pytest.mark.parametrize("method", ["heartbeat", "register"])
async def test_a_record_announced_while_another_is_on_its_way_is_published(
    index: KVIndex, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called, goes_on = asyncio.Event(), asyncio.Event()
    call = getattr(index, method)

    async def slow(*arguments: Any, **options: Any) -> Any:
        called.set()
        await goes_on.wait()
        return await call(*arguments, **options)

    node = FakeNode(index, "a", lease_ttl_s=LONG_S)
    monkeypatch.setattr(index, method, slow)
    starting = asyncio.create_task(node.start())
    if method == "heartbeat":
        await starting
        node.publisher.announce()
    await called.wait()
    node.record = replace(node.record, state="draining")
    node.publisher.announce()
    goes_on.set()
    await starting
    await node.publisher.flush()
    assert (await index.nodes())["a"].state == "draining"
    await node.publisher.close()


@pytest.mark.slow
async def test_a_log_stays_in_proportion_to_what_the_node_holds(index: KVIndex, redis: Any) -> None:
    node = await FakeNode(index, "a", lease_ttl_s=30).start()
    node.hold(500)
    for turn in range(300):
        node.hold(turn % 7 * 100, number=1)
        await node.publisher.flush()
    assert await index.snapshot() == {"a": node.held}
    page = await index.read_log("a", 0, 1 << 20)
    assert page is not None
    assert sum(map(len, page.batches)) < 16 * (1.5 * len(node.held) + 10_000)
    assert page.base > 10
    await node.publisher.close()


def gone(watcher: Watcher, node_id: str) -> Any:
    return lambda: asyncio.sleep(0.001, node_id not in watcher.mirror.nodes)


# ---------------------------------------------------------------------- the mirror equals the index

NAMES = st.sampled_from("abc")
STEPS = st.one_of(
    st.tuples(st.just("hold"), NAMES, st.integers(0, 40), st.integers(0, 2), st.sampled_from(Tier)),
    st.tuples(st.sampled_from(["restart", "lapse", "leave", "settle"]), NAMES),
    st.tuples(st.sampled_from(["flush", "disconnect", "hole", "mirror", "breathe"])),
)


class Cluster:
    """Nodes, a mirror, and everything that may happen to them."""

    def __init__(self, index: KVIndex, redis: Any) -> None:
        self.index, self.redis = index, redis
        self.nodes: dict[str, FakeNode] = {}
        self.epoch = 0
        self.mirror = IndexMirror(index, lease_ttl_s=30, tick_s=0.02)

    async def step(self, name: str, *args: Any) -> None:
        await getattr(self, name)(*args)

    async def node(self, name: str) -> FakeNode:
        if name not in self.nodes:
            await self.restart(name)
        return self.nodes[name]

    async def hold(self, name: str, length: int, number: int, tier: Tier) -> None:
        (await self.node(name)).hold(length, number, tier)

    async def restart(self, name: str) -> None:
        if name in self.nodes:
            await self.nodes[name].kill()
        self.epoch += 1
        self.nodes[name] = await FakeNode(self.index, name, self.epoch, lease_ttl_s=30).start()

    async def lapse(self, name: str) -> None:
        if name in self.nodes:
            node = self.nodes.pop(name)
            await node.kill()
            await self.index.drop(name, node.record.epoch, only_lapsed=False)

    async def leave(self, name: str) -> None:
        if name in self.nodes:
            await self.nodes.pop(name).publisher.close()

    async def settle(self, name: str) -> None:
        await (await self.node(name)).settled()

    async def flush(self) -> None:
        await self.redis.flushall()

    async def disconnect(self) -> None:
        await self.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    async def hole(self) -> None:
        await self.redis.hincrby(self.index._meta, "seq", 1)

    async def mirror_(self) -> None:
        await self.mirror.close()
        self.mirror = IndexMirror(self.index, lease_ttl_s=30, tick_s=0.02)
        await self.mirror.start()

    async def breathe(self) -> None:
        await asyncio.sleep(0.002)

    async def check(self) -> None:
        for node in self.nodes.values():
            await node.settled()
        await self.mirror.caught_up()
        held = await self.index.snapshot()
        assert held == {name: node.held for name, node in self.nodes.items()}
        assert self.mirror.nodes.keys() - self.mirror._copy.missing.keys() == held.keys()
        for number in range(3):
            asked = chain(45, number)
            brute = {
                name: next(i for i, k in enumerate(asked) if k not in keys) for name, keys in held.items()
            }
            found = self.mirror.longest_prefix(asked)
            assert {name: n for name, n in found.items() if name in held} == {
                n: c for n, c in brute.items() if c
            }
        for name, keys in held.items():
            assert self.mirror.held_by(name) == keys
            assert all(self.mirror.tier_of(name, k) is tier for k, tier in keys.items())
        self.mirror._copy.blocks.check_integrity()


@pytest.mark.slow
async def test_the_mirror_equals_the_index(server: Server) -> None:
    """After any history of changes, restarts, lapses, lost data and lost connections."""
    loop = asyncio.get_running_loop()

    async def run(steps: list[tuple[Any, ...]]) -> None:
        client = connect(server.url)
        await client.flushall()
        cluster = Cluster(KVIndex(client, "test"), client)
        await cluster.mirror.start()
        try:
            for name, *args in steps:
                await cluster.step("mirror_" if name == "mirror" else name, *args)
            await asyncio.wait_for(cluster.check(), 20)
        finally:
            for node in cluster.nodes.values():
                await node.kill()
            await cluster.mirror.close()
            await client.aclose()

    @settings(max_examples=60, deadline=None)
    @given(st.lists(STEPS, max_size=25))
    def law(steps: list[tuple[Any, ...]]) -> None:
        asyncio.run_coroutine_threadsafe(run(steps), loop).result()

    await asyncio.to_thread(law)


@pytest.mark.parametrize("where", ["apply", "sweep"])
async def test_a_defect_in_following_does_not_end_it(
    watcher: Watcher,
    nodes: dict[str, FakeNode],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
) -> None:
    """An exception nobody thought of, once: the mirror reads everything again and says what happened."""
    await said(nodes, watcher.mirror)
    copy = watcher.mirror._copy
    owner, name = (copy, "apply") if where == "apply" else (copy.blocks, "sweep")
    right = getattr(owner, name)

    def wrong(*arguments: Any) -> Any:
        monkeypatch.setattr(owner, name, right)
        raise KeyError("a defect")

    monkeypatch.setattr(owner, name, wrong)
    nodes["a"].hold(10)
    await nodes["a"].publisher.close()  # what it held is swept
    await nodes["a"].start()
    await until(lambda: asyncio.sleep(0.001, "KeyError: 'a defect'" in caplog.text))
    nodes["a"].hold(20)
    await said(nodes, watcher.mirror)
    assert watcher.mirror.longest_prefix(chain(32)) == {"a": 20}
    await until(lambda: asyncio.sleep(0.001, watcher.mirror.connected))
