"""The calls to Kubernetes that its provider makes, and what of their replies it reads.

Imports the official client, which takes a second: see ``kubernetes.KubernetesProvider``.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio import config as credentials
from kubernetes.aio.client import ApiClient, Configuration, CoordinationV1Api, CoreV1Api, CustomObjectsApi
from kubernetes.aio.client.exceptions import ApiException

from moonpool.conductor.fleet.errors import PlannerOutdated, ProviderFailed
from moonpool.runtime.config.options import FleetOptions

ROLE_LABEL = "app.kubernetes.io/component"
_COST = "controller.kubernetes.io/pod-deletion-cost"
_LEAST_COST = str(-(2**31 - 1))
_LWS_LABELS = "leaderworkerset.sigs.k8s.io"
_TIMEOUT_S = 5.0
_TRIES = 8


@dataclass(frozen=True, slots=True)
class Kind:
    group: str
    plural: str
    version: str = "v1"


DEPLOYMENT = Kind("apps", "deployments")
LEADER_WORKER_SET = Kind("leaderworkerset.x-k8s.io", "leaderworkersets")


@dataclass(frozen=True, slots=True)
class Workload:
    """What has pods of one role. ``trouble``: why it makes no pods; empty: it does."""

    kind: Kind
    name: str
    role: str
    replicas: int
    trouble: str

    def owns(self, pod: Pod) -> bool:
        """Whether ``pod`` is of this kind and role."""
        return pod.role == self.role and (pod.group >= 0) == (self.kind == LEADER_WORKER_SET)


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod with a node; of a LeaderWorkerSet the first one of each group. ``group``: -1 in a Deployment.

    ``marked``: it goes first when its Deployment shrinks. ``trouble``: why it does not get ready.
    """

    name: str
    role: str
    group: int
    age_s: float
    ready: bool
    ended: bool
    deleted: bool
    marked: bool
    trouble: str


class KubernetesApi:
    """One namespace. Every method raises ``ProviderFailed``."""

    def __init__(self, client: ApiClient, options: FleetOptions) -> None:
        self._client = client
        self._pods = CoreV1Api(client)
        # Serves Deployments, too: both kinds have the same calls, and replies in plain JSON types.
        self._objects = CustomObjectsApi(client)
        self._leases = CoordinationV1Api(client)
        self._namespace = options.namespace
        self._selector = options.selector
        # Fleets of different labels in a namespace have planners of their own.
        self._fence = f"moonpool-planner-{hashlib.sha256(options.selector.encode()).hexdigest()[:12]}"

    @classmethod
    async def connect(cls, options: FleetOptions) -> KubernetesApi:
        """Read the credentials; nothing is sent."""
        configuration = Configuration()
        try:
            if options.kubeconfig:
                await credentials.load_kube_config(  # type: ignore[no-untyped-call]
                    options.kubeconfig, client_configuration=configuration, persist_config=False
                )
            else:
                credentials.load_incluster_config(  # type: ignore[no-untyped-call]
                    client_configuration=configuration
                )
        except (credentials.ConfigException, OSError, ValueError) as error:
            where = options.kubeconfig or "this pod's service account; elsewhere, set fleet.kubeconfig"
            raise ProviderFailed(f"no credentials of Kubernetes in {where}: {error}") from error
        return cls(ApiClient(configuration), options)

    async def close(self) -> None:
        """Idempotent."""
        await self._client.close()  # type: ignore[no-untyped-call]

    async def workloads(self) -> Sequence[Workload]:
        """Return the Deployments and LeaderWorkerSets that have a role."""
        found = []
        for kind in (DEPLOYMENT, LEADER_WORKER_SET):
            try:
                with _failures(f"{kind.plural} of namespace {self._namespace}"):
                    listed: Any = await self._objects.list_namespaced_custom_object(
                        *(kind.group, kind.version, self._namespace, kind.plural),
                        label_selector=f"{self._selector},{ROLE_LABEL}",
                        _request_timeout=_TIMEOUT_S,
                    )
            except KindMissing:
                continue  # LeaderWorkerSets are an extension
            found += [_workload(kind, one) for one in listed["items"]]
        return found

    async def pods(self) -> Sequence[Pod]:
        with _failures(f"pods of namespace {self._namespace}"):
            listed: Any = await self._pods.list_namespaced_pod(
                self._namespace,
                label_selector=f"{self._selector},{ROLE_LABEL}",
                _request_timeout=_TIMEOUT_S,
            )
        worker = f"{_LWS_LABELS}/worker-index"
        return [_pod(one) for one in listed.items if (one.metadata.labels or {}).get(worker, "0") == "0"]

    async def mark(self, pod: Pod) -> None:
        """Have ``pod`` go first when its Deployment shrinks. One that is gone is left alone."""
        body = {"metadata": {"annotations": {_COST: _LEAST_COST}}}
        try:
            with _failures(f"pod {pod.name}"):
                await self._pods.patch_namespaced_pod(
                    pod.name,
                    self._namespace,
                    body,
                    _content_type="application/merge-patch+json",
                    _request_timeout=_TIMEOUT_S,
                )
        except KindMissing:
            return

    async def check(self, fence: int) -> None:
        """Count the epoch of a planner, for all conductors together: the transitions of a Lease that is ours.

        Raises ``PlannerOutdated`` for one older than has asked before. 0: no planner.
        """
        for attempt in range(_TRIES if fence else 0):
            with _failures(f"the Lease {self._fence}"):
                try:
                    latest = await self._count(fence)
                except ApiException as error:
                    if error.status != 409 or attempt == _TRIES - 1:
                        raise
                    continue  # another conductor has written it meanwhile
            if latest > fence:
                raise PlannerOutdated(
                    f"a planner of epoch {fence} asks, and one of epoch {latest} has asked before: nothing "
                    "was changed",
                    latest,
                )
            return

    async def _count(self, epoch: int) -> int:
        """Return the latest epoch with ``epoch`` counted. Raises ``ApiException``."""
        where = (self._fence, self._namespace)
        try:
            lease: Any = await self._leases.read_namespaced_lease(*where, _request_timeout=_TIMEOUT_S)
        except ApiException as error:
            if error.status != 404:
                raise
            made: Any = {"metadata": {"name": self._fence}, "spec": {"leaseTransitions": epoch}}
            await self._leases.create_namespaced_lease(self._namespace, made, _request_timeout=_TIMEOUT_S)
            return epoch
        latest = int(lease.spec.lease_transitions or 0)
        if latest < epoch:
            lease.spec.lease_transitions = epoch
            # Refused with 409 where another one has written it since it was read.
            await self._leases.replace_namespaced_lease(*where, lease, _request_timeout=_TIMEOUT_S)
        return max(latest, epoch)

    async def scale(self, workload: Workload, change: int) -> None:
        """Add ``change`` to the replicas of ``workload``, which had ``workload.replicas``.

        If their number was changed meanwhile, nothing is changed and ``ProviderFailed`` is raised.
        A conflict with any other change is tried again.
        """
        where = (
            *(workload.kind.group, workload.kind.version, self._namespace),
            *(workload.kind.plural, workload.name),
        )
        for attempt in range(_TRIES):
            with _failures(f"the scale of {workload.name}"):
                scale: Any = await self._objects.get_namespaced_custom_object_scale(
                    *where, _request_timeout=_TIMEOUT_S
                )
                replicas = scale["spec"].get("replicas", 0)
                if replicas != workload.replicas:
                    raise ProviderFailed(
                        f"{workload.name} had {workload.replicas} replicas and has {replicas} now: "
                        "something else scales it, too; nothing was changed"
                    )
                scale["spec"]["replicas"] = max(replicas + change, 0)
                try:
                    await self._objects.replace_namespaced_custom_object_scale(
                        *where, scale, _request_timeout=_TIMEOUT_S
                    )
                    return
                except ApiException as error:
                    if error.status != 409 or attempt == _TRIES - 1:
                        raise


