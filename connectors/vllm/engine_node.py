"""A store node inside the engine's worker: it keeps the engine's blocks, and reads and serves peers'."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import Any

import orjson
from prometheus_client import REGISTRY
from xxhash import xxh3_64_intdigest

from moonpool.connectors.vllm.keeping.pins import PinnedPrompts
from moonpool.connectors.vllm.keeping.tenant_blocks import TenantBlocks
from moonpool.connectors.vllm.lookup.reasons import REASONS
from moonpool.connectors.vllm.pages import PageReading, Pages
from moonpool.connectors.vllm.parameters.hand_over import HandOver
from moonpool.connectors.vllm.parameters.hints import HintedBlocks
from moonpool.connectors.vllm.plan import Claim, Load, Save
from moonpool.connectors.vllm.registration import Registration
from moonpool.connectors.vllm.request_log import RequestLog
from moonpool.kvstore.blocks.keys import BlockKey, unpack
from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import BlockCorrupt, BlockMissing, IndexUnavailable
from moonpool.kvstore.eviction.tenant_metrics import TenantLabels, observe_tenants
from moonpool.kvstore.index.redis.node_record import LAYOUT_FACTS, NodeRecord
from moonpool.kvstore.store import TieredStore
from moonpool.kvstore.store_node.node import StoreNode
from moonpool.kvstore.store_node.service import Context
from moonpool.kvstore.store_node.shelves import ShelfFactory
from moonpool.kvstore.tiers.copier import Copier
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import Config
from moonpool.runtime.observing.metrics_server import REQUESTS_PAGE

_COPY_THREADS = 1
# Longest that a prompt is kept for the engine that decodes it.
KEEP_S = 10.0
# Longest that the page of requests waits for Redis.
_INDEX_S = 2.0
# Prompts that hints fetch at the same time; more are refused.
_MOST_FETCHES = 4


class EngineNode(StoreNode):
    """Blocks of one layout, which are copied from and to ``pages``. One event loop."""

    role = "engine"

    def __init__(
        self,
        config: Config,
        layout: OpaqueLayout,
        pages: Pages,
        facts: Mapping[str, str],
        requests: RequestLog,
        registration: Registration | None = None,
    ) -> None:
        """``facts``: what ``layout``'s fingerprint stands for; ``requests``: shown on the node's page."""
        super().__init__(config)
        self._own_layout = layout
        self._registration = registration
        self._pages = pages
        self._facts = dict(facts)
        self._loop = asyncio.get_running_loop()
        self._requests = requests
        self._copier = Copier(_COPY_THREADS)
        self._saving = asyncio.Lock()  # a block is saved after the one before it
        self._tenants = TenantBlocks(layout.block_nbytes)
        self._pins = PinnedPrompts()
        self._fetching = asyncio.Semaphore(_MOST_FETCHES)
        self._keeping: dict[BlockKey, list[asyncio.Event]] = {}  # by the last block: whether it was leased
        self._loading: Counter[BlockKey] = Counter()  # loads by their partial block

    def first_layout(self, maker: ShelfFactory) -> OpaqueLayout:
        # Whatever else is on disk: it may be of another block size or model.
        return self._own_layout

    async def _start(self, stack: AsyncExitStack) -> None:
        stack.push_async_callback(self._copier.close)
        await super()._start(stack)
        observed = observe_tenants(self._tenants.quotas, TenantLabels())
        stack.callback(REGISTRY.unregister, observed)

    async def _drain(self) -> None:
        if self._kv.store is not None:
            self._pins.release_all(self._kv.store)  # a drain waits for leases
        await super()._drain()

    def _kv_changed(self, key: BlockKey, tier: Tier | None) -> None:
        self._tenants.changed(key, tier, self._kv.store)
        super()._kv_changed(key, tier)

    def pages(self) -> Mapping[str, Callable[[], bytes]]:
        return {REQUESTS_PAGE: self._page}

    def _page(self) -> bytes:
        """On a thread of the metrics page."""
        reading = asyncio.run_coroutine_threadsafe(self._other_layouts(), self._loop)
        try:
            others = reading.result(_INDEX_S)
        except (IndexUnavailable, TimeoutError, CancelledError):
            others = None  # not known
        return orjson.dumps(
            {
                "node_id": self.node_id,
                "facts": self._facts,
                "others": others,
                "requests": self._requests.latest(),
                "reasons": REASONS,
            }
        )

    async def _other_layouts(self) -> dict[str, Any]:
        """The facts of the engines that share no block with this one."""
        records = await self.index.nodes()
        theirs = {name: record.extra.get(LAYOUT_FACTS) for name, record in records.items()}
        own = self._own_layout.fingerprint.hex()
        return {name: facts for name, facts in theirs.items() if facts and records[name].layout != own}

    def record(self) -> NodeRecord:
        record = super().record()
        record = replace(
            record, model=self._facts.get("model", ""), extra=record.extra | {LAYOUT_FACTS: self._facts}
        )
        return record if self._registration is None else self._registration.of(record, self._own_layout)

    async def save(self, save: Save, reading: PageReading) -> None:
        """Keep blocks; fewer where there is no room. ``reading`` ends in every case."""
        try:
            async with self._saving, self._kv.writing(self._own_layout) as store:
                await self._save(store, save, reading)
        finally:
            reading.end()

    async def _save(self, store: TieredStore, save: Save, reading: PageReading) -> None:
        keys = save.keys
        if save.tenant:
            keys = keys[: await self._tenants.make_room(save.tenant, keys, save.parent, store)]
        with store.reserve(keys, parent=save.parent) as reservation:
            spans = reservation.spans
            blocks = save.blocks[reservation.num_held :][: len(spans)]

            def work() -> list[int] | None:
                self._pages.copy_out(blocks, spans)
                return [xxh3_64_intdigest(span.data) for span in spans] if reading.end() else None

            checksums = await self._copier.run(work) if spans else []
            if checksums is not None:
                reservation.commit(checksums)

    async def keep(self, given: HandOver) -> None:
        """Keep a prompt that has been saved until the engine that decodes it has leased it, ``KEEP_S`` at
        most."""
        last, leased = given.keys[-1], asyncio.Event()
        self._keeping.setdefault(last, []).append(leased)
        try:
            async with self._saving:  # after the saves before it
                store = await self._kv.open_layout(self._own_layout)
            async with store.pinned(given.keys):
                with suppress(TimeoutError):
                    await asyncio.wait_for(leased.wait(), KEEP_S)
        finally:
            self._keeping[last].remove(leased)
            if not self._keeping[last]:
                del self._keeping[last]
        await self._remove_unused(store, given.tail)
        await self._tenants.trim(store)

    async def _remove_unused(self, store: TieredStore, tail: BlockKey | None) -> None:
        """Remove the partial block of a prompt, unless a ``keep`` or a ``load`` still needs it."""
        if tail is not None and tail not in self._keeping and tail not in self._loading:
            await store.remove([tail])

    async def claim(self, claim: Claim) -> None:
        """Count the blocks of a prompt towards its tenant's quota."""
        self._tenants.claim(claim.tenant, claim.keys, await self._kv.open_layout(self._own_layout))

    async def hint(self, hint: HintedBlocks) -> str:
        """Do as a hint asks. Returns how that ended: "done", "missing" (no node has the blocks) or "refused"
        (hints have their part of memory, or of fetches). Raises what ``load`` does."""
        store = await self._kv.open_layout(self._own_layout)
        if hint.action == "prefetch":
            return await self._prefetch(store, hint)
        async with self._saving:  # after the saves before it
            if hint.action == "drop":
                first = hint.keys[hint.first]
                is_held = store.is_held(first)
                await store.remove([first])
                return "done" if is_held else "missing"
            if hint.action == "let_go":
                return "done" if store.host.let_go(hint.keys) else "missing"
        return await self._pins.pin(store, hint.keys, hint.ttl_s)

    async def _prefetch(self, store: TieredStore, hint: HintedBlocks) -> str:
        if self._fetching.locked():
            return "refused"
        async with self._fetching:
            if hint.source:
                await self._kv.replicate(node_pb2.KvAddress.FromString(hint.source), hint.keys)
            return "done" if await store.prefetch(hint.keys) else "missing"

    async def Lease(self, request: node_pb2.LeaseRequest, context: Context) -> node_pb2.LeaseReply:
        keys = unpack(request.keys)
        if self._kv.store is not None and len(self._kv.store.match(keys)) < len(keys):
            # What is being saved will be here.
            async with self._saving:
                pass
        reply = await super().Lease(request, context)
        if len(reply.blocks.offset) == len(keys):
            self._leased(keys)
        return reply

    def _leased(self, keys: Sequence[BlockKey]) -> None:
        """Its reader has a lease of its own: one ``keep`` that waited for it ends."""
        waiting = self._keeping.get(keys[-1], ()) if keys else ()
        event = next((event for event in waiting if not event.is_set()), None)
        if event is not None:
            event.set()

    async def load(self, load: Load) -> None:
        """Fill the engine's blocks.

        Raises ``BlockMissing``, ``BlockCorrupt``, ``RemoteError``, ``NodeUnavailable``, ``TransferError``,
        ``OtherLayout``: their contents are undefined then.
        """
        store = await self._kv.open_layout(self._own_layout)
        tails = [] if load.tail is None else [load.tail]
        self._loading.update(tails)
        try:
            if load.source:
                if load.tenant:
                    await self._tenants.make_room(load.tenant, load.keys, None, store)
                await self._kv.replicate(node_pb2.KvAddress.FromString(load.source), load.keys)
            await self._load(store, load)
        finally:
            self._loading.subtract(tails)
            if tails and not self._loading[tails[0]]:
                del self._loading[tails[0]]
            await self._remove_unused(store, load.tail)
            if load.tenant:
                await self._tenants.trim(store)

    async def _load(self, store: TieredStore, load: Load) -> None:
        store.use(load.keys)
        async with store.pinned(load.keys) as pinned:
            if len(pinned) < len(load.keys):
                raise BlockMissing(len(pinned), len(load.keys))
            wanted = pinned[len(load.keys) - len(load.blocks) :]
            spans = [store.host.bytes_of(block.slot) for block in wanted]

            def work() -> int | None:
                for i, (span, block) in enumerate(zip(spans, wanted, strict=True)):
                    if xxh3_64_intdigest(span.data) != block.checksum:
                        return i
                self._pages.copy_in(spans, load.blocks)
                return None

            bad = await self._copier.run(work)
        if bad is not None:
            first = len(load.keys) - len(load.blocks) + bad
            store.drop_corrupt(load.keys[first])
            raise BlockCorrupt(first, len(load.keys), "host")
