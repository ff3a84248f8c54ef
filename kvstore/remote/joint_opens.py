"""Reads of objects that begin in one turn of the event loop, opened with one call."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonpool.kvstore.grants.held import HeldGrant
from moonpool.protos import store_pb2

Opened = tuple[list[store_pb2.OpenedObject], int, HeldGrant]
"""The objects, the chunk size, and the grant to read them."""

# Of one call, as of a round of the client's: the answer stays within half of the largest message.
_MOST_OBJECTS = 512


@dataclass(slots=True)
class _Batch:
    wanted: list[store_pb2.OpenObject] = field(default_factory=list)
    task: asyncio.Future[asyncio.Task[Opened]] | None = None  # set by the first who joins


class JointOpens:
    """Of one node and one client. A small read costs less than its call does: eight that are under way at a
    time share one."""

    def __init__(
        self,
        open_now: Callable[[bytes, Sequence[store_pb2.OpenObject]], Coroutine[Any, Any, Opened]],
        release: Callable[[Sequence[store_pb2.OpenedObject]], None],
    ) -> None:
        self._open_now = open_now
        self._release = release
        self._batches: dict[bytes, _Batch] = {}

    async def open(self, owner: bytes, wanted: Sequence[store_pb2.OpenObject]) -> Opened:
        """See ``RemoteStore.open``. What others share the call with, and whether they are cancelled, makes no
        difference."""
        batch = self._batches.get(owner)
        if batch is None or len(batch.wanted) + len(wanted) > _MOST_OBJECTS:
            batch = self._batches[owner] = _Batch(list(wanted))
            part = slice(len(wanted))
            try:
                # Others that are ready to run join meanwhile.
                await asyncio.sleep(0)
            except asyncio.CancelledError:
                if (joint := self._begin(owner, batch)) is not None:
                    joint.add_done_callback(lambda task: self._give_back(task, part))
                raise
            joint = self._begin(owner, batch)
            if joint is None:
                return await self._open_now(owner, wanted)
            task = joint
        else:
            part = slice(len(batch.wanted), len(batch.wanted) + len(wanted))
            batch.wanted += wanted
            if batch.task is None:
                batch.task = asyncio.get_running_loop().create_future()
            try:
                task = await asyncio.shield(batch.task)
            except asyncio.CancelledError:
                batch.task.add_done_callback(
                    lambda begun: begun.result().add_done_callback(lambda task: self._give_back(task, part))
                )
                raise
        try:
            opened, chunk_nbytes, held = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda task: self._give_back(task, part))
            raise
        return opened[part], chunk_nbytes, held

    def _begin(self, owner: bytes, batch: _Batch) -> asyncio.Task[Opened] | None:
        """Close the batch and send it. None: it has one caller only, who calls alone."""
        if self._batches.get(owner) is batch:
            del self._batches[owner]
        if batch.task is None:
            return None
        task = asyncio.create_task(self._open_now(owner, batch.wanted))
        batch.task.set_result(task)
        return task

    def _give_back(self, task: asyncio.Task[Opened], part: slice) -> None:
        """Its caller was cancelled."""
        if not task.cancelled() and task.exception() is None:
            self._release(task.result()[0][part])