class KindMissing(ProviderFailed):
    """Kubernetes has no such object, or no objects of this kind."""


@contextmanager
def _failures(what: str) -> Iterator[None]:
    try:
        yield
    except ApiException as error:
        text = f"{what}: Kubernetes answers {error.status}: {_message(error)}"
        if error.status == 404:
            raise KindMissing(text) from error
        if error.status == 403:
            text += " (the rights that are needed: deploy/kubernetes/provider/rbac.yaml)"
        raise ProviderFailed(text) from error
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise ProviderFailed(f"{what}: Kubernetes does not answer: {error or 'timeout'}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProviderFailed(f"{what}: the reply of Kubernetes is not understood: {error}") from error


def _message(error: ApiException) -> str:
    try:
        return str(json.loads(error.body or "")["message"])
    except (ValueError, KeyError, TypeError):
        return str(error.reason)


def _workload(kind: Kind, found: Mapping[str, Any]) -> Workload:
    conditions = found.get("status", {}).get("conditions", ())
    failed = {"type": "ReplicaFailure", "status": "True"}
    trouble = next((one.get("message", "") for one in conditions if failed.items() <= one.items()), "")
    metadata = found["metadata"]
    # Kubernetes fills the number in; a custom resource may leave it out.
    replicas = found["spec"].get("replicas", 1)
    return Workload(kind, metadata["name"], metadata["labels"][ROLE_LABEL], replicas, trouble)


def _pod(found: Any) -> Pod:  # V1Pod, of which an API server leaves nothing out that is read here
    metadata, status = found.metadata, found.status
    labels: Mapping[str, str] = metadata.labels or {}
    conditions = {one.type: one for one in status.conditions or ()}
    ready, scheduled = conditions.get("Ready"), conditions.get("PodScheduled")
    trouble = ""
    if scheduled is not None and scheduled.status == "False":
        trouble = scheduled.message or scheduled.reason or ""
    for container in status.container_statuses or ():
        waiting = container.state.waiting if container.state is not None else None
        if waiting is not None and waiting.reason != "ContainerCreating":
            trouble = f"{waiting.reason}: {waiting.message or ''}".removesuffix(": ")
    ended = status.phase in ("Failed", "Succeeded")
    if ended:
        trouble = status.message or status.reason or f"it ended ({status.phase})"
    return Pod(
        metadata.name,
        labels[ROLE_LABEL],
        int(labels.get(f"{_LWS_LABELS}/group-index", "-1")),
        max(time.time() - metadata.creation_timestamp.timestamp(), 0.0),
        ready=ready is not None and ready.status == "True",
        ended=ended,
        deleted=metadata.deletion_timestamp is not None,
        marked=(metadata.annotations or {}).get(_COST) == _LEAST_COST,
        trouble=trouble,
    )
