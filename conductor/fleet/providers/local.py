"""Nodes of one machine: children of ``moonpool up``, which serves ``protos.Supervisor``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from moonpool.conductor.fleet.errors import PlannerOutdated, ProviderFailed
from moonpool.conductor.fleet.providers.provider import SuppliedNode
from moonpool.protos import fleet_pb2, fleet_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.errors import MoonpoolError, RemoteError

_TIMEOUT_S = 5.0
# As the supervisor says it.
_OUTDATED = re.compile(r"a planner of epoch \d+ asks, and one of epoch (\d+) has asked before")


class LocalProvider:
    """A client of the supervisor at ``address``. Its calls are signed as all others of this process."""

    name = "local"

    def __init__(self, address: str, model: str = "") -> None:
        """``model``: the served name of its nodes; empty: all of the cluster."""
        self._address = address
        self._model = model
        self._channel = rpc.channel(address)
        self._supervisor = fleet_pb2_grpc.SupervisorStub(self._channel)

    async def start(
        self, role: str, model: str, fence: int = 0, *, settings: Sequence[str] = (), rollout: int = 0
    ) -> str:
        request = fleet_pb2.StartNodeRequest(
            role=role, model=model, fence=fence, settings=settings, rollout=rollout
        )
        with self._failures(f"a {role} node was not started"):
            reply = await self._supervisor.Start(request, timeout=_TIMEOUT_S)
        return str(reply.node_id)

    async def settle(self, settings: Sequence[str]) -> None:
        with self._failures("later nodes will not have the new settings"):
            request = fleet_pb2.SettleRequest(settings=settings, model=self._model)
            await self._supervisor.Settle(request, timeout=_TIMEOUT_S)

    async def stop(self, node_id: str, fence: int = 0, *, rollout: int = 0) -> None:
        request = fleet_pb2.StopNodeRequest(node_id=node_id, fence=fence, rollout=rollout)
        with self._failures(f"{node_id} was not stopped"):
            await self._supervisor.Stop(request, timeout=_TIMEOUT_S)

    async def switch(self, node_id: str, role: str, model: str, fence: int = 0) -> None:
        request = fleet_pb2.SwitchNodeRequest(node_id=node_id, role=role, model=model, fence=fence)
        with self._failures(f"{node_id} does not change its model"):
            await self._supervisor.Switch(request, timeout=_TIMEOUT_S)

    async def list(self) -> Sequence[SuppliedNode]:
        with self._failures("the supplied nodes are unknown"):
            reply = await self._supervisor.List(
                fleet_pb2.ListNodesRequest(model=self._model), timeout=_TIMEOUT_S
            )
        return [
            SuppliedNode(node.node_id, node.role, node.state, node.reason, node.age_s, drain_s=node.drain_s)
            for node in reply.nodes
        ]

    async def close(self) -> None:
        await self._channel.close(None)

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        try:
            with rpc.node_errors(f"supervisor at {self._address}"):
                yield
        except MoonpoolError as error:
            if isinstance(error, RemoteError) and (told := _OUTDATED.search(error.details)):
                raise PlannerOutdated(f"{what}: {error}", int(told[1])) from error
            raise ProviderFailed(f"{what}: {error}") from error
