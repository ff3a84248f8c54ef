"""The node reads the bytes of puts from the memory of their writer, in one batch.

Otherwise the writer is told where to write, asks this node's threads to copy, and commits: three messages and
several threads for what is one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.kvstore.objects.chunks import ChunkPlan, is_small
from moonpool.kvstore.objects.put import Put
from moonpool.kvstore.objects.shelf import ObjectShelf
from moonpool.protos import node_pb2, store_pb2
from moonpool.transfer import Peer, Region, Span


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
