"""What fails around an engine costs it hits, and nothing else: its blocks are right or are computed."""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from prometheus_client import REGISTRY

from moonpool.connectors import service_thread
from moonpool.connectors.vllm.engine_node import EngineNode
from moonpool.connectors.vllm.lookup.prefix_index import PrefixIndex
from moonpool.connectors.vllm.pages import PageReading
from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.blocks.vllm_keys import key_of
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.kvstore.objects.errors import OtherLayout
from moonpool.runtime.config.options import IndexOptions
from moonpool.runtime.service.vital import VITAL
from tests.connectors.conftest import Make, Redis
from tests.connectors.small_engine import BLOCK, Peer, Request, SmallEngine, until
from tests.processes import stop
from tests.small_disk import mounted


def prompt(name: str, num_blocks: int = 6) -> Request:
    return Request(name, num_blocks * BLOCK + 1)


def count(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


@pytest.fixture(scope="module")
def peer(redis: Redis) -> Iterator[Peer]:
    made = Peer(redis.url, "peer")
    yield made
    made.close()


def test_blocks_are_loaded_from_own_memory_and_from_a_peer(engine: Make, peer: Peer) -> None:
    one = engine("one")
    assert one.serve(prompt("a")) == 0
    one.until_hit("a", 6)
    assert one.reports()[0]["tier"] == "host"
    peer.hold("b", 6)
    one.until_hit("b", 6)
    report = one.reports()[0]
    assert (report["tier"], report["source"], report["loaded_tokens"]) == ("peer", "peer", 6 * BLOCK)


def test_a_wrong_checksum_is_counted_and_its_prompt_computed(engine: Make) -> None:
    one = engine("one")
    one.until_hit("c", 6)
    one.break_blocks()
    blocks, loads = "moonpool_store_corrupt_blocks_total", "moonpool_connector_loads_total"
    before = count(blocks, tier="host"), count(loads, end="corrupt")
    assert one.serve(prompt("c-2")) == 0
    assert count(blocks, tier="host") == before[0] + 1
    assert count(loads, end="corrupt") == before[1] + 1
    one.until_hit("c", 6)  # it was saved again


def test_wrong_bytes_of_a_peer_are_not_tried_for_ever(engine: Make, redis: Redis) -> None:
    broken = Peer(redis.url, "broken")
    try:
        one = engine("one")
        broken.hold("d", 6)
        until(lambda: one.scheduler.match(prompt("d-1"), 0))
        broken.break_blocks()
        assert one.serve(prompt("d-2")) == 0
        report = one.reports()[0]
        assert (report["reason"], report["num_failed"]) == ("failed", 2)
    finally:
        broken.close()


def test_a_peer_killed_in_a_load_is_a_miss(engine: Make, redis: Redis) -> None:
    dies = Peer(redis.url, "dies")
    try:
        one = engine("one", "transfer.deadline_s=2")
        dies.hold("e", 6)
        until(lambda: one.scheduler.match(prompt("e-1"), 0))
        stop(dies.pid)
        request = prompt("e-2")
        assert one.begin(request), "the load waits for the peer"
        dies.kill()
        one.end_load(request)
        assert one.finish(request) == 0
        one.until_hit("e", 6)
    finally:
        dies.close()


def test_a_full_disk_costs_only_its_blocks(
    engine: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with mounted(tmp_path, "4m") as disk:
        sets = (
            f"store.ssd.path={disk}",
            "store.ssd.capacity_nbytes=8MiB",
            "store.write_policy=write-through",
        )
        one = engine("small-disk", *sets)
        number = 0
        while "no room for another segment" not in caplog.text:
            assert number < 400, "the disk has room for more than there is"
            number += 1
            one.serve(Request(f"f{number}", 6 * BLOCK + 1, f"f{number}"))
        one.until_hit(f"f{number}", 6)
        one.until_hit("g", 6)
        one.close()


def test_blocks_of_another_layout_on_disk_are_in_nobodys_way(engine: Make, tmp_path: Path) -> None:
    """An engine that is started again with another dtype on the same disk."""
    disk = f"store.ssd.path={tmp_path}"
    before = engine("restarted", disk, dtype="float32")
    before.until_hit("p", 6)
    before.close()
    after = engine("restarted", disk, dtype="bfloat16")
    after.until_hit("p", 6)
    after.close()
    again = engine("restarted", disk, dtype="float32")
    until(lambda: again.serve(prompt("p-2")) == 6 * BLOCK)
    assert again.reports()[0]["tier"] == "ssd"


def test_a_node_that_cannot_start_costs_only_the_cache(
    engine: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_thread, "RESTART_S", 0.05)
    path = tmp_path / "ssd"
    path.write_text("a file, where a folder should be")
    one = engine("no-folder", f"store.ssd.path={path}")
    for number in range(20):
        assert one.serve(prompt(f"c{number}")) == 0
    said = [record.message for record in caplog.records if "blocks were not kept" in record.message]
    assert len(said) == 1, "once a minute"
    until(lambda: "the KV store of this engine failed; it is started again in" in caplog.text)
    path.unlink()
    one.until_hit("d", 6)


def test_a_background_task_that_fails_ends_the_cache_not_the_engine(
    engine: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_thread, "RESTART_S", 0.05)
    breaks = threading.Event()
    sweep = EngineNode._sweep

    async def broken(self: EngineNode) -> None:
        while breaks.is_set():
            raise RuntimeError("a defect")
        await sweep(self)

    monkeypatch.setattr(EngineNode, "_sweep", broken)
    breaks.set()
    one = engine("defect")
    until(lambda: one.node is None)
    assert one.serve(prompt("e")) == 0
    breaks.clear()
    one.until_hit("e", 6)


def test_an_index_that_fails_is_a_miss(
    engine: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine("index")
    one.until_hit("f", 6)

    def broken(*_: object) -> None:
        raise RuntimeError("a defect")

    monkeypatch.setattr("moonpool.connectors.vllm.lookup.prefix_index._holders", broken)
    for number in range(20):
        assert one.serve(prompt(f"f-x{number}")) == 0
    assert len(re.findall("the index was not asked", caplog.text)) == 1, "once a minute"
    monkeypatch.undo()
    one.until_hit("f", 6)


def test_a_dead_redis_costs_only_what_is_new(tmp_path: Path) -> None:
    redis = Redis(tmp_path)
    other = Peer(redis.url, "other")
    one = SmallEngine(redis.url, "one")
    try:
        other.hold("h", 6)
        one.until_hit("h", 6)
        other.hold("i", 6)
        until(lambda: one.scheduler.match(prompt("i-1"), 0))
        redis.process.kill()
        redis.process.wait()
        assert one.serve(prompt("h-2")) == 6 * BLOCK, "what is known is loaded: from here,"
        assert one.serve(prompt("i-2")) == 6 * BLOCK, "and from the other engine"
        assert one.serve(prompt("j")) == 0
        (tmp_path / "redis.sock").unlink()
        redis = Redis(tmp_path)
        other.hold("j", 6)
        one.until_hit("j", 6)
    finally:
        one.close()
        other.close()
        redis.process.kill()
        redis.process.wait()


def test_an_abort_while_loading_leaks_nothing(engine: Make, peer: Peer) -> None:
    one = engine("one")
    peer.hold("k", 6)
    until(lambda: one.scheduler.match(prompt("k-1"), 0))
    one.scheduler.finished("k-1")
    for number in range(10):
        request = prompt(f"k-a{number}")
        assert one.begin(request)
        one.scheduler.finished(request.request_id)  # vLLM keeps its blocks until the load has ended
        assert one.await_load().loaded == {request.request_id}
    assert not one.scheduler._tracked and not one.worker._loads
    store = one.node._kv.store
    until(lambda: store.stats.num_leases == 0)
    assert all(tier.num_pinned == 0 for tier in store.stats.tiers)
    assert len(store.host) == 6
    store.check_integrity()


def test_pages_that_may_have_changed_while_they_were_read_are_not_kept(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine("slow-copy")
    monkeypatch.setattr("moonpool.connectors.vllm.worker._FENCE_S", 0.01)
    goes_on = threading.Event()
    copy_out = one.node._pages.copy_out

    def slow(blocks: list[int], spans: list[object]) -> None:
        goes_on.wait()
        copy_out(blocks, spans)

    monkeypatch.setattr(one.node._pages, "copy_out", slow)
    one.serve(prompt("j"))  # the engine does not wait for it
    for layer in one.layers.values():
        layer.fill_(7)
    goes_on.set()
    until(lambda: not one.worker._node._calls)
    assert not len(one.node._kv.store.host), "what was read must not be kept"
    assert one.serve(prompt("j-2")) == 0, "its bytes are another request's"


def test_reading_that_ends_in_time_counts() -> None:
    reading = PageReading()
    assert reading.end() and reading.wait(0) and reading.end()
    late = PageReading()
    assert not late.wait(0)
    assert not late.end()


def test_reading_that_ends_while_the_engine_gives_up_is_kept_and_not_counted_or_the_reverse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, is_kept = PageReading(), []
    wait = reading._ended.wait

    def wait_and_end(timeout_s: float) -> bool:
        found = wait(timeout_s)
        is_kept.append(reading.end())  # its thread: between the timeout and the engine's next line
        return found

    monkeypatch.setattr(reading._ended, "wait", wait_and_end)
    assert [reading.wait(0)] == is_kept


def test_an_engine_keeps_its_layout_while_it_saves(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine("saves")
    begun, goes_on = threading.Event(), threading.Event()
    copy_out = one.node._pages.copy_out

    def slow(blocks: list[int], spans: list[object]) -> None:
        begun.set()
        goes_on.wait()
        copy_out(blocks, spans)

    monkeypatch.setattr(one.node._pages, "copy_out", slow)
    monkeypatch.setattr("moonpool.connectors.vllm.worker._FENCE_S", 60.0)
    serving = threading.Thread(target=one.serve, args=(prompt("l"),))
    serving.start()
    try:
        assert begun.wait(60)
        layout = OpaqueLayout(4096, b"another layout16")
        node = one.worker._node
        asking = None if node is None else node.submit(lambda node: node._kv.open_layout(layout))
        assert asking is not None
        with pytest.raises(OtherLayout):
            asking.result(60)
    finally:
        goes_on.set()
        serving.join()
    one.until_hit("l", 6)


@pytest.mark.alone  # the files in /dev/shm are everybody's
def test_close_leaves_nothing(redis: Redis) -> None:
    def memfds() -> set[str]:
        links = (os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists())
        return {link for link in links if "memfd" in link}

    SmallEngine(redis.url, "warm-up").close()
    me, shm = psutil.Process(), set(os.listdir("/dev/shm"))
    before = {thread.name for thread in threading.enumerate()}, memfds(), {p.pid for p in me.children()}
    one = SmallEngine(redis.url, "closes")
    one.until_hit("k", 6)
    one.close()
    until(lambda: {p.pid for p in me.children()} <= before[2] and memfds() <= before[1])
    assert {name for name in (t.name for t in threading.enumerate()) if "moonpool" in name} <= before[0]
    assert set(os.listdir("/dev/shm")) <= shm


def test_a_load_under_way_fails_with_its_node(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine("ends")
    one.until_hit("l", 6)
    begun = threading.Event()

    async def never(self: EngineNode, load: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(service_thread, "RESTART_S", 0.05)
    with monkeypatch.context() as patched:
        patched.setattr(EngineNode, "load", never)
        request = prompt("l-2")
        assert one.begin(request)
        assert begun.wait(30)
        loop, facts = (
            one.node._loop,
            {"message": "a defect", "exception": RuntimeError("a defect"), VITAL: True},
        )
        loop.call_soon_threadsafe(loop.call_exception_handler, facts)
        assert one.await_load().failed == {request.request_id}
    assert one.finish(request) == 0
    one.until_hit("l", 6)


def test_what_an_engine_of_another_layout_has_is_said(engine: Make, redis: Redis) -> None:
    wide = Peer(redis.url, "wide", dtype="float32")
    try:
        one = engine("narrow", dtype="bfloat16")
        wide.hold("o", 6)

        def reason() -> tuple[str, str]:
            assert one.serve(prompt("o-1")) == 0
            return one.reports()[0]["reason"], one.reports()[0]["detail"]

        assert reason() == ("layout", "wide")
    finally:
        wide.close()


def test_a_record_whose_layout_cannot_be_read_hides_no_other(
    redis: Redis, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = bytes(range(16))

    async def register() -> None:
        async with connect(redis.url) as client:
            index = KVIndex(client, "layouts")
            for number in range(8):
                await index.register(NodeRecord(f"odd{number}", 1, "store", layout=f"odd {number}"), 60.0)
            await index.register(NodeRecord("other", 1, "store", layout=theirs.hex()), 60.0)
            await index.publish("other", 1, [(key_of(theirs, b"held"), Tier.HOST)])

    asyncio.run(register())
    index = PrefixIndex(IndexOptions(redis.url, namespace="layouts"), answer_s=60.0)
    try:
        until(lambda: index._mirror is not None and len(index._mirror.nodes) == 9)
        assert index.in_other_layout(b"own", lambda layout: key_of(layout, b"not held")) == ""
        assert "the index was not asked" not in caplog.text
        until(lambda: index.in_other_layout(b"own", lambda layout: key_of(layout, b"held")) == "other")
    finally:
        index.close()
