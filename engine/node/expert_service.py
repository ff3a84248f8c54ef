"""What a node tells of its experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc.aio

from moonpool.protos import node_pb2, node_pb2_grpc

if TYPE_CHECKING:
    from moonpool.engine.node.node import EngineNode


class ExpertService(node_pb2_grpc.ExpertsServicer):
    """Serves ``protos.Experts`` for one node, of whichever life it is in, on its loop."""

    def __init__(self, node: EngineNode) -> None:
        self._node = node

    async def Load(
        self, request: node_pb2.ExpertLoadRequest, context: grpc.aio.ServicerContext[Any, Any]
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
