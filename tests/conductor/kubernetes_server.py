"""A Kubernetes API of one namespace, with the replies of an API server and what its controllers do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

TOKEN = "a token"
DEPLOYED = Path(__file__).parents[2] / "deploy" / "kubernetes"
LWS = "leaderworkerset.sigs.k8s.io"  # of its labels; the group of its API is another one
COST = "controller.kubernetes.io/pod-deletion-cost"
CREATED = "2026-01-02T03:04:05Z"


def api_group(manifest: Path) -> str:
    """Of the first document."""
    return str(next(yaml.safe_load_all(manifest.read_text()))["apiVersion"]).partition("/")[0]


GROUPS = {
    "deployments": api_group(DEPLOYED / "decode.yaml"),
    "leaderworkersets": api_group(DEPLOYED / "leaderworkerset" / "decode.yaml"),
}


def labels(role: str) -> dict[str, str]:
    return {"app.kubernetes.io/component": role, "app.kubernetes.io/part-of": "moonpool"}


class Kubernetes:
    """``calls``: (verb, group, resource) of each. ``fails``: what (verb, resource) is answered, once each.

    ``makes_pods``: whether workloads that grow get pods. ``has_lws``: the extension is installed.
    """

    def __init__(self) -> None:
        self.workloads: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.fails: dict[tuple[str, str], list[tuple[int, str]]] = {}
        self.makes_pods = True
        self.has_lws = True
        self.leases: dict[str, dict[str, Any]] = {}
        self.url = ""
        self._number = 0
        self._version = 100

    def add(self, kind: str, role: str, replicas: int, name: str = "") -> None:
        """``kind``: deployments or leaderworkersets."""
        name = name or role
        self.workloads[kind, name] = {
            "metadata": {"name": name, "namespace": "moonpool", "labels": labels(role)},
            "spec": {"replicas": replicas},
            "status": {"conditions": [{"type": "Available", "status": "True"}]},
        }
        self.control(kind, name)

    def control(self, kind: str, name: str) -> None:
        """What the workload's controller does: pods that are not ready go first, then those of least cost."""
        workload = self.workloads[kind, name]
        count, role = (
            workload["spec"]["replicas"],
            workload["metadata"]["labels"]["app.kubernetes.io/component"],
        )
        if kind == "leaderworkersets":
            self._control_groups(name, role, count)
            return
        live = [pod for pod in self.pods.values() if self._belongs(pod, name) and not self._ends(pod)]

        def order(pod: dict[str, Any]) -> tuple[bool, int]:
            is_ready = pod["status"]["conditions"][-1]["status"] == "True"
            return is_ready, int(pod["metadata"].get("annotations", {}).get(COST, "0"))

        for pod in sorted(live, key=order)[: max(len(live) - count, 0)]:
            pod["metadata"]["deletionTimestamp"] = CREATED
        for _ in range(count - len(live)):
            self._number += 1
            self._make(f"{name}-{self._number:x}5d8f", role, {"pod-template-hash": name})

    def _control_groups(self, name: str, role: str, count: int) -> None:
        for group in range(count):
            for worker in range(2):
                pod = f"{name}-{group}" + (f"-{worker}" if worker else "")
                own = {
                    f"{LWS}/name": name,
                    f"{LWS}/group-index": str(group),
                    f"{LWS}/worker-index": str(worker),
                }
                self._make(pod, role, own)
        for pod in self.pods.values():
            if int(pod["metadata"]["labels"].get(f"{LWS}/group-index", -1)) >= count:
                pod["metadata"]["deletionTimestamp"] = CREATED

    def _make(self, name: str, role: str, own: dict[str, str]) -> None:
        if not self.makes_pods or name in self.pods:
            return
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": CREATED}
        running = {"running": {"startedAt": CREATED}}
        self.pods[name] = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": name,
                "namespace": "moonpool",
                "creationTimestamp": CREATED,
                "labels": labels(role) | own,
            },
            "spec": {"containers": [{"name": role, "image": "moonpool:0.1.0"}]},
            "status": {
                "phase": "Running",
                "conditions": [{"type": "PodScheduled", "status": "True"}, ready],
                "containerStatuses": [
                    {
                        "name": role,
                        "image": "moonpool:0.1.0",
                        "imageID": "sha256:0",
                        "ready": True,
                        "restartCount": 0,
                        "state": running,
                    }
                ],
            },
        }

    def _belongs(self, pod: dict[str, Any], name: str) -> bool:
        return bool(pod["metadata"]["labels"].get("pod-template-hash") == name)

    def _ends(self, pod: dict[str, Any]) -> bool:
        return "deletionTimestamp" in pod["metadata"] or pod["status"]["phase"] == "Failed"

    # ------------------------------------------------------------------ the API

    async def list_workloads(self, http: web.Request) -> web.Response:
        kind = http.match_info["kind"]
        if failed := self._failure(http, "list", kind):
            return failed
        if not self._serves(http):
            return web.Response(status=404, text="404 page not found\n")
        items = [one for (of, _), one in self.workloads.items() if of == kind]
        return web.json_response({"apiVersion": f"{http.match_info['group']}/v1", "items": items})

    async def scale(self, http: web.Request) -> web.Response:
        kind, name = http.match_info["kind"], http.match_info["name"]
        verb = "get" if http.method == "GET" else "update"
        if failed := self._failure(http, verb, f"{kind}/scale"):
            return failed
        if not self._serves(http):
            return web.Response(status=404, text="404 page not found\n")
        workload = self.workloads[kind, name]
        if http.method == "PUT":
            body = await http.json()
            if body["metadata"]["resourceVersion"] != str(self._version):
                return status(
                    409,
                    "Conflict",
                    f'Operation cannot be fulfilled on {kind} "{name}": the object has '
                    "been modified; please apply your changes to the latest version and try again",
                )
            self._version += 1
            workload["spec"]["replicas"] = body["spec"].get("replicas", 0)
            self.control(kind, name)
        replicas = workload["spec"]["replicas"]
        return web.json_response(
            {
                "kind": "Scale",
                "apiVersion": "autoscaling/v1",
                "metadata": {"name": name, "namespace": "moonpool", "resourceVersion": str(self._version)},
                # An API server leaves a zero out.
                "spec": {"replicas": replicas} if replicas else {},
                "status": {"replicas": replicas},
            }
        )

    async def list_pods(self, http: web.Request) -> web.Response:
        if failed := self._failure(http, "list", "pods"):
            return failed
        assert http.query["labelSelector"] == "app.kubernetes.io/part-of=moonpool,app.kubernetes.io/component"
        return web.json_response(
            {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": [*self.pods.values()]}
        )

    async def patch_pod(self, http: web.Request) -> web.Response:
        if failed := self._failure(http, "patch", "pods"):
            return failed
        assert http.content_type == "application/merge-patch+json"
        pod = self.pods[http.match_info["name"]]
        pod["metadata"].setdefault("annotations", {}).update((await http.json())["metadata"]["annotations"])
        return web.json_response(pod)

    async def make_lease(self, http: web.Request) -> web.Response:
        if failed := self._failure(http, "create", "leases"):
            return failed
        body = await http.json()
        name = body["metadata"]["name"]
        if name in self.leases:
            return status(409, "AlreadyExists", f'leases.coordination.k8s.io "{name}" already exists')
        return web.json_response(self._kept(name, body), status=201)

    async def lease(self, http: web.Request) -> web.Response:
        name = http.match_info["name"]
        if failed := self._failure(http, "get" if http.method == "GET" else "update", "leases"):
            return failed
        if name not in self.leases:
            return status(404, "NotFound", f'leases.coordination.k8s.io "{name}" not found')
        if http.method == "PUT":
            body = await http.json()
            if body["metadata"]["resourceVersion"] != self.leases[name]["metadata"]["resourceVersion"]:
                return status(409, "Conflict", f'Operation cannot be fulfilled on leases "{name}"')
            self._kept(name, body)
        return web.json_response(self.leases[name])

    def _kept(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        metadata = body["metadata"] | {"namespace": "moonpool", "resourceVersion": str(self._version)}
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        self.leases[name] = kind | {"metadata": metadata, "spec": body["spec"]}
        return self.leases[name]

    def _serves(self, http: web.Request) -> bool:
        kind, group = http.match_info["kind"], http.match_info["group"]
        return group == GROUPS.get(kind) and (kind != "leaderworkersets" or self.has_lws)

    def _failure(self, http: web.Request, verb: str, resource: str) -> web.Response | None:
        group = "coordination.k8s.io" if resource == "leases" else http.match_info.get("group", "")
        self.calls.append((verb, group, resource))
        if http.headers.get("Authorization") != f"Bearer {TOKEN}":
            return status(401, "Unauthorized", "Unauthorized")
        if answers := self.fails.get((verb, resource)):
            return status(answers[0][0], "", answers.pop(0)[1])
        return None


def status(code: int, reason: str, message: str) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    return web.json_response(body, status=code)


@asynccontextmanager
async def kubernetes(directory: Path) -> AsyncIterator[Kubernetes]:
    """Serving inside the block. ``directory / "kubeconfig"`` has its address."""
    api, app = Kubernetes(), web.Application()
    of_kind = "/apis/{group}/v1/namespaces/moonpool/{kind}"
    leases = "/apis/coordination.k8s.io/v1/namespaces/moonpool/leases"
    app.add_routes(
        [
            web.post(leases, api.make_lease),
            web.get(f"{leases}/{{name}}", api.lease),
            web.put(f"{leases}/{{name}}", api.lease),
            web.get(of_kind, api.list_workloads),
            web.get(f"{of_kind}/{{name}}/scale", api.scale),
            web.put(f"{of_kind}/{{name}}/scale", api.scale),
            web.get("/api/v1/namespaces/moonpool/pods", api.list_pods),
            web.patch("/api/v1/namespaces/moonpool/pods/{name}", api.patch_pod),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "here", "cluster": {"server": api.url}}],
        "users": [{"name": "us", "user": {"token": TOKEN}}],
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "us"}}],
        "current-context": "here",
    }
    (directory / "kubeconfig").write_text(json.dumps(config))
    try:
        yield api
    finally:
        await runner.cleanup()
