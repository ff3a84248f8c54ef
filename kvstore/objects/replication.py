"""Copies of objects from other store nodes, window by window."""

from __future__ import annotations

from moonpool.kvstore.objects.chunks import ChunkPlan
from moonpool.kvstore.objects.errors import PutBroken
from moonpool.kvstore.objects.shelf import ObjectShelf
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import store_pb2
from moonpool.transfer import Region, Span, checksum


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
