"""The messages behind the latest responses, for requests that go on from one."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from moonpool.conductor.requests.conversation_records import ConversationRecords, Messages
from moonpool.kvstore.errors import IndexUnavailable

log = logging.getLogger(__name__)

WRITE_S = 0.5
"""How long an answer waits for Redis before it ends."""
MAX_KEPT = 1024
MAX_CHARS = 32 << 20
"""Of all conversations that are kept."""


class Conversations:
    """By response and tenant: the latest ones here, and those of all conductors in ``records``.

    Used on one event loop.
    """

    def __init__(self, records: ConversationRecords | None = None) -> None:
        """``records``: None: no other conductor knows the responses of this one."""
        self._kept: OrderedDict[tuple[str, str], tuple[Messages, int]] = OrderedDict()
        self._num_chars = 0
        self._records = records
        self._writing: set[asyncio.Task[None]] = set()

    async def put(self, tenant: str, response_id: str, messages: Messages) -> None:
        """Keep the messages. Returns once other conductors find them, at the latest after ``WRITE_S``; they
        are kept also if the call is cancelled."""
        self._remember(tenant, response_id, messages)
        if self._records is not None:
            task = asyncio.create_task(self._write(self._records, tenant, response_id, messages))
            self._writing.add(task)
            task.add_done_callback(self._writing.discard)
            await asyncio.wait([task], timeout=WRITE_S)

    async def get(self, tenant: str, response_id: str) -> Messages | None:
        """The messages, with those of the response itself; None: it is unknown.

        Raises ``IndexUnavailable``: it is unknown here, and Redis does not answer.
        """
        found = self._kept.get((tenant, response_id))
        if found is not None:
            return found[0]
        return None if self._records is None else await self._records.get(tenant, response_id)

    async def written(self) -> None:
        """Return once what was put before is in Redis, or cannot be."""
        await asyncio.gather(*self._writing)

    def _remember(self, tenant: str, response_id: str, messages: Messages) -> None:
        size = sum(len(str(message)) for message in messages)
        # A stream that goes on here comes to its end a second time.
        _, former = self._kept.pop((tenant, response_id), ([], 0))
        self._kept[tenant, response_id] = messages, size
        self._num_chars += size - former
        while len(self._kept) > MAX_KEPT or self._num_chars > MAX_CHARS:
            _, (_, size) = self._kept.popitem(last=False)
            self._num_chars -= size

    async def _write(
        self, records: ConversationRecords, tenant: str, response_id: str, messages: Messages
    ) -> None:
        try:
            await records.put(tenant, response_id, messages)
        except IndexUnavailable as error:
            log.warning("response %s can be continued at this conductor only: %s", response_id, error)
