"""One memory has one store at a time, whatever is read into it at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.grants.held import HeldGrant, holders_clock
from moonpool.kvstore.objects.errors import LayoutRefused, OtherLayout
from moonpool.kvstore.store import TieredStore
from moonpool.kvstore.store_node.kv_shelf import KvShelf
from moonpool.kvstore.store_node.shelves import MAX_FOLDERS, ShelfFactory
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import (
    Config,
    SsdTierOptions,
    StoreOptions,
    TransferOptions,
)
from moonpool.transfer import Region, TransferAgent, checksum

SIZE = 1 << 16
LAYOUTS = [OpaqueLayout(nbytes, bytes([number]) * 16) for number, nbytes in ((1, 4096), (2, 8192), (3, 4096))]
KEYS = [BlockKey(bytes([number]) * 16) for number in range(4)]


class Source:
    """A node with blocks, and leases on them that are given when the test says so."""

    def __init__(self, agent: TransferAgent) -> None:
        self.agent = agent
        self.region = agent.allocate(SIZE, "theirs")
        self.region.array[:] = np.random.default_rng(7).integers(0, 256, SIZE, np.uint8)
        self.asked = asyncio.Semaphore(0)
        self.may_read = asyncio.Event()

    def address(self, layout: OpaqueLayout) -> node_pb2.KvAddress:
        return node_pb2.KvAddress(
            node_id="source",
            agent=self.agent.describe().pack(),
            layout_fingerprint=layout.fingerprint,
            block_nbytes=layout.block_nbytes,
        )

    @asynccontextmanager
    async def hold(
        self, source: Any, wanted: Sequence[BlockKey]
    ) -> AsyncIterator[tuple[node_pb2.BlockSpans, HeldGrant]]:
        self.asked.release()
        await self.may_read.wait()
        nbytes = source.block_nbytes
        offsets = [KEYS.index(key) * nbytes for key in wanted]
        blocks = node_pb2.BlockSpans(
            region=[self.region.id] * len(offsets),
            offset=offsets,
            checksum=[checksum(self.region.buffer[at : at + nbytes]) for at in offsets],
        )
        yield blocks, HeldGrant("the source", holders_clock(), 60.0)


class Opened:
    """Makes stores over one memory, and sees to it that only one of them is open."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.num_open = self.num_made = 0

    async def __call__(self, layout: OpaqueLayout) -> TieredStore:
        store = TieredStore(layout, StoreOptions(), self.region.array)
        close = store.close

        async def counted() -> None:
            await close()
            await asyncio.sleep(0)
            self.num_open -= 1

        store.close = counted  # type: ignore[method-assign]
        self.num_open += 1
        self.num_made += 1
        assert self.num_open == 1, "two stores over one memory"
        await asyncio.sleep(0)
        return store


@asynccontextmanager
async def shelf_and_source() -> AsyncIterator[tuple[KvShelf, Opened, Source]]:
    options = TransferOptions(transports=("local",))
    async with (
        await TransferAgent.start(options, agent_id="node", epoch=1) as agent,
        await TransferAgent.start(options, agent_id="source", epoch=1) as other,
    ):
        region, source = agent.allocate(SIZE, "ours"), Source(other)
        opened = Opened(region)
        shelf = KvShelf("node", region, opened, agent, source, deadline_s=10.0)  # type: ignore[arg-type]
        yield shelf, opened, source
        check(shelf, source)
        await shelf.close(1.0)


def check(shelf: KvShelf, source: Source) -> None:
    """What is held is what the source has."""
    if shelf.store is None:
        return
    shelf.store.check_integrity()
    nbytes = shelf.store.layout.block_nbytes
    for key, _ in shelf.store.blocks():
        slot, at = shelf.store.host.slot_of(key), KEYS.index(key) * nbytes
        assert slot is not None
        assert bytes(shelf.store.host.bytes_of(slot)) == bytes(source.region.array[at : at + nbytes])


async def test_a_read_of_one_layout_keeps_another_from_taking_its_memory() -> None:
    async with shelf_and_source() as (shelf, opened, source):
        first = asyncio.create_task(shelf.replicate(source.address(LAYOUTS[0]), KEYS))
        await source.asked.acquire()
        # It has no block yet, but is about to write into the memory.
        with pytest.raises(OtherLayout, match=LAYOUTS[0].fingerprint.hex()):
            await shelf.replicate(source.address(LAYOUTS[1]), KEYS)
        source.may_read.set()
        assert (await first).num_read == len(KEYS)
        assert opened.num_made == 1


