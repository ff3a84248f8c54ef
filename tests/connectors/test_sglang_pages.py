"""Pages of plain host memory, moved to a store node and back as SGLang's backend does it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
import torch

from moonpool.connectors.errors import StoreAway, Unsupported
from moonpool.connectors.sglang import page_objects
from moonpool.connectors.sglang.host_pages import HostPages
from moonpool.connectors.sglang.identity import engine_prefix, pool_name
from moonpool.connectors.sglang.page_objects import remove_all
from moonpool.connectors.sglang.page_pool import PagePool
from moonpool.connectors.sglang.prefix_hits import PoolHits, leading, restorable
from moonpool.connectors.sglang.settings import check_version, read_settings
from moonpool.connectors.sglang.store_thread import StoreThread
from moonpool.kvstore.client.errors import NoNodeAnswered
from moonpool.kvstore.client.store import StoreClient
from moonpool.runtime.errors import ConfigError, MoonpoolError
from tests.processes import stop
from tests.store_node.conftest import StoreCluster, running

URL = "redis://127.0.0.1:1"
LAYERS, PAGES, PAGE_SIZE, ROW = 6, 24, 32, 512


_RANK_FACTS = (
    "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank", "dcp_size",
)  # fmt: skip


class PlainPool:
    """K and V of [tokens, ROW] bytes a layer, laid out as SGLang's pools are."""

    def __init__(self, layout: str, num_pages: int = PAGES) -> None:
        self.layout, self.page_size = layout, PAGE_SIZE
        layers_first = layout == "layer_first"
        shape = (LAYERS, num_pages * PAGE_SIZE) if layers_first else (num_pages * PAGE_SIZE, LAYERS)
        self.kv_buffer = torch.randint(0, 256, (2, *shape, ROW), dtype=torch.uint8)
        self._tokens = num_pages * PAGE_SIZE

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        run = PAGE_SIZE * ROW
        starts = [int(each) for each in indices[:: self.page_size]]
        base, half = self.kv_buffer.data_ptr(), self._tokens * LAYERS * ROW
        if self.layout == "layer_first":
            addresses = [
                base + (layer * self._tokens + start) * ROW + kv * half
                for start in starts
                for layer in range(LAYERS)
                for kv in (0, 1)
            ]
            return addresses, [run] * len(addresses)
        addresses = [base + start * LAYERS * ROW + kv * half for start in starts for kv in (0, 1)]
        return addresses, [run * LAYERS] * len(addresses)

    def page(self, number: int) -> torch.Tensor:
        tokens = slice(number * PAGE_SIZE, (number + 1) * PAGE_SIZE)
        if self.layout == "layer_first":
            return self.kv_buffer[:, :, tokens].clone()
        return self.kv_buffer[:, tokens].clone()


def indices_of(pages: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE_SIZE, (page + 1) * PAGE_SIZE) for page in pages])


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_runs_are_the_bytes_of_the_page(layout: str) -> None:
    pool = PlainPool(layout)
    pages = HostPages(pool)
    assert pages.page_nbytes == 2 * LAYERS * PAGE_SIZE * ROW
    for number, runs in zip([7, 3], pages.runs(indices_of([7, 3]), 2), strict=True):
        found = torch.cat([torch.from_numpy(run) for run in runs])
        if layout == "layer_first":  # K and V alternate
            found = found.view(LAYERS, 2, -1).transpose(0, 1)
        assert torch.equal(found.reshape(-1), pool.page(number).reshape(-1))
    with pytest.raises(ValueError, match="for 3 pages"):
        pages.runs(indices_of([7, 3]), 3)


def test_memory_that_is_not_the_pools_is_never_touched() -> None:
    pool = PlainPool("page_first")
    pages = HostPages(pool)
    with pytest.raises(ValueError, match="not its own"):
        pages.runs(indices_of([PAGES]), 1)
    pool.kv_buffer = pool.kv_buffer[:, :PAGE_SIZE]
    with pytest.raises(Unsupported, match="must be contiguous"):
        HostPages(pool)


