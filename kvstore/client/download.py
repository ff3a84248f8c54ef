"""Objects on their way from one store node."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.kvstore.client.arrays import ArrayType, check_fits, check_known, view_as
from moonpool.kvstore.client.memory import Loan, LocalMemory, bytes_of, part_of
from moonpool.kvstore.remote.object_store import ObjectGone, RemoteStore
from moonpool.protos import store_pb2
from moonpool.transfer import ChecksumMismatch, Span

log = logging.getLogger(__name__)

Array = npt.NDArray[Any]

# Where new arrays of one batch begin, in the memory they share.
_ALIGNMENT = 64
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True, slots=True)
class Want:
    """``out``: the caller's memory to read into; None: a new array."""

    name: str
    key: bytes
    out: Any = None


@dataclass(frozen=True, slots=True)
class _Incoming:
    number: int  # in the batch
    want: Want
    opened: store_pb2.OpenedObject
    loan: Loan | None  # None: it is empty
    spans: list[Span]  # ours, by chunk

    @property
    def in_one_window(self) -> bool:
        return len(self.spans) <= len(self.opened.chunks.offset)

    def array(self) -> Array:
        memory = _NOTHING if self.loan is None else bytes_of(self.loan)
        return memory if self.want.out is not None else view_as(self.want.name, _type(self.opened), memory)


async def receive(
    node: RemoteStore, memory: LocalMemory, owner: bytes, wants: Sequence[Want]
) -> list[Array | None]:
    """Read every object that ``node`` has; None where it has none, or one that is damaged. Where there is an
    ``out``, its bytes stand for it. New arrays of one call share their memory.

    Raises:
        BadObject: it does not fit ``out``, or numpy has no such dtype.
        NodeUnavailable, RemoteError, TransferError: what was read into is undefined.
    """
    wanted = [store_pb2.OpenObject(key=want.key) for want in wants]
    opened, chunk_nbytes = await node.open(owner, wanted)
    loans: list[Loan] = []
    try:
        incoming = _prepare(memory, wants, opened, chunk_nbytes, loans)
        gone = await _read_together(node, [each for each in incoming if each.in_one_window and each.spans])
        for each in incoming:
            if not each.in_one_window and not await _read_long(node, owner, each):
                gone.append(each)
    finally:
        node.let_go(opened)
        for loan in loans:
            loan.close()
    received: list[Array | None] = [None] * len(wants)
    for each in incoming:
        received[each.number] = each.array()
    for each in gone:
        received[each.number] = None
        await _report(node, owner, each.want)
    return received


def _prepare(
    memory: LocalMemory,
    wants: Sequence[Want],
    opened: Sequence[store_pb2.OpenedObject],
    chunk_nbytes: int,
    loans: list[Loan],
) -> list[_Incoming]:
    """Memory for what is there. What has to be closed is added to ``loans``."""
    found = [(n, w, o) for n, (w, o) in enumerate(zip(wants, opened, strict=True)) if o.HasField("info")]
    starts: dict[int, int] = {}
    total = 0
    for number, want, here in found:
        if want.out is None:
            check_known(want.name, _type(here))
            starts[number] = total
            total += -(-here.info.nbytes // _ALIGNMENT) * _ALIGNMENT
    fresh: Loan | None = None
    if total:
        fresh = memory.allocate(total)
        loans.append(fresh)
    incoming: list[_Incoming] = []
    for number, want, here in found:
        loan: Loan | None = None
        if want.out is not None:
            check_fits(want.name, _type(here), want.out)
        if here.info.nbytes and fresh is not None and number in starts:
            loan = part_of(fresh, starts[number], here.info.nbytes)
        elif here.info.nbytes:
            loan = memory.borrow(want.out, writable=True)
            loans.append(loan)
        incoming.append(_Incoming(number, want, here, loan, loan.spans(chunk_nbytes) if loan else []))
    return incoming


def _type(opened: store_pb2.OpenedObject) -> ArrayType:
    info = opened.info
    return ArrayType(info.dtype, tuple(info.shape), info.nbytes)


async def _read_together(node: RemoteStore, batch: Sequence[_Incoming]) -> list[_Incoming]:
    """All in one batch; returns those that are damaged."""
    if not batch:
        return []
    try:
        await node.fetch([span for each in batch for span in each.spans], [each.opened for each in batch])
    except ChecksumMismatch:
        if len(batch) == 1:
            return list(batch)
        # One bad object spoils the whole batch: find out which.
        return [bad for each in batch for bad in await _read_together(node, [each])]
    return []


async def _read_long(node: RemoteStore, owner: bytes, each: _Incoming) -> bool:
    """Window by window. False: it is damaged, or went while it was read."""
    try:
        await node.read(owner, each.opened, 0, len(each.spans), each.spans.__getitem__)
    except (ChecksumMismatch, ObjectGone):
        return False
    return True


async def _report(node: RemoteStore, owner: bytes, want: Want) -> None:
    """Have the node look at its copy, so that a damaged one is not offered again."""
    log.warning("the copy of %r on %s is damaged, or went while it was read", want.name, node.node_id)
    await node.call("Check", store_pb2.CheckRequest(owner=owner, keys=want.key))
