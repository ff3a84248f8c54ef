"""Connections between the nodes, made when a node joins: no request waits for a first connection."""

from __future__ import annotations

import asyncio
import logging

from moonpool.engine.prefix_cache.peer_exchange import PeerExchange
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import ROLES
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.errors import MoonpoolError

log = logging.getLogger(__name__)

LIMIT_S = 3.0
# In a large fleet the other connections are made by the first request that needs them.
MAX_NODES = 16


async def connect_nodes(index: KVIndex, exchange: PeerExchange, own: node_pb2.KvAddress) -> None:
    """Connect to the nodes of the index, and have them connect to ``own``, within ``LIMIT_S``.

    A node that cannot be reached is logged: a request that needs it tries again.
    """

    async def connect(other: node_pb2.KvAddress) -> None:
        try:
            await exchange.connect(other)
            stub = node_pb2_grpc.NodeStub(exchange.channel(other.rpc_address))
            with rpc.node_errors(other.node_id):
                # They fetch no block, and are connected then.
                await stub.Replicate(node_pb2.ReplicateRequest(source=own), timeout=LIMIT_S)
        except MoonpoolError as error:
            log.info("not connected to %s yet: %s", other.node_id, error)

    try:
        async with asyncio.timeout(LIMIT_S):
            records = (await index.nodes()).values()
            others = [node_pb2.KvAddress.FromString(one.kv_address) for one in records if one.role in ROLES]
            fit = [
                other
                for other in others
                if other.node_id != own.node_id and other.layout_fingerprint == own.layout_fingerprint
            ]
            await asyncio.gather(*map(connect, fit[:MAX_NODES]))
    except (MoonpoolError, TimeoutError) as error:
        log.info("not connected to all nodes within %g s: %r", LIMIT_S, error)
