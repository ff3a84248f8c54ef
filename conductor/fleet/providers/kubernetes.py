"""Nodes in pods: the scale of one Deployment or LeaderWorkerSet per role.

The label ``app.kubernetes.io/component`` of the workload and of its pods names the role. A pod's name is its
node's id (``node.id=$(POD_NAME)``). A pod without readiness probe is ready when its containers run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from moonpool.conductor.fleet.errors import ProviderFailed
from moonpool.conductor.fleet.providers.provider import FAILED, RUNNING, STARTING, STOPPING, SuppliedNode
from moonpool.runtime.cancellation import outlast
from moonpool.runtime.config.options import FleetOptions
from moonpool.runtime.errors import ConfigError

if TYPE_CHECKING:
    from moonpool.conductor.fleet.providers.kubernetes_api import KubernetesApi, Pod, Workload

log = logging.getLogger(__name__)

# Until a pod of a workload that has grown is there. It is made before it is scheduled.
_APPEARS_S = 10.0
_LOOK_S = 0.1


class KubernetesProvider:
    """Scales the workloads of ``options.namespace``.

    Each change is of the number of replicas that was listed before the epoch is checked, and fails where
    another one has changed it since. Kubernetes chooses pods that are not ready before the one that was asked
    for.
    """

    name = "kubernetes"

    def __init__(self, options: FleetOptions) -> None:
        """Raises ``ConfigError``: the official client is not installed."""
        if find_spec("kubernetes") is None:
            raise ConfigError(
                "fleet.provider=kubernetes needs Kubernetes' client: pip install 'moonpool[kubernetes]'",
                "fleet.provider",
            )
        self._options = options
        self._connected: KubernetesApi | None = None
        self._connecting = asyncio.Lock()

    async def start(self, role: str, model: str, fence: int = 0) -> str:
        api = await self._api()
        workload = await self._workload(api, role)
        before = {pod.name for pod in await api.pods()}
        await api.check(fence)
        growing = asyncio.ensure_future(api.scale(workload, 1))
        try:
            await outlast(growing)
            async with asyncio.timeout(_APPEARS_S):
                while not (new := _new(workload, before, await api.pods())):  # noqa: ASYNC110 (in another process)
                    await asyncio.sleep(_LOOK_S)
            return new
        except asyncio.CancelledError:
            if growing.exception() is None:
                try:
                    await api.scale(await self._workload(api, role), -1)
                except ProviderFailed as error:  # it must not take the place of the cancellation
                    log.warning("%s was left with a replica too many: %s", workload.name, error)
            raise
        except TimeoutError:
            if growing.exception() is not None:
                raise
            grown = await self._workload(api, role)
            # Else the next try would leave one more behind.
            await api.scale(grown, -1)
            why = grown.trouble or f"it made no pod within {_APPEARS_S:g} s"
            raise ProviderFailed(f"a {role} node was not started: {workload.name}: {why}") from None

    async def stop(self, node_id: str, fence: int = 0) -> None:
        api = await self._api()
        await api.check(fence)
        pods = await api.pods()
        pod = next((pod for pod in pods if pod.name == node_id), None)
        if pod is None or pod.ended or pod.deleted:
            return
        workload = await self._workload(api, pod.role)
        if not workload.owns(pod):
            kind = "Deployment" if pod.group < 0 else "LeaderWorkerSet"
            raise ProviderFailed(
                f"{node_id} was not stopped: it is of a {kind}, and {workload.name} is no {kind}; give that "
                f"{kind} the labels {self._options.selector},app.kubernetes.io/component={pod.role}"
            )
        if _is_stopping(pod, workload, pods):
            return
        if pod.group < 0:
            await api.mark(pod)
        elif not _can_stop(pod, workload):
            raise ProviderFailed(
                f"{node_id} was not stopped: of a LeaderWorkerSet the last group goes first, here "
                f"{workload.name}-{workload.replicas - 1}"
            )
        await api.scale(workload, -1)

    async def list(self) -> Sequence[SuppliedNode]:
        api = await self._api()
        workloads, pods = await api.workloads(), await api.pods()
        return [_supplied(pod, next((one for one in workloads if one.owns(pod)), None), pods) for pod in pods]

    async def close(self) -> None:
        api, self._connected = self._connected, None
        if api is not None:
            await api.close()

    async def _api(self) -> KubernetesApi:
        async with self._connecting:
            if self._connected is None:
                module = "moonpool.conductor.fleet.providers.kubernetes_api"
                # It takes a second, in which the conductor serves.
                connect = (await asyncio.to_thread(import_module, module)).KubernetesApi.connect
                self._connected = await connect(self._options)
            return self._connected

    async def _workload(self, api: KubernetesApi, role: str) -> Workload:
        found = [one for one in await api.workloads() if one.role == role]
        if len(found) == 1:
            return found[0]
        where = f"namespace {self._options.namespace} with the labels {self._options.selector}"
        if not found:
            raise ProviderFailed(f"there is no Deployment or LeaderWorkerSet of {role} nodes in {where}")
        names = ", ".join(one.name for one in found)
        raise ProviderFailed(f"several workloads have {role} nodes in {where}: {names}; set fleet.selector")


def _new(workload: Workload, before: set[str], pods: Sequence[Pod]) -> str:
    return next((pod.name for pod in pods if workload.owns(pod) and pod.name not in before), "")


def _can_stop(pod: Pod, workload: Workload) -> bool:
    return pod.group < 0 or pod.group == workload.replicas - 1


def _is_stopping(pod: Pod, workload: Workload, pods: Sequence[Pod]) -> bool:
    """Whether it ends, or will as soon as Kubernetes gets to it."""
    if pod.deleted:
        return True
    if pod.group >= 0:
        return pod.group >= workload.replicas
    live = sum(workload.owns(one) and not one.deleted and not one.ended for one in pods)
    return pod.marked and live > workload.replicas


def _supplied(pod: Pod, workload: Workload | None, pods: Sequence[Pod]) -> SuppliedNode:
    state = RUNNING if pod.ready else STARTING
    if workload is None or _is_stopping(pod, workload, pods):
        state = STOPPING
    elif pod.ended:
        state = FAILED  # its workload has another one in its place
    can_stop = workload is not None and _can_stop(pod, workload)
    return SuppliedNode(pod.name, pod.role, state, pod.trouble, pod.age_s, can_stop)
