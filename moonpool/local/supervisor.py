"""The service by which a conductor starts and stops nodes of a local cluster."""

from __future__ import annotations

from typing import Any

from grpc.aio import ServicerContext

from moonpool.conductor.fleet.providers.provider import REFUSED
from moonpool.local.elastic_nodes import ElasticNodes
from moonpool.protos import fleet_pb2, fleet_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.security.process import Security

_HOST = "127.0.0.1"

Context = ServicerContext[Any, Any]


class OtherModel(MoonpoolError):
    """A node of another model was asked for. Nothing was changed."""

    code = "FAILED_PRECONDITION"
    failure = FailureClass.REQUEST


class Superseded(MoonpoolError):
    """Another conductor plans, or runs the rollout, by now. Nothing was changed."""

    code = "FAILED_PRECONDITION"
    failure = FailureClass.REQUEST


class Supervisor(fleet_pb2_grpc.SupervisorServicer):
    """Serves ``protos.Supervisor`` on this machine's loopback address, for conductors and operators."""

    def __init__(self, cluster: ElasticNodes) -> None:
        self._cluster = cluster
        self._server: rpc.Server | None = None
        # The latest ones. All models have one planner, and each has rollouts of its own.
        self._epochs: dict[tuple[str, str], int] = {}

    async def start(self, security: Security) -> str:
        """Listen; return the address. ``security``: of the cluster, which callers must belong to."""
        add = fleet_pb2_grpc.add_SupervisorServicer_to_server
        self._server, port = await rpc.serve([(add, self)], _HOST, 0, security=security)
        return f"{_HOST}:{port}"

    async def close(self) -> None:
        """Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            await server.stop(None)

    # ------------------------------------------------------------------ service Supervisor

    async def Start(self, request: fleet_pb2.StartNodeRequest, context: Context) -> fleet_pb2.StartNodeReply:
        self._check_model(request.model)
        self._check(request.fence, request.rollout, request.model or self._cluster.served_names[0])
        name = await self._cluster.start_node(request.role, list(request.settings), request.model)
        return fleet_pb2.StartNodeReply(node_id=name)

    async def Stop(self, request: fleet_pb2.StopNodeRequest, context: Context) -> fleet_pb2.StopNodeReply:
        self._check(request.fence, request.rollout, self._model_of(request.node_id))
        self._cluster.stop_node(request.node_id)
        return fleet_pb2.StopNodeReply()

    async def Switch(
        self, request: fleet_pb2.SwitchNodeRequest, context: Context
    ) -> fleet_pb2.SwitchNodeReply:
        self._check(request.fence)
        self._check_model(request.model)
        self._cluster.switch_node(request.node_id, request.role, request.model)
        return fleet_pb2.SwitchNodeReply()

    async def Settle(self, request: fleet_pb2.SettleRequest, context: Context) -> fleet_pb2.SettleReply:
        self._check_model(request.model)
        self._cluster.settle(list(request.settings), request.model)
        return fleet_pb2.SettleReply()

    async def List(self, request: fleet_pb2.ListNodesRequest, context: Context) -> fleet_pb2.ListNodesReply:
        return fleet_pb2.ListNodesReply(
            nodes=[
                fleet_pb2.SuppliedNode(
                    node_id=node.node_id,
                    role=node.role,
                    state=node.state,
                    reason=node.reason,
                    age_s=node.age_s,
                    drain_s=node.drain_s,
                )
                for node in self._cluster.supplied(request.model)
            ]
        )

    def _check_model(self, model: str) -> None:
        served = self._cluster.served_names
        if model not in ("", *served):
            names = ", ".join(served)
            raise OtherModel(f"this cluster serves {names}, not {model[:128]}: nothing was changed")

    def _model_of(self, node_id: str) -> str:
        """Empty: there is no such node."""
        cluster = self._cluster
        found = (
            model
            for model in cluster.served_names
            for node in cluster.supplied(model)
            if node.node_id == node_id and node.state != REFUSED
        )
        return next(found, "")

    def _check(self, planner: int, rollout: int = 0, model: str = "") -> None:
        """Refuse a conductor that lost its lease and does not know it yet. 0: no epoch. ``model``: of the
        rollout."""
        for key, epoch in ((("planner", ""), planner), (("rollout", model), rollout)):
            latest = self._epochs.get(key, 0)
            if 0 < epoch < latest:
                raise Superseded(
                    f"a {key[0]} of epoch {epoch} asks, and one of epoch {latest} has asked before: nothing "
                    "was changed"
                )
            self._epochs[key] = max(latest, epoch)
