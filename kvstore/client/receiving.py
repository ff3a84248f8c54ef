"""Objects on their way from one store node."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvstore.client.arrays import ArrayType, Receiver
from kvstore.remote_store import ObjectGone, RemoteStore
from protos import store_pb2
from transfer import ChecksumMismatch, Span, TransferAgent

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Want:
    """``out``: the caller's memory to read into; None: a new array."""

    name: str
    key: bytes
    out: Any = None


@dataclass(frozen=True, slots=True)
class _Incoming:
    number: int  # in the batch
    opened: store_pb2.OpenedObject
    receiver: Receiver
    spans: list[Span]  # ours, by chunk

    @property
    def in_one_window(self) -> bool:
        return len(self.spans) <= len(self.opened.chunks.offset)


async def receive(
    node: RemoteStore, agent: TransferAgent, owner: bytes, wants: Sequence[Want]
) -> list[Receiver | None]:
    """Read every object that ``node`` has; None where it has none, or one that is damaged.

    The receivers are closed: nothing moves any more.

    Raises:
        BadObject: it does not fit ``out``, or numpy has no such dtype.
        NodeUnavailable, RemoteError, TransferError: what was read into is undefined.
    """
    wanted = [store_pb2.OpenObject(key=want.key) for want in wants]
    opened, chunk_nbytes = await node.open(owner, wanted)
    incoming: list[_Incoming] = []
    received: list[Receiver | None] = [None] * len(wants)
    try:
        for number, (want, here) in enumerate(zip(wants, opened, strict=True)):
            if here.HasField("info"):
                info = here.info
                stored = ArrayType(info.dtype, tuple(info.shape), info.nbytes)
                receiver = Receiver(agent, want.name, stored, want.out)
                spans = _spans(receiver, chunk_nbytes)
                incoming.append(_Incoming(number, here, receiver, spans))
        short = [each for each in incoming if each.in_one_window]
        damaged = await _read_together(node, [each for each in short if each.spans])
        for each in incoming:
            if not each.in_one_window and not await _read_long(node, owner, each):
                damaged.append(each)
    finally:
        node.let_go(opened)
        for each in incoming:
            each.receiver.close()
    for each in incoming:
        received[each.number] = each.receiver
    for each in damaged:
        received[each.number] = None
        await _report(node, owner, wants[each.number])
    return received


def _spans(receiver: Receiver, chunk_nbytes: int) -> list[Span]:
    region = receiver.region
    if region is None:
        return []
    return [
        Span(region.id, offset, min(chunk_nbytes, region.nbytes - offset))
        for offset in range(0, region.nbytes, chunk_nbytes)
    ]


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
    log.warning("the copy of %r on %s is damaged", want.name, node.node_id)
    await node.call("Check", store_pb2.CheckRequest(owner=owner, keys=want.key))
