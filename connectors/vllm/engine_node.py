"""A store node inside the engine's worker: it keeps the engine's blocks, and reads and serves peers'."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from typing import Any, TypeVar

import orjson
from xxhash import xxh3_64_intdigest

from moonpool.connectors.service_thread import ServiceThread
from moonpool.connectors.vllm.errors import NodeFailed
from moonpool.connectors.vllm.pages import PageReading, Pages
from moonpool.connectors.vllm.plan import Load, Save
from moonpool.connectors.vllm.reasons import REASONS
from moonpool.connectors.vllm.registration import Registration
from moonpool.connectors.vllm.request_log import RequestLog
from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.errors import BlockCorrupt, BlockMissing, IndexUnavailable
from moonpool.kvstore.index.redis.node_record import LAYOUT_FACTS, NodeRecord
from moonpool.kvstore.store_node.node import StoreNode
from moonpool.kvstore.store_node.shelves import ShelfFactory
from moonpool.kvstore.tiers.copier import Copier
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import Config
from moonpool.runtime.observing.metrics_server import REQUESTS_PAGE
from moonpool.runtime.service.lifecycle import ServiceContext
from moonpool.runtime.service.vital import VITAL

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_COPY_THREADS = 1
# Longest that the page of requests waits for Redis.
_INDEX_S = 2.0
# Longest that saves and loads may take once the engine ends.
_LAST_CALLS_S = 3.0


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

    def first_layout(self, maker: ShelfFactory) -> OpaqueLayout:
        # Whatever else is on disk: it may be of another block size or model.
        return self._own_layout

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
            store = await self._kv.open_layout(self._own_layout)
            with store.reserve(save.keys, parent=save.parent) as reservation:
                spans = reservation.spans
                blocks = save.blocks[reservation.num_held :][: len(spans)]

                def work() -> list[int] | None:
                    self._pages.copy_out(blocks, spans)
                    return [xxh3_64_intdigest(span.data) for span in spans] if reading.end() else None

                checksums = await self._copier.run(work) if spans else []
                if checksums is not None:
                    reservation.commit(checksums)
        finally:
            reading.end()

    async def load(self, load: Load) -> None:
        """Fill the engine's blocks.

        Raises ``BlockMissing``, ``BlockCorrupt``, ``RemoteError``, ``NodeUnavailable``, ``TransferError``,
        ``OtherLayout``: their contents are undefined then.
        """
        store = await self._kv.open_layout(self._own_layout)
        if load.source:
            await self._kv.replicate(node_pb2.KvAddress.FromString(load.source), load.keys)
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


class _Life(ServiceContext):
    """Of a node that is a part of another process."""

    def __init__(self, on_ready: Callable[[], None]) -> None:
        super().__init__("engine")
        self._on_ready = on_ready

    def ready(self, **facts: object) -> None:
        where = facts["node_id"], facts["rpc_address"], facts["metrics_url"]
        log.info("keeps KV blocks as node %s at %s; its metrics: %s", *where)
        self._on_ready()


class NodeThread:
    """Runs an ``EngineNode`` in a thread. If it fails it is started again later, and calls fail meanwhile."""

    def __init__(self, make: Callable[[], EngineNode]) -> None:
        self._make = make
        self._node: EngineNode | None = None
        self._calls: set[asyncio.Task[Any]] = set()
        self._started = threading.Event()  # ready, or failed once
        self._thread = ServiceThread("KV store", self._live)

    def wait_started(self, timeout_s: float) -> None:
        """Wait until the node runs or its first start has failed."""
        self._started.wait(timeout_s)

    @property
    def is_running(self) -> bool:
        return self._node is not None

    def submit(self, call: Callable[[EngineNode], Coroutine[Any, Any, Result]]) -> Future[Result] | None:
        """Run a call of the node; None: it does not run. The call is cancelled if the node fails."""
        node = self._node
        if node is None:
            return None

        async def run() -> Result:
            task = asyncio.current_task()
            assert task is not None
            self._calls.add(task)
            try:
                return await call(node)
            finally:
                self._calls.discard(task)

        return asyncio.run_coroutine_threadsafe(run(), self._thread.loop)

    def close(self) -> None:
        """End the node: it leaves the index, and writes to disk what is only in memory."""
        self._thread.close()

    async def _live(self, ending: asyncio.Event) -> None:
        """Run one node until it fails, is drained, or this ends. Raises its error."""
        node = self._make()

        def on_ready() -> None:
            self._node = node
            self._started.set()

        life = _Life(on_ready)
        running = asyncio.ensure_future(node.run(life))
        told = asyncio.ensure_future(ending.wait())

        def on_error(loop: asyncio.AbstractEventLoop, facts: dict[str, Any]) -> None:
            loop.default_exception_handler(facts)
            if facts.get(VITAL):
                running.cancel()

        asyncio.get_running_loop().set_exception_handler(on_error)
        await asyncio.wait((running, told), return_when=asyncio.FIRST_COMPLETED)
        self._node = None
        if not running.done():
            # Saves that have begun are kept.
            await self._end_calls(_LAST_CALLS_S)
            life.draining.set()
            await asyncio.wait((running,))
        await self._end_calls(0)
        told.cancel()
        self._started.set()
        if running.cancelled():
            raise NodeFailed("a background task of the KV store ended; its error is above")
        running.result()

    async def _end_calls(self, within_s: float) -> None:
        if self._calls:
            await asyncio.wait(set(self._calls), timeout=within_s)
        calls = set(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
