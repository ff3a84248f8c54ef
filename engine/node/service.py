"""The gRPC services of every engine node: ``protos.Node``, ``Roles``, ``Experts`` and ``Adapters``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio

from moonpool.engine.adapters.residency import AdapterRef
from moonpool.engine.node.node import EngineNode
from moonpool.engine.sharding.expert_placement import ExpertPlacement
from moonpool.kvstore.blocks import keys as block_keys
from moonpool.kvstore.index.node_publisher import BATCH_BLOCKS
from moonpool.kvstore.index.redis.changes import batches
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import CONDUCTOR, OPERATOR

# A path may have 4,096 characters, and a message 4 MiB.
_PAGE_ADAPTERS = 512

RpcContext = grpc.aio.ServicerContext[Any, Any]


def node_servicers(node: EngineNode) -> list[rpc.Servicer]:
    """Return the services that every role has."""
    return [
        (node_pb2_grpc.add_NodeServicer_to_server, NodeService(node)),
        (node_pb2_grpc.add_RolesServicer_to_server, RoleService(node)),
        (node_pb2_grpc.add_ExpertsServicer_to_server, ExpertService(node)),
        (node_pb2_grpc.add_AdaptersServicer_to_server, AdapterService(node)),
    ]


class _Service:
    def __init__(self, node: EngineNode) -> None:
        self._node = node


class NodeService(_Service, node_pb2_grpc.NodeServicer):
    """``protos.Node``, on the node's loop."""

    async def Status(self, request: node_pb2.StatusRequest, context: RpcContext) -> node_pb2.NodeStatus:
        node = self._node
        stats = node.engine.stats()
        return node_pb2.NodeStatus(
            node_id=node.node_id,
            epoch=node.epoch,
            role=node.role,
            state=node.health.state(node.state),
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_queued_tokens=stats.num_queued_tokens,
            tiers=[
                node_pb2.TierStatus(
                    name="pool",
                    num_blocks=stats.num_blocks,
                    num_used_blocks=stats.num_used_blocks,
                    num_cached_blocks=stats.num_cached_blocks,
                    nbytes=stats.num_blocks * node.memory.layout.block_nbytes,
                ),
                *node.store.status(),
            ],
            kv=node.kv_address,
            profile=node_pb2.Profile(**node.profile()),
        )

    async def Drain(self, request: node_pb2.DrainRequest, context: RpcContext) -> node_pb2.DrainReply:
        self._node.draining.set()
        return node_pb2.DrainReply()

    async def Lease(self, request: node_pb2.LeaseRequest, context: RpcContext) -> node_pb2.LeaseReply:
        node = self._node
        keys = block_keys.unpack(request.keys)
        lease = await node.store.tiers.pin(keys, request.ttl_s, context.peer())
        # The index told the caller that these blocks are here, and they are not.
        node.publisher.retract(keys[len(lease.blocks) :])
        return node_pb2.LeaseReply(
            lease_id=lease.id,
            epoch=node.epoch,
            blocks=node.store.describe(lease),
            granted_s=lease.granted_s,
        )

    async def Renew(self, request: node_pb2.RenewRequest, context: RpcContext) -> node_pb2.RenewReply:
        granted_s = self._node.store.tiers.grants.renew(request.lease_id, request.ttl_s)
        return node_pb2.RenewReply(granted_s=granted_s)

    async def Release(self, request: node_pb2.ReleaseRequest, context: RpcContext) -> node_pb2.ReleaseReply:
        self._node.store.tiers.release(request.lease_id)
        return node_pb2.ReleaseReply()

    async def ListBlocks(
        self, request: node_pb2.ListBlocksRequest, context: RpcContext
    ) -> AsyncIterator[node_pb2.BlockListing]:
        node = self._node
        for changes in batches(list(node.store.tiers.blocks()), BATCH_BLOCKS):
            yield node_pb2.BlockListing(epoch=node.epoch, changes=changes)

    async def Replicate(
        self, request: node_pb2.ReplicateRequest, context: RpcContext
    ) -> node_pb2.ReplicateReply:
        node = self._node
        node.check_takes_work()
        if request.keys:
            process.require(CONDUCTOR, OPERATOR)
        keys, pool = block_keys.unpack(request.keys), node.engine.pool
        num_local = len(pool.match(keys))
        fetched = await node.exchange.fetch(request.source, keys)
        pool.release(fetched.block_ids)
        if request.surplus:
            pool.surplus.mark(keys[num_local : len(fetched.block_ids)])
        return node_pb2.ReplicateReply(
            num_blocks=len(fetched.block_ids),
            num_read=fetched.num_read,
            nbytes=fetched.nbytes,
            seconds=fetched.seconds,
        )

    async def Evict(self, request: node_pb2.EvictRequest, context: RpcContext) -> node_pb2.EvictReply:
        chain = block_keys.unpack(request.keys)
        num_blocks = 0
        while num_blocks < min(request.num_blocks, len(chain)):
            if not self._node.engine.pool.evict(chain[-1 - num_blocks]):
                break
            num_blocks += 1
        return node_pb2.EvictReply(num_blocks=num_blocks)

    async def Hint(self, request: node_pb2.HintRequest, context: RpcContext) -> node_pb2.HintReply:
        node = self._node
        chain, num_blocks = block_keys.unpack(request.keys), 0
        if request.drop:
            num_blocks = await node.store.hints.drop(chain)
        elif request.keep_s > 0:
            limit_blocks = request.tenant_cached_nbytes // node.memory.layout.block_nbytes
            if request.tenant_cached_nbytes and not limit_blocks:
                limit_blocks = 1
            num_blocks = node.store.hints.keep(request.tenant, chain, request.keep_s, limit_blocks)
        return node_pb2.HintReply(num_blocks=num_blocks)

    async def Cancel(self, request: node_pb2.CancelRequest, context: RpcContext) -> node_pb2.CancelReply:
        self._node.cancel((request.request_id, request.attempt))
        return node_pb2.CancelReply()


