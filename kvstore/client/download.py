"""Objects read from one store node."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.kvstore.client.arrays import ArrayType, check_fits, check_known, view_as
from moonpool.kvstore.client.memory import BorrowedBuffer, LocalMemory, bytes_of, part_of
from moonpool.kvstore.grants.held import HeldGrant
from moonpool.kvstore.remote.object_store import ObjectGone, RemoteStore
from moonpool.protos import store_pb2
from moonpool.transfer import ChecksumMismatch, Span

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

# Alignment of the new arrays of one batch in the memory they share.
_ALIGNMENT = 64
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class GetRequest:
    """``out``: the caller's memory to read into; None: a new array."""

    name: str
    key: bytes
    out: Any = None


@dataclass(frozen=True, slots=True)
class _Download:
    number: int  # in the batch
    request: GetRequest
    opened: store_pb2.OpenedObject
    buffer: BorrowedBuffer | None  # None: it is empty
    spans: list[Span]  # ours, by chunk

    @property
    def in_one_window(self) -> bool:
        return len(self.spans) <= len(self.opened.chunks.offset)

    def array(self) -> Array:
        memory = _NOTHING if self.buffer is None else bytes_of(self.buffer)
        return (
            memory if self.request.out is not None else view_as(self.request.name, _type(self.opened), memory)
        )


async def receive(
    node: RemoteStore, memory: LocalMemory, owner: bytes, requests: Sequence[GetRequest]
) -> list[Array | None]:
    """Read every object that ``node`` has; None where it has none or a damaged one. With ``out``, its bytes
    are returned. New arrays of one call share memory.

    Raises ``BadObject``: it does not fit ``out``, or numpy has no such dtype. Raises ``NodeUnavailable``,
    ``RemoteError``, ``TransferError``: the memory is undefined.
    """
    wanted = [store_pb2.OpenObject(key=request.key) for request in requests]
    opened, chunk_nbytes, held = await node.open(owner, wanted)
    buffers: list[BorrowedBuffer] = []
    try:
        downloads = _prepare(memory, requests, opened, chunk_nbytes, buffers)
        together = [each for each in downloads if each.in_one_window and each.spans]
        gone = await _read_together(node, together, held)
        for each in downloads:
            if not each.in_one_window and not await _read_long(node, owner, each, held):
                gone.append(each)
    finally:
        node.release(opened)
        for buffer in buffers:
            buffer.close()
    received: list[Array | None] = [None] * len(requests)
    for each in downloads:
        received[each.number] = each.array()
    for each in gone:
        received[each.number] = None
        await _report(node, owner, each.request)
    return received


def _prepare(
    memory: LocalMemory,
    requests: Sequence[GetRequest],
    opened: Sequence[store_pb2.OpenedObject],
    chunk_nbytes: int,
    buffers: list[BorrowedBuffer],
) -> list[_Download]:
    """Allocate or borrow memory for the objects found. Buffers to close are added to ``buffers``."""
    found = [(n, w, o) for n, (w, o) in enumerate(zip(requests, opened, strict=True)) if o.HasField("info")]
    starts: dict[int, int] = {}
    total = 0
    for number, request, here in found:
        if request.out is None:
            check_known(request.name, _type(here))
            starts[number] = total
            total += -(-here.info.nbytes // _ALIGNMENT) * _ALIGNMENT
    fresh: BorrowedBuffer | None = None
    if total:
        fresh = memory.allocate(total)
        buffers.append(fresh)
    downloads: list[_Download] = []
    for number, request, here in found:
        buffer: BorrowedBuffer | None = None
        if request.out is not None:
            check_fits(request.name, _type(here), request.out)
        if here.info.nbytes and fresh is not None and number in starts:
            buffer = part_of(fresh, starts[number], here.info.nbytes)
        elif here.info.nbytes:
            buffer = memory.borrow(request.out, writable=True)
            buffers.append(buffer)
        downloads.append(
            _Download(number, request, here, buffer, buffer.spans(chunk_nbytes) if buffer else [])
        )
    return downloads


def _type(opened: store_pb2.OpenedObject) -> ArrayType:
    info = opened.info
    return ArrayType(info.dtype, tuple(info.shape), info.nbytes)


async def _read_together(node: RemoteStore, batch: Sequence[_Download], held: HeldGrant) -> list[_Download]:
    if not batch:
        return []
    try:
        ours = [span for each in batch for span in each.spans]
        await node.fetch(ours, [each.opened for each in batch], held)
    except ChecksumMismatch:
        if len(batch) == 1:
            return list(batch)
        # One bad object fails the whole batch: find out which.
        return [bad for each in batch for bad in await _read_together(node, [each], held)]
    return []


async def _read_long(node: RemoteStore, owner: bytes, each: _Download, held: HeldGrant) -> bool:
    """Read window by window. False: it is damaged, or was dropped meanwhile."""
    try:
        await node.read(owner, each.opened, held, 0, len(each.spans), each.spans.__getitem__)
    except (ChecksumMismatch, ObjectGone):
        return False
    return True


async def _report(node: RemoteStore, owner: bytes, request: GetRequest) -> None:
    """Make the node verify its copy, so that a damaged one is not offered again."""
    log.warning("the copy of %r on %s is damaged, or was dropped meanwhile", request.name, node.node_id)
    await node.call("Check", store_pb2.CheckRequest(owner=owner, keys=request.key))
