"""What a client opened on a store node is given back soon, however its read ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from moonpool.kvstore.grants.held import HeldGrant
from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.protos import node_pb2, store_pb2
from moonpool.runtime.errors import NodeUnavailable
from moonpool.transfer import Span, TransferError

OWNER = b"o" * 16
WINDOW = 2


class Node(RemoteStore):
    """Answers calls itself; each window of an object has a lease of its own. ``fetch`` fails once the next
    window is open."""

    def __init__(self) -> None:
        nobody: Any = None
        super().__init__("n", "127.0.0.1:1", nobody, deadline_s=30.0)
        self.leased: set[int] = set()
        self.num_opened = 0
        self.changed = asyncio.Event()
        self.closing, self.may_close = asyncio.Event(), asyncio.Event()
        self.may_close.set()
        self.failures: list[NodeUnavailable] = []  # of the next calls to close
        self._ids = itertools.count(1)

    async def call(self, method: str, request: Any) -> Any:
        if method == "Close":
            self.closing.set()
            await self.may_close.wait()
            if self.failures:
                raise self.failures.pop()
            self._end(request.lease_id)
            return store_pb2.CloseReply()
        self._end(request.close_lease_id)
        opened = [
            store_pb2.OpenedObject(
                lease_id=[next(self._ids)],
                chunks=node_pb2.BlockSpans(region=[1] * WINDOW, offset=range(WINDOW), checksum=[0] * WINDOW),
            )
            for _ in request.objects
        ]
        self.leased |= {each.lease_id[0] for each in opened}
        self.num_opened += len(opened)
        self.changed.set()
        return store_pb2.OpenReply(objects=opened, chunk_nbytes=1, granted_s=60.0)

    def _end(self, lease_ids: Sequence[int]) -> None:
        self.leased -= set(lease_ids)
        self.changed.set()

    async def until_num_opened(self, count: int) -> None:
        while self.num_opened < count:
            self.changed.clear()
            await self.changed.wait()

    async def until_nothing_is_leased(self) -> None:
        async with asyncio.timeout(20):
            while self.leased:
                self.changed.clear()
                await self.changed.wait()

    async def fetch(
        self, ours: Sequence[Span], opened: Sequence[store_pb2.OpenedObject], held: HeldGrant
    ) -> None:
        await self.until_num_opened(2)
        # The task that asked for it has ended.
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        raise TransferError("the connection broke")


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    async with Node() as node:
        yield node


async def test_the_window_opened_ahead_of_a_read_that_fails(node: Node) -> None:
    info = store_pb2.ObjectInfo(key=b"k" * 16, storage=1)
    (opened,), _, held = await node.open(OWNER, [store_pb2.OpenObject(key=info.key)])
    with pytest.raises(TransferError, match="broke"):
        await node.read(OWNER, opened, held, 0, 2 * WINDOW, lambda chunk: Span(1, chunk, 1))
    await node.until_nothing_is_leased()


async def test_what_is_released_while_others_are_being_closed(node: Node) -> None:
    wanted = [store_pb2.OpenObject(key=b"k" * 16) for _ in range(2)]
    opened, _, _ = await node.open(OWNER, wanted)
    node.may_close.clear()
    node.release(opened[:1])
    await node.closing.wait()
    node.release(opened[1:])
    node.may_close.set()
    await node.until_nothing_is_leased()


async def test_what_is_released_while_a_call_to_close_others_fails(node: Node) -> None:
    wanted = [store_pb2.OpenObject(key=b"k" * 16) for _ in range(2)]
    opened, _, _ = await node.open(OWNER, wanted)
    node.may_close.clear()
    node.failures.append(NodeUnavailable("n", "no answer"))
    node.release(opened[:1])
    await node.closing.wait()
    node.release(opened[1:])
    node.may_close.set()
    async with asyncio.timeout(20):
        while opened[1].lease_id[0] in node.leased:
            node.changed.clear()
            await node.changed.wait()
    assert node.leased == set(opened[0].lease_id), "a call that failed is not repeated: its leases expire"
