"""Hints of requests about their cached blocks, sent to the nodes that have them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.conductor.request import CacheHint
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.protos import node_pb2
from moonpool.runtime.errors import MoonpoolError

log = logging.getLogger(__name__)

_DEADLINE_S = 10.0
# Hints on their way; more are not followed.
_MOST = 256


class CacheHints:
    """Sends hints in the background: no request waits for them, and none fails by them. One event loop."""

    def __init__(self) -> None:
        self._sending: set[asyncio.Task[None]] = set()

    def send(
        self,
        hint: CacheHint,
        client: Tenant,
        chain: Sequence[BlockKey],
        prefill: Member,
        decode: Member | None,
    ) -> None:
        """Follow the hint of a request that has ended. ``chain``: its blocks. vLLM's engines were given the
        hint with the request: only the copy is left to do."""
        if not chain or hint == CacheHint():
            return
        if len(self._sending) >= _MOST:
            core_metrics.cache_hints.labels("refused").inc()
            return
        request = node_pb2.HintRequest(
            keys=b"".join(chain),
            keep_s=hint.pin_s,
            drop=hint.drop_after,
            tenant=client.name,
            tenant_cached_nbytes=client.cached_nbytes,
        )
        members = [prefill] if decode is None or decode is prefill else [prefill, decode]
        task = asyncio.create_task(self._send(hint, request, chain, members), name="hint")
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def close(self) -> None:
        """Hints on their way are not followed. Idempotent."""
        for task in self._sending:
            task.cancel()
        await asyncio.gather(*self._sending, return_exceptions=True)

    async def _send(
        self, hint: CacheHint, request: node_pb2.HintRequest, chain: Sequence[BlockKey], members: list[Member]
    ) -> None:
        """``members``: the prefill node, and the decode node if it is another one."""
        prefill = members[0]
        has_hint = prefill.engine is not None
        outcome = "sent" if has_hint else "done"
        try:
            source = members[-1].kv_address
            # An engine without the connector has no address.
            if hint.prefetch and len(members) > 1 and source is not None and source.node_id:
                await prefill.client.replicate(source, chain, _DEADLINE_S, surplus=False)
            if not has_hint and (hint.pin_s or hint.drop_after):
                replies = [await member.client.hint(request, _DEADLINE_S) for member in members]
                if hint.pin_s and max(replies) < len(chain):
                    outcome = "limited"
        except MoonpoolError as error:
            log.info("a hint for %d blocks was not followed: %s", len(chain), error)
            outcome = "failed"
        core_metrics.cache_hints.labels(outcome).inc()
