"""The life of a store node: memory that peers can read, an entry in the index, two gRPC services."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from random import SystemRandom

from prometheus_client import REGISTRY

from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.client.connections import IndexDirectory, StoreNodes
from moonpool.kvstore.index.node_publisher import BATCH_BLOCKS, IndexPublisher
from moonpool.kvstore.index.redis.changes import batches
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import NodeLoad, NodeRecord
from moonpool.kvstore.objects.catalog import Catalogue
from moonpool.kvstore.objects.errors import NodeStopping
from moonpool.kvstore.objects.records import Records
from moonpool.kvstore.objects.shelf import ObjectShelf
from moonpool.kvstore.remote.peer_leases import RemoteLeases
from moonpool.kvstore.store import TieredStore
from moonpool.kvstore.store.collector import observe_stores
from moonpool.kvstore.store_node.kv_shelf import KvShelf
from moonpool.kvstore.store_node.reconciler import EVERY_S, Reconciler
from moonpool.kvstore.store_node.record_keeper import RecordKeeper
from moonpool.kvstore.store_node.service import Context, StoreService
from moonpool.kvstore.store_node.shelves import ShelfFactory
from moonpool.kvstore.store_node.verification import Shelf
from moonpool.protos import node_pb2, node_pb2_grpc, store_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.agreement import agreement_of
from moonpool.runtime.config.options import Config
from moonpool.runtime.health.monitor import HealthMonitor
from moonpool.runtime.machine.description import describe_machine, own_version
from moonpool.runtime.network.sockets import host_port
from moonpool.runtime.observing.metrics_server import serve_metrics
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import CONDUCTOR, OPERATOR
from moonpool.runtime.service.lifecycle import ServiceContext
from moonpool.runtime.service.vital import vital
from moonpool.transfer import Region, TransferAgent
from moonpool.transfer.connections.descriptor import boot_id

SWEEP_INTERVAL_S = 0.5
# After Redis lost its data, every node that runs notices within one turn and restores within the next ones.
_RESTORING_TURNS = 4
# Longest that a node that is told to stop waits for its readers and writers.
_DRAIN_S = 5.0


class StoreNode(node_pb2_grpc.NodeServicer):
    """``await run(context)`` starts it and returns when it was told to stop. One event loop."""

    role = "store"

    def __init__(self, config: Config) -> None:
        self.config = config
        self.node_id = config.node.id or f"{self.role}-{config.node.host}-{os.getpid()}"
        self.epoch = time.time_ns()
        self.state = "starting"
        self._rpc_address = self._metrics_url = ""
        self._draining = asyncio.Event()
        self._objects: ObjectShelf | None = None
        self._object_store: TieredStore | None = None
        self._keeper: RecordKeeper | None = None
        self._reconciler: Reconciler | None = None
        self._publisher: IndexPublisher | None = None

    def first_layout(self, maker: ShelfFactory) -> OpaqueLayout | None:
        """The layout of KV blocks to begin with; None: that of the first blocks that are read."""
        return maker.stored_layout()

    def pages(self) -> Mapping[str, Callable[[], bytes]]:
        """JSON pages beside ``/metrics``, by path; called on a thread."""
        return {}

    async def run(self, context: ServiceContext) -> None:
        """Start, announce, serve until told to stop, leave the index. Raises what prevents the start."""
        async with AsyncExitStack() as stack:
            await self._start(stack)
            context.ready(node_id=self.node_id, rpc_address=self._rpc_address, metrics_url=self._metrics_url)
            waits = [asyncio.ensure_future(each.wait()) for each in (context.draining, self._draining)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            self.state = "draining"
            await self._drain()

    async def _start(self, stack: AsyncExitStack) -> None:
        """``stack`` ends everything started here, in reverse order."""
        config = self.config
        self._health = HealthMonitor(config.health, disk=config.store.ssd.path)
        stack.callback(self._health.close)
        self._health.start()
        maker = ShelfFactory.of(config, self.node_id)
        agent = await TransferAgent.start(config.transfer, agent_id=self.node_id, epoch=self.epoch)
        self._agent = await stack.enter_async_context(agent)
        leases = RemoteLeases(config.transfer.deadline_s)
        stack.push_async_callback(leases.close)
        kv_region = agent.allocate(config.store.host.capacity_nbytes, "kv")

        async def make_kv(layout: OpaqueLayout) -> TieredStore:
            return await maker.kv(layout, kv_region, self._kv_changed)

        self._kv = KvShelf(
            self.node_id, kv_region, make_kv, agent, leases, deadline_s=config.transfer.deadline_s
        )
        stack.push_async_callback(self._kv.close, config.node.drain_s)
        if (first := self.first_layout(maker)) is not None:
            await self._kv.open_layout(first)
        object_region = await self._start_objects(stack, maker)
        service = StoreService(
            self.node_id,
            self._objects,
            self._keeper,
            object_region,
            agent,
            deadline_s=config.transfer.deadline_s,
            check_takes_work=self._check_takes_work,
            shelves=self._shelves,
        )
        server, port = await rpc.serve(
            [
                (node_pb2_grpc.add_NodeServicer_to_server, self),
                (store_pb2_grpc.add_StoreServicer_to_server, service),
            ],
            config.node.host,
            config.node.port,
            direct=True,
        )
        stack.push_async_callback(server.stop, 0.5)
        self._rpc_address = host_port(config.node.host, port)
        metrics = serve_metrics(
            config.node.host,
            config.node.metrics_port,
            keyed=bool(config.conductor.tenants_path),
            pages=self.pages(),
        )
        stack.callback(metrics.close)
        self._metrics_url = f"http://{host_port(config.node.host, metrics.port)}/metrics"
        observed = observe_stores(lambda: [(shelf.name, shelf.store) for shelf in self._shelves()])
        stack.callback(REGISTRY.unregister, observed)
        if self._reconciler is not None:
            # Before anybody is sent here: what was only in memory is gone.
            await self._reconciler.turn()
        self.state = "ready"
        await self._start_publishing(stack)
        sweeper = vital(self._sweep(), "sweep")
        stack.callback(sweeper.cancel)
        if self._reconciler is not None:
            reconciling = vital(self._reconciler.run(), "reconcile")
            stack.callback(reconciling.cancel)

    async def _start_objects(self, stack: AsyncExitStack, maker: ShelfFactory) -> Region | None:
        own = self.config.store_node
        if not own.object_nbytes:
            return None
        region = self._agent.allocate(own.object_nbytes, "objects")
        self._object_store = await maker.objects(region, self._chunk_changed)
        catalogue = None if maker.catalogue is None else Catalogue(maker.catalogue)
        self._objects = ObjectShelf(
            self.node_id,
            self._object_store,
            own.chunk_nbytes,
            catalogue=catalogue,
            tenant_nbytes=own.tenant_nbytes,
            clock=time.monotonic,
            rng=SystemRandom(),
        )
        stack.push_async_callback(self._objects.close)
        await self._objects.start()
        await self._start_records(stack, self._objects, catalogue)
        return region

    async def _start_records(
        self, stack: AsyncExitStack, objects: ObjectShelf, catalogue: Catalogue | None
    ) -> None:
        """The part of the node that reads and changes the records of objects."""
        index, deadline_s = self.config.index, self.config.transfer.deadline_s
        redis = connect(index.redis_url)
        stack.push_async_callback(redis.aclose)
        records = Records(
            KVIndex(redis, index.namespace),
            restoring_s=_RESTORING_TURNS * EVERY_S,
            generations=None if catalogue is None else catalogue.generations,
        )
        if catalogue is not None:
            records.on_generation = catalogue.remember_generation
        directory = IndexDirectory(index.redis_url, index.namespace)
        stack.push_async_callback(directory.aclose)
        peers = StoreNodes(directory, self._agent, index.redis_url, deadline_s=deadline_s)
        stack.push_async_callback(peers.close)
        self._keeper = RecordKeeper(self.node_id, objects, records, peers)
        stack.push_async_callback(self._keeper.close)
        self._reconciler = Reconciler(self.node_id, objects, self._keeper, peers, self._kv_address)

    async def _start_publishing(self, stack: AsyncExitStack) -> None:
        index = self.config.index
        self._identity = NodeRecord(
            node_id=self.node_id,
            epoch=self.epoch,
            role=self.role,
            host=self.config.node.host,
            pid=os.getpid(),
            rpc_address=self._rpc_address,
            metrics_url=self._metrics_url,
            region=self.config.node.region,
            zone=self.config.node.zone,
            extra={
                "machine": describe_machine(),
                "version": own_version(),
                "options": agreement_of(self.config),
                "host_id": self.config.node.host_id or boot_id() or self.node_id,
            },
        )
        redis = connect(index.redis_url)
        stack.push_async_callback(redis.aclose)
        self.index = KVIndex(redis, index.namespace)
        self._publisher = IndexPublisher(self.index, self.record, index, lambda: self._kv.blocks())
        stack.push_async_callback(self._publisher.close)
        await self._publisher.start()

    async def _drain(self) -> None:
        assert self._publisher is not None
        self._publisher.announce()
        deadline_s = time.monotonic() + min(_DRAIN_S, self.config.node.drain_s)
        # Polled: an event would cost every lease of the node's life, for its last seconds.
        while self._num_users() and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    def _num_users(self) -> int:
        num_users = 0 if self._objects is None else self._objects.num_users
        return num_users + (0 if self._kv.store is None else self._kv.store.stats.num_leases)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            self._kv.sweep()
            if self._health.changed() and self._publisher is not None:
                self._publisher.announce()
            if self._objects is not None:
                self._objects.sweep()

    def _check_takes_work(self) -> None:
        if self.state != "ready":
            raise NodeStopping(self.node_id)

    def record(self) -> NodeRecord:
        num_blocks = num_held = 0
        if self._kv.store is not None:
            num_blocks, num_held = self._kv.store.host.capacity, len(self._kv.store.host)
        return self._identity.current(
            self._health.state(self.state),
            self._health.judgement.reasons,
            self._health.readings(),
            layout=self._kv.layout.fingerprint.hex() if self._kv.layout is not None else "",
            kv_address=self._kv_address().SerializeToString(),
            load=NodeLoad(num_blocks=num_blocks, free_blocks=num_blocks - num_held),
            links=self._agent.bandwidth(),
        )

    def _kv_address(self) -> node_pb2.KvAddress:
        layout = self._kv.layout
        return node_pb2.KvAddress(
            node_id=self.node_id,
            epoch=self.epoch,
            rpc_address=self._rpc_address,
            agent=self._agent.describe().pack(),
            layout_fingerprint=layout.fingerprint if layout is not None else b"",
            block_nbytes=layout.block_nbytes if layout is not None else 0,
        )

    def _kv_changed(self, key: BlockKey, tier: Tier | None) -> None:
        if self._publisher is None:
            return  # still starting: everything is published then
        if tier is None:
            self._publisher.removed(key)
        else:
            self._publisher.stored(key, tier)

    def _chunk_changed(self, key: BlockKey, tier: Tier | None) -> None:
        if self._objects is not None:
            self._objects.inventory.chunk_changed(key, tier)

    def _shelves(self) -> list[Shelf]:
        stores = (("kv", self._kv.store), ("objects", self._object_store))
        return [Shelf(name, store) for name, store in stores if store is not None]

    async def Status(self, request: node_pb2.StatusRequest, context: Context) -> node_pb2.NodeStatus:
        return node_pb2.NodeStatus(
            node_id=self.node_id,
            epoch=self.epoch,
            role=self.role,
            state=self._health.state(self.state),
            tiers=[
                node_pb2.TierStatus(
                    name=f"{shelf.name} {tier.name}",
                    num_blocks=tier.capacity_blocks,
                    num_used_blocks=tier.num_pinned,
                    num_cached_blocks=tier.num_blocks,
                )
                for shelf in self._shelves()
                for tier in shelf.store.stats.tiers
            ],
            kv=self._kv_address(),
        )

    async def Drain(self, request: node_pb2.DrainRequest, context: Context) -> node_pb2.DrainReply:
        self._draining.set()
        return node_pb2.DrainReply()

    async def Lease(self, request: node_pb2.LeaseRequest, context: Context) -> node_pb2.LeaseReply:
        keys = block_keys.unpack(request.keys)
        lease, blocks = await self._kv.lease(keys, request.ttl_s, context.peer())
        if self._publisher is not None:
            # The index told the caller that they are here.
            self._publisher.retract(keys[len(blocks.offset) :])
        return node_pb2.LeaseReply(
            lease_id=lease.id, epoch=self.epoch, blocks=blocks, granted_s=lease.granted_s
        )

    async def Renew(self, request: node_pb2.RenewRequest, context: Context) -> node_pb2.RenewReply:
        store = self._kv.store
        granted_s = 0.0 if store is None else store.grants.renew(request.lease_id, request.ttl_s)
        return node_pb2.RenewReply(granted_s=granted_s)

    async def Release(self, request: node_pb2.ReleaseRequest, context: Context) -> node_pb2.ReleaseReply:
        self._kv.release(request.lease_id)
        return node_pb2.ReleaseReply()

    async def ListBlocks(
        self, request: node_pb2.ListBlocksRequest, context: Context
    ) -> AsyncIterator[node_pb2.BlockListing]:
        for changes in batches(list(self._kv.blocks()), BATCH_BLOCKS):
            yield node_pb2.BlockListing(epoch=self.epoch, changes=changes)

    async def Replicate(
        self, request: node_pb2.ReplicateRequest, context: Context
    ) -> node_pb2.ReplicateReply:
        self._check_takes_work()
        process.require(CONDUCTOR, OPERATOR)
        layout = self._kv.layout
        keys = block_keys.unpack(request.keys)
        done = await self._kv.replicate(request.source, keys, surplus=request.surplus)
        if self._kv.layout != layout and self._publisher is not None:
            # Conductors must know how to read from here before they see its blocks.
            self._publisher.announce()
        return done

    async def Evict(self, request: node_pb2.EvictRequest, context: Context) -> node_pb2.EvictReply:
        # There is no pool here.
        return node_pb2.EvictReply()

    async def Hint(self, request: node_pb2.HintRequest, context: Context) -> node_pb2.HintReply:
        # No requests run here.
        return node_pb2.HintReply()

    async def Cancel(self, request: node_pb2.CancelRequest, context: Context) -> node_pb2.CancelReply:
        # No requests run here.
        return node_pb2.CancelReply()