async def test_a_node_does_not_take_the_memory_back_for_its_own_layout_during_a_read() -> None:
    async with shelf_and_source() as (shelf, opened, source):
        first = asyncio.create_task(shelf.replicate(source.address(LAYOUTS[0]), KEYS))
        await source.asked.acquire()
        with pytest.raises(OtherLayout, match=LAYOUTS[0].fingerprint.hex()):
            await shelf.open_layout(LAYOUTS[1])
        source.may_read.set()
        assert (await first).num_read == len(KEYS)
        assert opened.num_made == 1


async def test_a_request_that_is_refused_keeps_nobody_from_writing() -> None:
    async with shelf_and_source() as (shelf, opened, source):
        source.may_read.set()
        assert (await shelf.replicate(source.address(LAYOUTS[0]), KEYS)).num_read == len(KEYS)
        refused = asyncio.create_task(shelf.replicate(source.address(LAYOUTS[1]), KEYS))
        await asyncio.sleep(0)  # it has begun
        async with shelf.writing(LAYOUTS[0]) as store:
            assert len(list(store.blocks())) == len(KEYS)
        with pytest.raises(OtherLayout, match=LAYOUTS[0].fingerprint.hex()):
            await refused
        assert opened.num_made == 1


async def test_an_empty_store_changes_its_layout_once_nobody_uses_it() -> None:
    async with shelf_and_source() as (shelf, _, source):
        first = asyncio.create_task(shelf.replicate(source.address(LAYOUTS[0]), KEYS))
        await source.asked.acquire()
        first.cancel()
        await asyncio.wait((first,))
        source.may_read.set()
        assert (await shelf.replicate(source.address(LAYOUTS[1]), KEYS)).num_read == len(KEYS)


async def test_a_change_that_fails_leaves_no_store_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async with shelf_and_source() as (shelf, opened, source):

        async def fail(_: TieredStore) -> None:
            raise OSError("no disk")

        with monkeypatch.context() as patch:
            patch.setattr(TieredStore, "start", fail)
            with pytest.raises(OSError, match="no disk"):
                await shelf.open_layout(LAYOUTS[0])
        assert (shelf.store, shelf.layout, opened.num_open) == (None, None, 0)
        source.may_read.set()
        assert (await shelf.replicate(source.address(LAYOUTS[0]), KEYS)).num_read == len(KEYS)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4), st.integers(0, 12)), min_size=2, max_size=6))
def test_any_mixture_of_reads_and_cancellations(calls: list[tuple[int, int, int]]) -> None:
    """(layout, number of blocks, loop turns after which it is cancelled; 12: never) of calls at once."""

    async def run() -> None:
        async with shelf_and_source() as (shelf, _, source):
            source.may_read.set()
            tasks = []
            for layout, num_blocks, _ in calls:
                call = shelf.replicate(source.address(LAYOUTS[layout]), KEYS[:num_blocks])
                tasks.append(asyncio.create_task(call))
            for turn in range(12):
                await asyncio.sleep(0)
                for task, (_, _, cancelled_at) in zip(tasks, calls, strict=True):
                    if cancelled_at == turn:
                        task.cancel()
            for task in tasks:
                with suppress(OtherLayout, asyncio.CancelledError):
                    await task
            check(shelf, source)
            # Whatever happened, the layout that is here can be read.
            layout = shelf.layout or LAYOUTS[0]
            done = await shelf.replicate(source.address(layout), KEYS)
            assert done.num_blocks == len(KEYS)

    asyncio.run(run())


async def test_callers_cannot_make_folders_and_slots_without_end(tmp_path: Path) -> None:
    ssd = SsdTierOptions(path=str(tmp_path), capacity_nbytes=1 << 20)
    factory = ShelfFactory.of(Config(store=StoreOptions(ssd=ssd)), "store-0")
    async with await TransferAgent.start(
        TransferOptions(transports=("local",)), agent_id="store-0", epoch=1
    ) as agent:
        region = agent.allocate(8 << 20, "blocks")

        async def keep(number: int, nbytes: int = 4096) -> None:
            layout = OpaqueLayout(nbytes, number.to_bytes(16, "big"))
            store = await factory.kv(layout, region, lambda *_: None)
            await store.start()
            await store.close()

        for number in range(MAX_FOLDERS):
            await keep(number)
        with pytest.raises(LayoutRefused, match="KV blocks of 8 layouts, the most: remove the folders"):
            await keep(100)
        await keep(0)  # one that is there
        assert factory.directory is not None
        assert len(list(factory.directory.iterdir())) == MAX_FOLDERS
        with pytest.raises(LayoutRefused, match=r"blocks of 1 bytes would make 8388608 slots"):
            await keep(101, 1)
