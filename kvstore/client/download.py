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
from moonpool.kvstore.objects.chunks import is_small
from moonpool.kvstore.remote.object_store import ObjectGone, RemoteStore
from moonpool.protos import store_pb2
from moonpool.transfer import ChecksumMismatch, Span, checksum

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

# Alignment of the new arrays of one batch in the memory they share.
_ALIGNMENT = 64
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class GetRequest:
    """``out``: the caller's memory to read into; None: a new array. ``storage``: 0: that of the record."""

    name: str
    key: bytes
    out: Any = None
    storage: int = 0


@dataclass(frozen=True, slots=True)
class NotHere:
    """What a node said that could not serve a request. ``storage`` 0: there is no such object. ``places``: of
    the record, if the node was asked for it."""

    storage: int = 0
    places: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Download:
    number: int  # in the batch
    request: GetRequest
    opened: store_pb2.OpenedObject
    buffer: BorrowedBuffer | None  # None: it is small and came with the answer
    spans: list[Span]  # ours, by chunk

    @property
    def in_one_window(self) -> bool:
        return len(self.spans) <= len(self.opened.chunks.offset)

    def array(self, memory: LocalMemory) -> Array:
        if self.buffer is not None:
            found = bytes_of(self.buffer)
        elif self.request.out is None:
            found = np.frombuffer(bytearray(self.opened.data), np.uint8)
        elif self.opened.data:
            found = memory.bytes_of(self.request.out, writable=True)
            found[:] = np.frombuffer(self.opened.data, np.uint8)
        else:
            found = _NOTHING
        return (
            found if self.request.out is not None else view_as(self.request.name, _type(self.opened), found)
        )


async def receive(
    node: RemoteStore, memory: LocalMemory, owner: bytes, requests: Sequence[GetRequest]
) -> list[Array | NotHere]:
    """Read every object that ``node`` has; ``NotHere`` for the others, and for damaged ones. With ``out``,
    its bytes are returned. New arrays of one call share memory.

    Raises ``BadObject``: it does not fit ``out``, or numpy has no such dtype. Raises ``NodeUnavailable``,
    ``RemoteError``, ``TransferError``: the memory is undefined.
    """
    wanted = [store_pb2.OpenObject(key=request.key, storage=request.storage) for request in requests]
    opened, chunk_nbytes, held = await node.open(owner, wanted)
    buffers: list[BorrowedBuffer] = []
    try:
        downloads = _prepare(memory, requests, opened, chunk_nbytes, buffers)
        together = [each for each in downloads if each.in_one_window and each.spans]
        gone = await _read_together(node, together, held)
        for each in downloads:
            if is_small(each.opened.info):
                if checksum(each.opened.data) != each.opened.checksum:
                    gone.append(each)
            elif not each.in_one_window and not await _read_long(node, owner, each, held):
                gone.append(each)
    finally:
        node.release(opened)
        for buffer in buffers:
            buffer.close()
    received: list[Array | NotHere] = [
        NotHere(each.info.storage or request.storage, tuple(each.places))
        for each, request in zip(opened, requests, strict=True)
    ]
    for each in downloads:
        if each not in gone:
            received[each.number] = each.array(memory)
    if gone:
        await _report(node, owner, gone)
    return received


def _prepare(
    memory: LocalMemory,
    requests: Sequence[GetRequest],
    opened: Sequence[store_pb2.OpenedObject],
    chunk_nbytes: int,
    buffers: list[BorrowedBuffer],
) -> list[_Download]:
    """Allocate or borrow memory for the objects found. Buffers to close are added to ``buffers``."""
    pairs = enumerate(zip(requests, opened, strict=True))
    found = [(n, w, o) for n, (w, o) in pairs if o.HasField("info") and not o.absent]
    starts: dict[int, int] = {}
    total = 0
    for number, request, here in found:
        if request.out is None:
            check_known(request.name, _type(here))
            if is_small(here.info):
                continue
            starts[number] = total
            total += -(-here.info.nbytes // _ALIGNMENT) * _ALIGNMENT
    fresh: BorrowedBuffer | None = None
    if total:
        fresh = memory.allocate(total)
        buffers.append(fresh)
    downloads: list[_Download] = []
    for number, request, here in found:
        if request.out is not None:
            check_fits(request.name, _type(here), request.out)
        if is_small(here.info):
            downloads.append(_Download(number, request, here, None, []))
            continue
        if fresh is not None and number in starts:
            buffer = part_of(fresh, starts[number], here.info.nbytes)
        else:
            buffer = memory.borrow(request.out, writable=True)
            buffers.append(buffer)
        downloads.append(_Download(number, request, here, buffer, buffer.spans(chunk_nbytes)))
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


async def _report(node: RemoteStore, owner: bytes, gone: Sequence[_Download]) -> None:
    """Make the node verify its copies, so that damaged ones are not offered again."""
    for each in gone:
        log.warning("%r on %s is damaged, or was dropped meanwhile", each.request.name, node.node_id)
    infos = [each.opened.info for each in gone]
    objects = [store_pb2.OpenObject(key=info.key, storage=info.storage) for info in infos]
    await node.call("Check", store_pb2.CheckRequest(owner=owner, objects=objects))
