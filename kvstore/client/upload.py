"""Objects written to one store node: reserve, write, commit, until each is complete."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.kvstore.client.memory import BorrowedBuffer
from moonpool.kvstore.grants.held import HeldGrant
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import node_pb2, store_pb2
from moonpool.runtime.errors import MoonpoolError
from moonpool.transfer import Span, checksum

log = logging.getLogger(__name__)

# Checksums of more bytes than this are computed on a thread.
_INLINE_NBYTES = 1 << 20
# Objects of more chunks are written window by window.
_MOST_CHUNKS = 256


@dataclass(frozen=True, slots=True)
class Upload:
    """``buffer``: the object's bytes; None: it is small and they are ``data``."""

    info: store_pb2.ObjectInfo
    buffer: BorrowedBuffer | None
    data: bytes = b""


@dataclass(slots=True)
class _Sent:
    upload: Upload
    number: int  # in the batch
    first: int = 0  # chunk that is to be written next


async def send(node: RemoteStore, owner: bytes, batch: Sequence[Upload]) -> list[str]:
    """Write the bytes of every object to ``node``; returns the reason of each refusal, "" where they are
    there.

    Raises ``NodeUnavailable``, ``RemoteError``, ``TransferError``: some may be stored; none is stored in
    part.
    """
    infos, data = [each.info for each in batch], [each.data for each in batch]
    reply, held = await node.begin(owner, infos, data, await _in_memory(node, batch))
    chunk_nbytes = reply.chunk_nbytes
    reasons = [""] * len(batch)
    under_way: dict[int, tuple[_Sent, store_pb2.PutStep]] = {}

    def take(sent: _Sent, step: store_pb2.PutStep) -> None:
        if step.error:
            reasons[sent.number] = step.error
        elif not step.done:
            under_way[step.put_id] = (sent, step)

    for number, (upload, step) in enumerate(zip(batch, reply.steps, strict=True)):
        take(_Sent(upload, number), step)
    try:
        while under_way:
            puts = list(under_way.values())
            written = await _write(node, puts, chunk_nbytes, reply.write_grant, held)
            reply, held = await node.commit(written)
            previous, under_way = under_way, {}
            for step in reply.steps:
                sent, before = previous[step.put_id]
                sent.first += len(before.chunks.offset)
                take(sent, step)
    except BaseException:
        await _abort(node, list(under_way))
        raise
    return reasons


async def _in_memory(node: RemoteStore, batch: Sequence[Upload]) -> list[node_pb2.BlockSpans]:
    """Where the chunks of each object are, for a node that reads them itself; without any: it cannot."""
    found = [node_pb2.BlockSpans() for _ in batch]
    spans: list[tuple[node_pb2.BlockSpans, memoryview, Span]] = []
    if chunk_nbytes := node.chunk_nbytes:
        for upload, each in zip(batch, found, strict=True):
            if (buffer := upload.buffer) is not None and buffer.nbytes <= _MOST_CHUNKS * chunk_nbytes:
                spans += [(each, buffer.region.buffer, span) for span in buffer.spans(chunk_nbytes)]
    if not spans or not await node.reads_from_us():
        return []
    for (each, _, span), value in zip(spans, await _hashed([pair[1:] for pair in spans]), strict=True):
        each.region.append(span.region)
        each.offset.append(span.offset)
        each.checksum.append(value)
    return found


async def _hashed(spans: Sequence[tuple[memoryview, Span]]) -> list[int]:
    """The checksums of spans of these buffers."""

    def hash_all() -> list[int]:
        return [checksum(buffer[s.offset : s.offset + s.nbytes]) for buffer, s in spans]

    small = sum(span.nbytes for _, span in spans) <= _INLINE_NBYTES
    return hash_all() if small else await asyncio.to_thread(hash_all)


async def _write(
    node: RemoteStore,
    puts: Sequence[tuple[_Sent, store_pb2.PutStep]],
    chunk_nbytes: int,
    write_grant: int,
    held: HeldGrant,
) -> list[store_pb2.WrittenChunks]:
    """Write the reserved chunks of each put under their grant; returns the commits."""
    spans: list[Span] = []
    chunks: list[tuple[int, int]] = []
    owners: list[int] = []
    buffers: dict[int, memoryview] = {}
    for sent, step in puts:
        buffer = sent.upload.buffer
        assert buffer is not None, "a small object has no chunks"
        starts = list(zip(step.chunks.region, step.chunks.offset, strict=True))
        spans += buffer.spans(chunk_nbytes)[sent.first : sent.first + len(starts)]
        chunks += starts
        owners += [step.put_id] * len(starts)
        buffers[buffer.region.id] = buffer.region.buffer

    checksums = await _hashed([(buffers[span.region], span) for span in spans])
    await node.write(spans, chunks, checksums, write_grant, held)
    written = {step.put_id: store_pb2.WrittenChunks(put_id=step.put_id) for _, step in puts}
    for put_id, value in zip(owners, checksums, strict=True):
        written[put_id].checksum.append(value)
    return list(written.values())


async def _abort(node: RemoteStore, put_ids: Sequence[int]) -> None:
    try:
        await node.call("Abort", store_pb2.AbortRequest(put_id=put_ids))
    except MoonpoolError as error:
        log.info("puts were not aborted and will expire: %s", error)
