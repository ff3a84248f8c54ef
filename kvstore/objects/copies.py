"""Bytes of objects read from elsewhere: from another store node, or from the memory of their writer."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.kvstore.objects.chunks import ChunkPlan, is_small
from moonpool.kvstore.objects.errors import PutBroken
from moonpool.kvstore.objects.put import Put
from moonpool.kvstore.objects.shelf import ObjectShelf
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import node_pb2, store_pb2
from moonpool.transfer import Peer, Region, Span, checksum


async def copy_object(
    source: RemoteStore,
    objects: ObjectShelf,
    region: Region,
    owner: bytes,
    wanted: store_pb2.OpenObject,
    *,
    surplus: bool,
) -> int:
    """Copy ``wanted`` into ``objects`` in ``region``. Returns the bytes read: 0 if it was here.

    Raises ``PutBroken``: the source does not have it, or has another chunk size. Raises ``StoreFull``,
    ``NodeUnavailable``, ``RemoteError``, ``TransferError``. Nothing of it is here then.
    """
    (opened,), chunk_nbytes, held = await source.open(owner, [wanted])
    unread = [(opened, held)]
    put_id = 0
    try:
        if opened.absent:
            raise PutBroken(f"store node {source.node_id} has no such object")
        if chunk_nbytes != objects.chunk_nbytes:
            raise PutBroken(
                f"store node {source.node_id} has chunks of {chunk_nbytes} bytes, this one of "
                f"{objects.chunk_nbytes}: use the same store_node.chunk_nbytes everywhere"
            )
        info = store_pb2.ObjectInfo()
        info.CopyFrom(opened.info)
        info.surplus = surplus
        cut = ChunkPlan.of(info, chunk_nbytes)
        data = opened.data
        if checksum(data) != opened.checksum:
            raise PutBroken(f"the copy on store node {source.node_id} is damaged")
        put_id, put = await objects.begin(owner, info, None, data)
        first = nbytes = 0
        while offsets := put.offsets:
            here = [Span(region.id, offset, cut.nbytes_of(first + i)) for i, offset in enumerate(offsets)]
            if not unread:
                unread = [await source.reopen(owner, info, first)]
            span_of = dict(enumerate(here, first)).__getitem__
            checksums = await source.read(owner, *unread.pop(), first, first + len(offsets), span_of)
            await objects.commit(put_id, checksums)
            nbytes += sum(span.nbytes for span in here)
            first += len(offsets)
        copied = objects.inventory.find(owner, info.storage)
        if copied is not None and copied.info.checksum != opened.info.checksum:
            objects.inventory.drop(copied)
            raise PutBroken(f"the copy on store node {source.node_id} has other bytes than it says")
        return nbytes + len(data)
    except BaseException:
        objects.abort(put_id)
        raise
    finally:
        source.release([opened for opened, _ in unread])


async def pull_objects(
    objects: ObjectShelf,
    source: Peer,
    region: Region,
    owner: bytes,
    wanted: Sequence[tuple[store_pb2.ObjectInfo, node_pb2.BlockSpans]],
    *,
    deadline_s: float,
) -> None:
    """Read each object that is not small from ``source``, where its chunks are in these spans, with these
    checksums. An object that needs several windows, or finds no room for all, is left out.

    One batch: otherwise the writer is told where to write, asks this node's threads to copy, and commits,
    three messages and several threads for one copy.

    Raises ``StoreError``, ``TransferError``: those left are not here, and nothing is reserved for them.
    """
    puts: dict[int, tuple[Put, Sequence[int]]] = {}
    try:
        ours: list[Span] = []
        theirs: list[Span] = []
        checksums: list[int] = []
        for info, chunks in wanted:
            plan = ChunkPlan.of(info, objects.chunk_nbytes)
            if is_small(info) or not len(chunks.region) == len(chunks.offset) == len(chunks.checksum):
                continue
            if len(chunks.offset) != plan.num_chunks or plan.num_chunks > objects.window_chunks:
                continue
            # Without a time limit: no client knows its id, and it ends with this call.
            put_id, put = await objects.begin(owner, info, None)
            if not put_id:
                continue
            puts[put_id] = put, chunks.checksum
            if len(put.offsets) < plan.num_chunks:
                objects.abort(put_id)
                del puts[put_id]
                continue
            sizes = [plan.nbytes_of(chunk) for chunk in range(plan.num_chunks)]
            ours += map(Span, [region.id] * len(sizes), put.offsets, sizes)
            theirs += map(Span, chunks.region, chunks.offset, sizes)
            checksums += chunks.checksum
        if ours:
            await source.read(ours, theirs, deadline_s=deadline_s, checksums=checksums)
        for put_id, (_, values) in list(puts.items()):
            del puts[put_id]
            await objects.commit(put_id, values)
    finally:
        # After a cancellation, too, nothing touches the slots any more.
        for put_id in puts:
            objects.abort(put_id)
