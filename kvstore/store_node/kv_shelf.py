"""The KV blocks of a store node: copies read from other nodes, and leased to them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.blocks.shards import BlockShard, SplitLayout
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.objects import metrics
from moonpool.kvstore.objects.errors import OtherLayout
from moonpool.kvstore.remote.peer_leases import RemoteLeases
from moonpool.kvstore.remote.rank_reader import AgentReader
from moonpool.kvstore.remote.sharded_reader import RankTarget, ShardedReader, shard_of
from moonpool.kvstore.store import Lease, TieredStore
from moonpool.protos import node_pb2
from moonpool.transfer import AgentDescriptor, Region, Span, TransferAgent, checksum

log = logging.getLogger(__name__)

StoreMaker = Callable[[OpaqueLayout], Awaitable[TieredStore]]


class KvShelf:
    """Blocks of one layout: that of the first node they are read from, or of the SSD. One event loop."""

    def __init__(
        self,
        node_id: str,
        region: Region,
        make_store: StoreMaker,
        agent: TransferAgent,
        leases: RemoteLeases,
        *,
        deadline_s: float,
    ) -> None:
        """``make_store`` opens the store of a layout over ``region``'s memory; it is started here."""
        self.layout: OpaqueLayout | None = None
        self.store: TieredStore | None = None
        self._node_id = node_id
        self._region = region
        self._make_store = make_store
        self._agent = agent
        self._leases = leases
        self._deadline_s = deadline_s
        self._opening = asyncio.Lock()
        self._num_writers = 0  # of blocks that are not visible yet
        self._being_written: OpaqueLayout | None = None  # the layout of all of them
        self._num_leasing = 0

    async def open_layout(self, layout: OpaqueLayout) -> TieredStore:
        """Use this layout from now on. Raises ``OtherLayout``: there are blocks of another, or some are being
        written; nothing has changed. After a cancellation the change goes on: a store that is half closed or
        half open could not be used."""
        if self.store is None or self.layout != layout:
            await asyncio.shield(asyncio.create_task(self._change(layout), name="KV layout"))
        assert self.store is not None
        return self.store

    async def _change(self, layout: OpaqueLayout) -> None:
        async with self._opening:
            if self.layout == layout:
                return
            if self._being_written is not None and self._being_written != layout:
                raise self._other(layout, self._being_written)
            self._check_replaceable(layout)
            if self.store is not None:
                store, self.store, self.layout = self.store, None, None
                await store.close()
            store = await self._make_store(layout)
            try:
                await store.start()
            except BaseException:
                await store.close()
                raise
            self.layout, self.store = layout, store
        log.info("keeps KV blocks of layout %s, %d bytes each", layout.fingerprint.hex(), layout.block_nbytes)

    def _check_replaceable(self, layout: OpaqueLayout) -> None:
        """Raises ``OtherLayout``: the open store is of another layout and has blocks or leases."""
        if self.store is None or self.layout is None or self.layout == layout:
            return
        # A block may be gone and still be read.
        in_use = self._num_leasing or len(self.store.grants)
        if in_use or next(iter(self.store.blocks()), None) is not None:
            raise self._other(layout, self.layout)

    def _other(self, wanted: OpaqueLayout, used: OpaqueLayout) -> OtherLayout:
        return OtherLayout(self._node_id, wanted.fingerprint.hex(), used.fingerprint.hex())

    @asynccontextmanager
    async def writing(self, layout: OpaqueLayout) -> AsyncIterator[TieredStore]:
        """The store of this layout, which stays open inside the block, so that blocks can be added. Raises
        ``OtherLayout``."""
        if self._being_written is not None and self._being_written != layout:
            raise self._other(layout, self._being_written)
        self._check_replaceable(layout)  # first: what will be refused must not keep others from writing
        self._being_written = layout
        self._num_writers += 1
        try:
            yield await self.open_layout(layout)
        finally:
            self._num_writers -= 1
            if not self._num_writers:
                self._being_written = None

    async def close(self, flush_s: float) -> None:
        """Write to disk what is only in memory, in at most ``flush_s``, and end."""
        async with self._opening:
            if self.store is not None:
                await self.store.flush(flush_s)
                await self.store.close()

    def sweep(self) -> None:
        if self.store is not None:
            self.store.sweep()

    def blocks(self) -> Iterator[tuple[BlockKey, Tier]]:
        return iter(()) if self.store is None else iter(self.store.blocks())

    async def lease(
        self, keys: Sequence[BlockKey], ttl_s: float, owner: str
    ) -> tuple[Lease, node_pb2.BlockSpans]:
        """Pin the longest prefix that can be read from memory; the id is 0 if there is none."""
        store = self.store
        if store is None:
            return Lease(0, 0.0, []), node_pb2.BlockSpans()
        store.use(keys)
        self._num_leasing += 1
        try:
            lease = await store.pin(keys, ttl_s, owner)
        finally:
            self._num_leasing -= 1
        nbytes = store.layout.block_nbytes
        return lease, node_pb2.BlockSpans(
            region=[self._region.id] * len(lease.blocks),
            offset=[block.slot * nbytes for block in lease.blocks],
            checksum=[block.checksum for block in lease.blocks],
        )

    def release(self, lease_id: int) -> None:
        """End a lease. An unknown one is no error."""
        if self.store is not None:
            self.store.release(lease_id)

    async def replicate(
        self, source: node_pb2.KvAddress, keys: Sequence[BlockKey], *, surplus: bool = False
    ) -> node_pb2.ReplicateReply:
        """Read the missing blocks of a chain from ``source``, straight into their slots, as whole blocks
        however ranks there shard them. Fewer are read if the source has fewer or there is less room.

        ``surplus``: the blocks read are evicted first once they are unused.

        Raises ``OtherLayout``: blocks of another layout are here; ``LayoutError``: the ranks' shards make no
        whole blocks; ``NodeUnavailable``, ``RemoteError``, ``TransferError``: no block was added.
        """
        started_s = time.monotonic()
        async with self.writing(OpaqueLayout(source.block_nbytes, source.layout_fingerprint)) as store:
            num_read = await self._copy(store, source, keys, surplus)
            num_blocks = len(store.match(keys))
        nbytes = num_read * source.block_nbytes
        metrics.COPIED_BYTES.labels("kv").inc(nbytes)
        return node_pb2.ReplicateReply(
            num_blocks=num_blocks, num_read=num_read, nbytes=nbytes, seconds=time.monotonic() - started_s
        )

    async def _copy(
        self, store: TieredStore, source: node_pb2.KvAddress, keys: Sequence[BlockKey], surplus: bool
    ) -> int:
        """Returns how many blocks were read."""
        num_held, num_read = len(store.match(keys)), 0
        async with self._leases.hold(source, keys[num_held:]) as (blocks, held):
            end = num_held + len(blocks.offset)
            if end > num_held:
                parent = keys[num_held - 1] if num_held else None
                with store.reserve(keys[num_held:end], parent=parent) as reservation:
                    with held.within(self._deadline_s) as limit_s:
                        num_read = await self._read(
                            source, blocks, reservation.offsets, reservation.num_held, limit_s
                        )
                    reservation.commit(list(blocks.checksum[reservation.num_held :][:num_read]))
                    if surplus:
                        first = num_held + reservation.num_held
                        copies = keys[first : first + num_read]
                        store.host.surplus.mark([key for key in copies if key in store.host])
        return num_read

    async def _read(
        self,
        source: node_pb2.KvAddress,
        blocks: node_pb2.BlockSpans,
        offsets: Sequence[int],
        first: int,
        deadline_s: float,
    ) -> int:
        """Fill our slots at ``offsets`` with ``blocks[first:]``; returns how many there was room for."""
        if not offsets:
            return 0
        nbytes, end = source.block_nbytes, first + len(offsets)
        regions, begins = blocks.region[first:end], blocks.offset[first:end]
        promised = list(blocks.checksum[first:end])
        if source.ranks:
            reader = self._reader(source)
            slots = [offset // nbytes for offset in offsets]
            await reader.read(source, regions, begins, slots, deadline_s=deadline_s, checksums=promised)
            return len(offsets)
        peer = await self._agent.connect(AgentDescriptor.unpack(source.agent))
        await peer.read(
            [Span(self._region.id, offset, nbytes) for offset in offsets],
            [Span(*start, nbytes) for start in zip(regions, begins, strict=True)],
            deadline_s=deadline_s,
            checksums=promised,
        )
        return len(offsets)

    def _reader(self, source: node_pb2.KvAddress) -> ShardedReader:
        """A reader of blocks that ranks of ``source`` have in shards. Raises ``LayoutError``."""
        layout = SplitLayout.of(source.block_nbytes, [shard_of(rank) for rank in source.ranks])
        target = RankTarget(BlockShard.whole(layout), AgentReader(self._agent, self._region))
        return ShardedReader(layout, [target], self._hash)

    async def _hash(self, slots: Sequence[int]) -> list[int]:
        """The checksums of slots that are not visible yet."""
        assert self.layout is not None
        memory, nbytes = self._region.array, self.layout.block_nbytes

        def digests() -> list[int]:
            return [checksum(memory[slot * nbytes : (slot + 1) * nbytes].data) for slot in slots]

        return await asyncio.to_thread(digests)
