"""Conductors whose Redis is stopped or slow, or that cannot reach each other: no request waits."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from moonpool.conductor.coordination import peers
from moonpool.conductor.coordination.peers import Peers
from moonpool.conductor.core import Conductor
from moonpool.conductor.placing.node_view import Load
from moonpool.kvstore.index.redis.node_record import NodeLoad
from moonpool.runtime.config.options import ConductorOptions, IndexOptions
from tests.conductor.core_nodes import (
    LEASE_TTL_S,
    MODEL,
    PROMPT,
    Cluster,
    RedisProcess,
    ScriptedNode,
    continuation,
    redis_process,
    request,
    running,
)
from tests.conductor.faults import hangs

MOST_ADDED_S = 0.020
NUM_BLOCKS = 30  # of each decode node: ten requests of 40 + 8 tokens

Connect = Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


class Proxy:
    """A TCP port in front of a server. ``delay_s``: added each way; ``cut``: bytes are lost, both ways."""

    def __init__(self, connect: Connect) -> None:
        self.delay_s, self.cut, self.address = 0.0, False, ""
        self._connect = connect
        self._writers: list[asyncio.StreamWriter] = []
        self._pumps: set[asyncio.Task[None]] = set()

    async def start(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def close(self) -> None:
        self._server.close()
        for pump in self._pumps:
            pump.cancel()
        for writer in self._writers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        their_reader, their_writer = await self._connect()
        self._writers += [writer, their_writer]
        for source, target in ((reader, their_writer), (their_reader, writer)):
            pump = asyncio.create_task(self._pump(source, target))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        while data := await source.read(1 << 16):
            if not self.cut:
                loop.call_later(self.delay_s, target.write, data)
        loop.call_later(self.delay_s, target.close)


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> list[Proxy]:
    """A proxy in front of every conductor that starts."""
    proxies: list[Proxy] = []
    start, close = Peers.start, Peers.close

    async def start_behind_proxy(self: Peers) -> None:
        await start(self)
        host, _, port = self.address.rpartition(":")
        proxy = await Proxy(lambda: asyncio.open_connection(host, int(port))).start()
        proxies.append(proxy)
        self.address = proxy.address

    async def close_with_proxy(self: Peers) -> None:
        await close(self)
        for proxy in proxies:
            await proxy.close()

    monkeypatch.setattr(Peers, "start", start_behind_proxy)
    monkeypatch.setattr(Peers, "close", close_with_proxy)
    return proxies


@asynccontextmanager
async def two(cluster: Cluster, url: str) -> AsyncIterator[list[Conductor]]:
    """Two conductors on the Redis at ``url`` that know each other, without that of ``cluster``."""
    await cluster.conductor._deps.arbitration.peers.close()
    await cluster.conductor._other_conductors.close()
    options = IndexOptions(redis_url=url, namespace=cluster.index.namespace, lease_ttl_s=LEASE_TTL_S)
    async with contextlib.AsyncExitStack() as stack:
        every = [Conductor(MODEL, ConductorOptions(), options) for _ in range(2)]
        for conductor in every:
            stack.push_async_callback(conductor.close)
            await conductor.start()
        await cluster.until(lambda: all(meets(conductor, cluster) for conductor in every))
        yield every


def meets(conductor: Conductor, cluster: Cluster) -> bool:
    facts = conductor.cluster()
    ready = [node for node in facts["nodes"] if node["state"] == "ready"]
    return len(ready) == len(cluster.nodes) and facts["num_other_conductors"] == 1


def starved_s() -> float:
    """How long threads of this process have waited for a core, all together."""
    total_ns = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or the kernel does not tell
            total_ns += int((task / "schedstat").read_text().split()[1])
    return 1e-9 * total_ns


async def ttfts_s(every: list[Conductor], count: int = 60) -> list[float]:
    """Of requests that take turns among the conductors. Conductors and nodes are in this process: what it
    waited for a core is left out, because nobody was waited for then."""
    found = []
    for i in range(count):
        began_s, before_s = time.monotonic(), starved_s()
        async with contextlib.aclosing(every[i % len(every)].generate(request(f"r{i}"))) as stream:
            await anext(stream)
            found.append(max(time.monotonic() - began_s - (starved_s() - before_s), 0.0))
            async for _ in stream:
                pass
    return sorted(found)


def shown(found: list[float]) -> str:
    return f"p50 {1e3 * statistics.median(found):.1f} ms, p99 {1e3 * p99(found):.1f} ms"


def p99(found: list[float]) -> float:
    return found[int(0.99 * len(found))]


async def nothing_is_added(name: str, every: list[Conductor], before: list[float]) -> None:
    """TTFT is as ``before`` in one of three rounds: other work on this machine only adds."""
    added = []
    for _ in range(3):
        during = await ttfts_s(every)
        print(f"{name}: TTFT before {shown(before)}; during {shown(during)}")
        added.append(p99(during) - p99(before))
        if added[-1] <= MOST_ADDED_S:
            return
    raise AssertionError(f"{name} adds {[f'{1e3 * s:.1f} ms' for s in added]} at p99")


async def small(nodes: list[ScriptedNode], every: list[Conductor], cluster: Cluster) -> None:
    for node in nodes:
        node.load = NodeLoad(num_blocks=NUM_BLOCKS, free_blocks=NUM_BLOCKS)
        await node.announce()
    for conductor in every:
        members = conductor._deps.registry.members
        await cluster.until(lambda members=members: members["d0"].view.num_blocks == NUM_BLOCKS)
        for member in members.values():
            for _ in range(8):
                member.breaker.succeeded()  # they are warm


@pytest.fixture
def stoppable() -> AsyncIterator[RedisProcess]:
    with redis_process() as process:
        try:
            yield process
        finally:
            process.resume()


@pytest.mark.alone  # it compares times
async def test_a_stopped_redis_adds_nothing_and_conductors_still_share(
    stoppable: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        running(stoppable.url, "p0", "d0", "d1", namespace="stopped") as cluster,
        two(cluster, stoppable.url) as every,
    ):
        decodes = [cluster.nodes["d0"], cluster.nodes["d1"]]
        await small(decodes, every, cluster)
        before = await ttfts_s(every)
        stoppable.stop()
        await nothing_is_added("stopped Redis", every, before)
        # Both run on one busy loop: none is left while the machine stands still.
        monkeypatch.setattr(peers, "ANSWER_S", 30.0)
        monkeypatch.setattr(peers, "_BEAT_TIMEOUT_S", 30.0)
        loads = [c._deps.registry.members[name].load for c in every for name in ("d0", "d1")]
        await cluster.until(lambda: all(load._foreign == Load() for load in loads))
        for node in decodes:
            node.script = hangs
            node.works.clear()
        streams = [every[i % 2].generate(request(f"h{i}")) for i in range(20)]
        for stream in streams:
            await anext(stream)
        await cluster.until(lambda: len(decodes[0].works) + len(decodes[1].works) == 20)
        assert (len(decodes[0].works), len(decodes[1].works)) == (10, 10)
        stoppable.resume()
        for stream in streams:
            await stream.aclose()


@pytest.mark.alone  # it compares times
async def test_a_slow_redis_adds_nothing(stoppable: RedisProcess) -> None:
    path = stoppable.url.removeprefix("unix://")
    proxy = await Proxy(lambda: asyncio.open_unix_connection(path)).start()
    async with (
        running(stoppable.url, "p0", "d0", namespace="slow") as cluster,
        two(cluster, f"redis://{proxy.address}") as every,
    ):
        before = await ttfts_s(every)
        proxy.delay_s = 0.25  # each way
        await nothing_is_added("Redis slower by 500 ms", every, before)
        assert all(conductor.cluster()["num_other_conductors"] == 1 for conductor in every)
        proxy.delay_s = 0.0
    await proxy.close()


@pytest.mark.alone  # it compares times
@pytest.mark.parametrize("fault", ["cut", "slow"])
async def test_conductors_that_cannot_talk_serve_as_one_alone_does(
    stoppable: RedisProcess, links: list[Proxy], fault: str
) -> None:
    async with (
        running(stoppable.url, "p0", "d0", namespace="parted") as cluster,
        two(cluster, stoppable.url) as every,
    ):
        cluster.nodes["d0"].script = hangs
        held = every[0].generate(request("held"))
        await anext(held)
        theirs = every[1]._deps.registry.members["d0"].load
        await cluster.until(lambda: theirs._foreign is not None and theirs._foreign.num_blocks == 3)
        await held.aclose()
        cluster.nodes["d0"].script = lambda *_: asyncio.sleep(0)
        before = await ttfts_s(every)
        for link in links:
            link.cut, link.delay_s = fault == "cut", 0.25
        await nothing_is_added(f"conductors parted ({fault})", every, before)
        if fault == "cut":
            await cluster.until(lambda: all(c.cluster()["num_other_conductors"] == 0 for c in every))
            assert theirs._foreign is None, "heartbeats tell"
            await cluster.until(lambda: any("does not answer" in text for text in every[0].ready()[1]))
        for link in links:
            link.cut, link.delay_s = False, 0.0
        await cluster.until(lambda: all(c.cluster()["num_other_conductors"] == 1 for c in every))
        await cluster.until(lambda: theirs._foreign == Load())
        assert not any("does not answer" in sentence for sentence in every[0].ready()[1])


async def test_an_arbiter_that_leaves_during_a_booking_takes_no_request_along(
    stoppable: RedisProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "ANSWER_S", 30.0)
    asked = asyncio.Event()

    async def never(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Peers, "Book", never)
    async with (
        running(stoppable.url, "p0", "d0", namespace="leaves") as cluster,
        two(cluster, stoppable.url) as every,
    ):
        first, second = sorted(every, key=lambda conductor: conductor._deps.conductor_id)
        await cluster.until(lambda: second._deps.arbitration.peers._arbiter() is not None)
        stream = second.generate(request())
        token = asyncio.create_task(anext(stream))
        await asked.wait()
        await first._deps.arbitration.peers.close()
        async with asyncio.timeout(25):  # sooner than the arbiter would answer
            assert (await token).token_id == continuation(PROMPT, 1)[0]
        await stream.aclose()


async def test_a_defect_in_sharing_load_or_in_announcing_does_not_end_it(
    stoppable: RedisProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running(stoppable.url, "p0", "d0", namespace="defect") as cluster,
        two(cluster, stoppable.url) as every,
    ):
        one, other = every
        peers_of_one = one._deps.arbitration.peers
        report, differences = peers_of_one._report, one._other_conductors.differences
        failed = set()

        def wrong_report() -> object:
            peers_of_one._report = report
            failed.add("report")
            raise KeyError("a defect")

        def wrong_differences() -> object:
            one._other_conductors.differences = differences
            failed.add("announcements")
            raise KeyError("a defect")

        peers_of_one._report = wrong_report
        one._other_conductors.differences = wrong_differences
        await cluster.until(lambda: failed == {"report", "announcements"})
        assert caplog.text.count("KeyError: 'a defect'") == 2
        heard_s = {
            each: peer.heard_s for each in every for peer in each._deps.arbitration.peers._peers.values()
        }
        # Both go on: one tells its load by itself (the other one's reports alone would bring answers, too).
        other._deps.arbitration.peers._peers[one._deps.conductor_id].beats.cancel()
        await cluster.until(
            lambda: all(
                peer.heard_s > heard_s[each] + 0.5
                for each in every
                for peer in each._deps.arbitration.peers._peers.values()
            )
        )
        announce, num_announced = one._other_conductors._announce, []

        async def counted() -> object:
            num_announced.append(1)
            return await announce()

        one._other_conductors._announce = counted
        await cluster.until(lambda: len(num_announced) > 1)