class RoleService(_Service, node_pb2_grpc.RolesServicer):
    """``protos.Roles``, on the node's loop."""

    async def Switch(self, request: node_pb2.SwitchRequest, context: RpcContext) -> node_pb2.SwitchReply:
        return node_pb2.SwitchReply(num_left=await self._node.switch(request.role, request.limit_s))


class ExpertService(_Service, node_pb2_grpc.ExpertsServicer):
    """``protos.Experts``, on the node's loop."""

    async def Load(
        self, request: node_pb2.ExpertLoadRequest, context: RpcContext
    ) -> node_pb2.ExpertLoadReply:
        engine = self._node.engine
        await engine.refresh_expert_load()
        load = engine.expert_load()
        return node_pb2.ExpertLoadReply(
            num_layers=load.shape[0],
            num_experts=load.shape[1],
            rows=load.flatten().tolist(),
            num_ranks=engine.plan.ep,
            skew=engine.expert_placement.skew(load),
        )

    async def Place(
        self, request: node_pb2.PlaceExpertsRequest, context: RpcContext
    ) -> node_pb2.PlaceExpertsReply:
        node, placement = self._node, ExpertPlacement.from_json(request.placement)
        num_layers = await node.engine.place_experts(placement)
        not_kept = await node.kept_experts.save(node.index, placement)
        return node_pb2.PlaceExpertsReply(num_layers=num_layers, not_kept=not_kept)


class AdapterService(_Service, node_pb2_grpc.AdaptersServicer):
    """``protos.Adapters``, on the node's loop."""

    async def Load(self, request: node_pb2.LoadAdapterRequest, context: RpcContext) -> node_pb2.Adapter:
        self._node.check_takes_work()
        ref = await self._node.adapters.register(
            request.name, Path(request.path), replace=request.replace, loaded_unix_s=request.loaded_unix_s
        )
        self._node.publisher.announce()
        return _message(ref)

    async def Unload(
        self, request: node_pb2.UnloadAdapterRequest, context: RpcContext
    ) -> node_pb2.UnloadAdapterReply:
        was_known = self._node.adapters.remove(request.name)
        self._node.publisher.announce()
        return node_pb2.UnloadAdapterReply(was_known=was_known)

    async def List(
        self, request: node_pb2.ListAdaptersRequest, context: RpcContext
    ) -> node_pb2.ListAdaptersReply:
        refs, more = self._node.adapters.page(request.after, _PAGE_ADAPTERS)
        return node_pb2.ListAdaptersReply(adapters=map(_message, refs), more=more)


def _message(ref: AdapterRef) -> node_pb2.Adapter:
    return node_pb2.Adapter(
        name=ref.name,
        digest=ref.digest,
        path=str(ref.path),
        rank=ref.rank,
        loaded_unix_s=ref.loaded_unix_s,
    )