def test_prefixes_that_every_pool_can_restore() -> None:
    every, gap = [True] * 5, [True, True, False, True, True]
    assert [leading(each) for each in (every, gap, [])] == [5, 2, 0]
    assert restorable(5, {}) == ([1, 2, 3, 4, 5], {})
    assert restorable(5, {"side": PoolHits(gap)}) == ([1, 2], {"side": 2})
    # Windows of two pages end at 2 and 5 only.
    assert restorable(5, {"window": PoolHits(gap, 2)}) == ([1, 2, 5], {"window": 5})
    both = {"window": PoolHits(gap, 2), "side": PoolHits([True, False, True, True, True])}
    assert restorable(5, both) == ([1], {"window": 5, "side": 1})
    assert restorable(0, {"side": PoolHits([])}) == ([], {"side": 0})


def test_long_prefixes_take_time_in_proportion() -> None:
    here = [True] * 20_000
    began_s = time.process_time()
    lengths, longest = restorable(len(here), {"a": PoolHits(here), "b": PoolHits(here, num_trailing=5_000)})
    assert time.process_time() - began_s < 1
    assert (len(lengths), longest) == (20_000, {"a": 20_000, "b": 20_000})


def test_whatever_forms_the_bytes_is_in_the_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    base = {"model_path": str(tmp_path), "revision": None, "kv_cache_dtype": "auto"}
    prefix = engine_prefix(SimpleNamespace(**base), "0.5.23")
    assert engine_prefix(SimpleNamespace(**base), "0.5.23") == prefix
    (tmp_path / "a.safetensors").write_bytes(b"weights")
    changed = [engine_prefix(SimpleNamespace(**base), "0.5.23")]
    changed += [engine_prefix(SimpleNamespace(**base), "0.5.24")]
    changed += [engine_prefix(SimpleNamespace(**base | {"kv_cache_dtype": "fp8_e5m2"}), "0.5.23")]
    assert len({prefix, *changed}) == 4

    pool, rank = PlainPool("page_first"), dict.fromkeys(_RANK_FACTS, 0)

    def name(*, is_replicated: bool, **changes: int) -> str:
        return pool_name("kv", pool, SimpleNamespace(**rank | changes), is_replicated=is_replicated)

    for fact in _RANK_FACTS:
        same = name(is_replicated=False) == name(is_replicated=False, **{fact: 1})
        assert not same, fact
        same = name(is_replicated=True) == name(is_replicated=True, **{fact: 1})
        assert same == fact.startswith("tp_"), f"one copy for all ranks: {fact}"


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "url is missing"),
        ({"url": "http://127.0.0.1:8000"}, "must be that of Redis"),
        ({"url": URL, "uri": 1}, "uri is not known; known are url, tenant, config, set, and SGLang's"),
        ({"url": URL, "set": ["transfer.deadlines=1"]}, "transfer.deadlines"),
    ],
)
def test_settings_refused(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_settings(extra)


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONPOOL_TENANT_SALT", "secret")
    settings = read_settings({"url": URL, "tenant": "t", "backend_name": "m", "interface_v1": 1})
    assert (settings.config.index.redis_url, settings.zero_copy) == (URL, True)
    assert (settings.tenant.name, settings.tenant.salt) == ("t", "secret")
    check_version("0.5.23")
    with pytest.raises(Unsupported, match=r"0\.4\.1 is not supported; these versions are: 0\.5\.23"):
        check_version("0.4.1")


@contextmanager
def store_at(url: str, deadline_s: float = 20.0) -> Iterator[StoreThread]:
    store = StoreThread(read_settings({"url": url, "set": [f"transfer.deadline_s={deadline_s}"]}))
    try:
        yield store
    finally:
        store.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[StoreCluster]:
    async with running() as cluster:
        # Room for 16 pages of two runs, two chunks each.
        await cluster.start("a", store_node__object_nbytes="4MiB")
        yield cluster


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
async def test_pages_come_back(cluster: StoreCluster, layout: str) -> None:
    def work() -> None:
        with store_at(cluster.url) as store:
            mine, other = PlainPool(layout), PlainPool(layout)
            ours = PagePool(HostPages(mine), f"x/{layout}", store)
            theirs = PagePool(HostPages(other), f"x/{layout}", store)
            assert ours.is_zero_copy == (layout == "page_first")
            keys = [f"page-{number}" for number in range(4)]
            assert theirs.exists(keys) == [False] * 4
            assert ours.put(keys[:3], indices_of([5, 1, 8])) == 3
            assert ours.put(keys[:3], indices_of([5, 1, 8])) == 0, "they are there already"
            assert theirs.exists(keys) == [True, True, True, False]
            untouched = other.page(0)
            assert theirs.get(keys, indices_of([2, 3, 4, 6])) == [True, True, True, False]
            for source, target in zip((5, 1, 8), (2, 3, 4), strict=True):
                assert torch.equal(mine.page(source), other.page(target))
            assert torch.equal(untouched, other.page(0))
            assert PagePool(HostPages(mine), "y", store).exists(keys) == [False] * 4

    await asyncio.to_thread(work)


@pytest.mark.asyncio(loop_scope="module")
async def test_the_end_of_a_prefix_is_evicted_first(cluster: StoreCluster) -> None:
    def work() -> None:
        with store_at(cluster.url) as store:
            pool = PagePool(HostPages(PlainPool("page_first")), "evicted", store)
            chain = [f"chain-{number}" for number in range(12)]
            pool.put(chain, indices_of(list(range(12))))
            pool.put([f"other-{number}" for number in range(8)], indices_of(list(range(8))))
            deadline_s = time.monotonic() + 60
            while all(found := pool.exists(chain)):  # until its node has told Redis
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            assert any(found)
            assert leading(found) == sum(found), "what is left is a prefix"

    await asyncio.to_thread(work)


@pytest.mark.asyncio(loop_scope="module")
async def test_pages_are_removed_in_parts_or_an_error_says_that_some_are_left(
    cluster: StoreCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_objects, "_REMOVED_AT_ONCE", 3)
    keys = [f"page-{number}" for number in range(4)]

    def clear(store: StoreThread) -> None:
        deadline_s = time.monotonic() + 60
        while True:
            try:
                remove_all("removed/", store)
                return
            except (MoonpoolError, TimeoutError):
                assert time.monotonic() < deadline_s
                time.sleep(0.1)

    def work() -> None:
        with store_at(cluster.url, deadline_s=2.0) as store:
            pool = PagePool(HostPages(PlainPool("page_first")), "removed", store)
            kept = PagePool(HostPages(PlainPool("page_first")), "kept", store)
            for each in (pool, kept):
                each.put(keys, indices_of([0, 1, 2, 3]))
            stop(cluster.redis.process.pid)
            try:
                with pytest.raises((MoonpoolError, TimeoutError)):
                    remove_all("removed/", store)
            finally:
                cluster.redis.process.send_signal(signal.SIGCONT)
            clear(store)
            assert pool.exists(keys) == [False] * 4
            assert kept.exists(keys) == [True] * 4
            assert remove_all("removed/", store) == 0

    await asyncio.to_thread(work)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_long_call_that_fails_does_not_pause_the_store_as_long(cluster: StoreCluster) -> None:
    now_s = [0.0]

    async def fails(client: StoreClient) -> None:
        now_s[0] += 300.0
        raise NoNodeAnswered(["a"])

    async def succeeds(client: StoreClient) -> str:
        return "asked"

    def work() -> None:
        store = StoreThread(read_settings({"url": cluster.url}), clock=lambda: now_s[0])
        try:
            with pytest.raises(NoNodeAnswered):
                store.call(fails, 600.0)
            with pytest.raises(StoreAway):
                store.call(succeeds)
            now_s[0] += 10.1
            assert store.call(succeeds) == "asked"
        finally:
            store.close()

    await asyncio.to_thread(work)


async def test_a_store_that_is_gone_is_not_asked_each_time() -> None:
    async with running() as cluster:
        await cluster.start("a")

        def before(store: StoreThread) -> PagePool:
            pool = PagePool(HostPages(PlainPool("page_first")), "gone", store)
            assert pool.put(["one"], indices_of([0])) == 1
            return pool

        with store_at(cluster.url, deadline_s=2.0) as store:
            pool = await asyncio.to_thread(before, store)
            await cluster.kill("a")
            with pytest.raises((NoNodeAnswered, TimeoutError)):
                await asyncio.to_thread(pool.exists, ["one"])
            with pytest.raises(StoreAway, match="asked again in"):
                await asyncio.to_thread(pool.exists, ["one"])
        with pytest.raises(StoreAway):  # it is closed
            store.call(lambda client: client.batch_exists(["one"]))
