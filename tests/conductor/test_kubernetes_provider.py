"""The Kubernetes provider, by the official client, against an API that answers as Kubernetes does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import kubernetes_validate
import pytest
import yaml

from moonpool.conductor.fleet.administration import FleetAdmin
from moonpool.conductor.fleet.errors import ProviderFailed
from moonpool.conductor.fleet.providers import kubernetes as provider_module
from moonpool.conductor.fleet.providers.factory import provider_of
from moonpool.conductor.fleet.providers.kubernetes import KubernetesProvider
from moonpool.conductor.fleet.providers.provider import FAILED, RUNNING, STARTING, STOPPING
from moonpool.conductor.fleet.registry import NodeRegistry
from moonpool.conductor.observing.demand import DemandCounter
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.planning.lease import PlannerLease
from moonpool.conductor.planning.plan import Bounds, Rules
from moonpool.conductor.planning.planner import Planner
from moonpool.kvstore.index.redis.client import connect
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.runtime.config.options import Config, FleetOptions
from tests.conductor.kubernetes_server import COST, Kubernetes, api_group, kubernetes
from tests.conductor.test_planner import TTL_S, Clock, Fleet

PROVIDER = Path(__file__).parents[2] / "deploy" / "kubernetes" / "provider"


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Kubernetes]:
    async with kubernetes(tmp_path) as serving:
        serving.add("deployments", "prefill", 1)
        serving.add("deployments", "decode", 2)
        yield serving


@pytest.fixture
async def provider(api: Kubernetes, tmp_path: Path) -> AsyncIterator[KubernetesProvider]:
    made = provider_of(
        Config(fleet=FleetOptions(provider="kubernetes", kubeconfig=str(tmp_path / "kubeconfig")))
    )
    assert isinstance(made, KubernetesProvider)
    yield made
    await made.close()
    await made.close()


async def states(provider: KubernetesProvider) -> dict[str, str]:
    return {one.node_id: one.state for one in await provider.list()}


def replicas(api: Kubernetes, name: str = "decode", kind: str = "deployments") -> int:
    return int(api.workloads[kind, name]["spec"]["replicas"])


@pytest.mark.slow
async def test_a_node_starts_and_the_one_that_is_named_goes(
    api: Kubernetes, provider: KubernetesProvider
) -> None:
    first, second = [name for name in api.pods if name.startswith("decode")]
    third = await provider.start("decode", "tiny")
    assert third not in (first, second)
    assert (await states(provider))[third] == RUNNING
    assert replicas(api) == 3
    await provider.stop(second)
    await provider.stop(second)  # idempotent
    assert replicas(api) == 2
    found = {one.node_id: one for one in await provider.list() if one.role == "decode"}
    assert {name: one.state for name, one in found.items()} == {
        first: RUNNING,
        second: STOPPING,
        third: RUNNING,
    }
    assert found[first].age_s > 0
    del api.pods[second]
    await provider.stop(second)
    assert replicas(api) == 2
    for pod in api.pods.values():
        kubernetes_validate.validate(pod, "1.30", strict=True)


async def test_a_stop_that_failed_midway_is_completed_by_the_next(
    api: Kubernetes, provider: KubernetesProvider
) -> None:
    first, second = [name for name in api.pods if name.startswith("decode")]
    api.fails["update", "deployments/scale"] = [(500, "etcdserver: request timed out")]
    with pytest.raises(ProviderFailed, match="500: etcdserver: request timed out"):
        await provider.stop(first)
    assert api.pods[first]["metadata"]["annotations"][COST]
    assert (await states(provider))[first] == RUNNING
    await provider.stop(first)
    assert replicas(api) == 1
    assert (await states(provider)) | {first: STOPPING, second: RUNNING} == await states(provider)


async def test_a_conflict_is_tried_again_and_another_scaler_is_left_alone(
    api: Kubernetes, provider: KubernetesProvider
) -> None:
    conflict = (409, "the object has been modified")
    api.fails["update", "deployments/scale"] = [conflict, conflict]
    await provider.start("decode", "tiny")
    assert replicas(api) == 3
    api.fails["update", "deployments/scale"] = [conflict] * 100
    with pytest.raises(ProviderFailed, match="409: the object has been modified"):
        await provider.start("decode", "tiny")
    api.fails.clear()

    listed = await (await provider._api()).workloads()
    assert {one.name for one in listed} == {"prefill", "decode"}
    api.workloads["deployments", "decode"]["spec"]["replicas"] = 7
    stale = next(one for one in listed if one.role == "decode")
    with pytest.raises(ProviderFailed, match="had 3 replicas and has 7 now"):
        await (await provider._api()).scale(stale, 1)
    assert replicas(api) == 7


async def test_a_planner_of_an_older_epoch_is_refused(
    api: Kubernetes, provider: KubernetesProvider, tmp_path: Path
) -> None:
    """Whichever conductor asks; an operator is not fenced."""
    other = KubernetesProvider(FleetOptions(provider="kubernetes", kubeconfig=str(tmp_path / "kubeconfig")))
    first, _ = [name for name in api.pods if name.startswith("decode")]
    await asyncio.gather(provider.start("decode", "tiny", fence=3), other.start("prefill", "tiny", fence=3))
    for call in (other.start("decode", "tiny", fence=2), other.stop(first, fence=2)):
        with pytest.raises(ProviderFailed, match="a planner of epoch 2 asks, and one of epoch 3 has asked"):
            await call
    assert (replicas(api), (await states(provider))[first]) == (3, RUNNING)
    assert COST not in api.pods[first]["metadata"].get("annotations", {})
    await other.start("decode", "tiny", fence=4)
    await other.close()
    with pytest.raises(ProviderFailed, match="a planner of epoch 3 asks, and one of epoch 4 has asked"):
        await provider.stop(first, fence=3)
    await provider.stop(first)
    assert replicas(api) == 3
    (lease,) = api.leases.values()
    kubernetes_validate.validate(lease, "1.30", strict=True)
    api.fails["update", "leases"] = [(409, "the object has been modified")] * 100
    with pytest.raises(ProviderFailed, match=r"the Lease moonpool-planner-.*409"):
        await provider.stop(next(iter(await states(provider))), fence=5)
    assert replicas(api) == 3


async def test_a_planner_whose_redis_has_lost_its_data_gets_a_later_epoch(
    api: Kubernetes, provider: KubernetesProvider, url: str
) -> None:
    """Its conductors are new, too: the Lease alone has the latest epoch."""
    await provider.start("decode", "tiny", fence=7)
    clock, client = Clock(), connect(url)
    fleet = Fleet(clock)
    registry = cast(NodeRegistry, fleet)
    lease = PlannerLease(KVIndex(client, fleet.namespace), "a", ttl_s=TTL_S, clock=clock)
    planner = Planner(
        *(registry, FleetAdmin(registry, provider, "tiny", clock, lambda *change: None), lease),
        lambda: DemandCounter().total,
        mode="act",
        rules=Rules({"prefill": Bounds(3, 6, 0), "decode": Bounds(1, 6, 0)}),
        slo=Slo(ttft_s=1.0, tbt_s=0.1),
        clock=clock,
        on_decision=lambda *event: None,
    )
    await planner.round()
    assert "epoch 1 asks, and one of epoch 7 has" in planner._supplies["prefill"].why
    assert replicas(api, "prefill") == 1
    for _ in range(12):  # a minute
        clock.now_s += 5
        await planner.round()
    assert planner.status["state"] == "plans, epoch 8"
    assert replicas(api, "prefill") == 2
    await client.aclose()


async def test_what_kubernetes_refuses_is_said(api: Kubernetes, provider: KubernetesProvider) -> None:
    text = 'pods is forbidden: User "system:serviceaccount:moonpool:default" cannot list resource "pods"'
    api.fails["list", "pods"] = [(403, text)]
    with pytest.raises(ProviderFailed, match=r"403: pods is forbidden.*provider/rbac\.yaml"):
        await provider.list()
    with pytest.raises(ProviderFailed, match="no Deployment or LeaderWorkerSet of both nodes"):
        await provider.start("both", "tiny")
    api.add("deployments", "decode", 1, "decode-of-another")
    with pytest.raises(ProviderFailed, match=r"several workloads have decode nodes.*set fleet\.selector"):
        await provider.start("decode", "tiny")


async def test_a_workload_that_makes_no_pod_is_put_back(
    api: Kubernetes, provider: KubernetesProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provider_module, "_APPEARS_S", 0.3)
    api.makes_pods = False
    quota = 'pods "decode-1" is forbidden: exceeded quota: gpus, requested: 1, used: 8, limited: 8'
    api.workloads["deployments", "decode"]["status"]["conditions"].append(
        {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": quota}
    )
    with pytest.raises(ProviderFailed, match="exceeded quota: gpus"):
        await provider.start("decode", "tiny")
    assert replicas(api) == 2
    api.workloads["deployments", "decode"]["status"] = {}
    with pytest.raises(ProviderFailed, match="it made no pod within"):
        await provider.start("decode", "tiny")
    assert replicas(api) == 2


async def test_a_start_that_is_cancelled_before_a_pod_appears_is_put_back(
    api: Kubernetes, provider: KubernetesProvider
) -> None:
    api.makes_pods = False
    starting = asyncio.create_task(provider.start("decode", "tiny"))
    async with asyncio.timeout(60):
        while replicas(api) == 2:  # noqa: ASYNC110 (the API's tasks decide)
            await asyncio.sleep(0.01)
    starting.cancel()
    await asyncio.wait((starting,))
    assert starting.cancelled()
    assert replicas(api) == 2


async def test_a_start_that_is_cancelled_ends_so_when_the_api_is_away(
    api: Kubernetes, provider: KubernetesProvider, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a conductor that shuts down takes it for a failure of the provider, and plans on."""
    api.makes_pods = False
    starting = asyncio.create_task(provider.start("decode", "tiny"))
    async with asyncio.timeout(60):
        while replicas(api) == 2:  # noqa: ASYNC110 (the API's tasks decide)
            await asyncio.sleep(0.01)
    api.fails["list", "deployments"] = [(500, "etcd has no leader")] * 100
    starting.cancel()
    await asyncio.wait((starting,))
    assert starting.cancelled()
    assert "decode was left with a replica too many" in caplog.text


async def test_pods_that_do_not_start_say_why(api: Kubernetes, provider: KubernetesProvider) -> None:
    first, second = [name for name in api.pods if name.startswith("decode")]
    pending = api.pods[first]["status"]
    pending.update(phase="Pending", conditions=[], containerStatuses=[])
    pending["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no GPU"}
    ]
    status = api.pods[second]["status"]
    status["conditions"][-1]["status"] = "False"
    status["containerStatuses"][0]["state"] = {"waiting": {"reason": "ImagePullBackOff"}}
    found = {one.node_id: one for one in await provider.list()}
    assert (found[first].state, found[first].reason) == (STARTING, "0/3 nodes: no GPU")
    assert (found[second].state, found[second].reason) == (STARTING, "ImagePullBackOff")
    status.update(phase="Failed", reason="Evicted", message="The node was low on resource: memory")
    found = {one.node_id: one for one in await provider.list()}
    assert (found[second].state, found[second].reason) == (FAILED, "The node was low on resource: memory")


async def test_of_a_leader_worker_set_the_last_group_goes_first(
    api: Kubernetes, provider: KubernetesProvider
) -> None:
    api.add("leaderworkersets", "both", 3)
    listed = {one.node_id: one.can_stop for one in await provider.list() if one.role == "both"}
    assert listed == {"both-0": False, "both-1": False, "both-2": True}
    with pytest.raises(ProviderFailed, match="the last group goes first, here both-2"):
        await provider.stop("both-0")
    assert await provider.start("both", "tiny") == "both-3"
    fleet = cast(NodeRegistry, Fleet(Clock()))
    admin = FleetAdmin(fleet, provider, "tiny", Clock(), lambda *change: None)
    assert (await admin.scale("both", 2))["stopped"] == ["both-3", "both-2"]
    assert replicas(api, "both", "leaderworkersets") == 2
    assert (await states(provider))["both-2"] == STOPPING


@pytest.mark.parametrize("listed", [True, False])
async def test_a_pod_of_a_leader_worker_set_is_never_of_a_deployment(
    api: Kubernetes, provider: KubernetesProvider, listed: bool
) -> None:
    """Both have a role in common: neither list nor stop takes one for the other."""
    api.workloads["deployments", "decode"]["spec"]["replicas"] = 1
    api.control("deployments", "decode")
    api.add("leaderworkersets", "decode", 1, "large-decode")
    api.has_lws = listed
    found = {one.node_id: (one.state, one.can_stop) for one in await provider.list()}
    assert found["large-decode-0"] == ((RUNNING, True) if listed else (STOPPING, False))
    why = "several workloads have decode nodes" if listed else "decode is no LeaderWorkerSet"
    with pytest.raises(ProviderFailed, match=why):
        await provider.stop("large-decode-0")
    assert replicas(api) == 1


async def test_groups_do_not_keep_a_deployments_marked_pod_from_running(
    api: Kubernetes, provider: KubernetesProvider
) -> None:
    """A stop that failed after the mark; groups of the same role do not count as pods of the Deployment."""
    first = next(name for name in api.pods if name.startswith("decode"))
    api.fails["update", "deployments/scale"] = [(500, "etcdserver: request timed out")]
    with pytest.raises(ProviderFailed, match="500"):
        await provider.stop(first)
    api.add("leaderworkersets", "decode", 3, "large-decode")
    assert (await states(provider))[first] == RUNNING


async def test_without_leader_worker_sets_and_without_an_api(
    api: Kubernetes, provider: KubernetesProvider, tmp_path: Path
) -> None:
    api.has_lws = False
    assert len(await provider.list()) == 3
    text = (tmp_path / "kubeconfig").read_text()
    nowhere = tmp_path / "nowhere"
    nowhere.write_text(text.replace(api.url, "http://127.0.0.1:9"))
    away = KubernetesProvider(FleetOptions(provider="kubernetes", kubeconfig=str(nowhere)))
    with pytest.raises(ProviderFailed, match="Kubernetes does not answer"):
        await away.list()
    await away.close()
    missing = KubernetesProvider(FleetOptions(provider="kubernetes", kubeconfig=str(tmp_path / "none")))
    with pytest.raises(ProviderFailed, match="no credentials of Kubernetes in"):
        await missing.list()
    inside = KubernetesProvider(FleetOptions(provider="kubernetes"))
    with pytest.raises(ProviderFailed, match=r"set fleet\.kubeconfig"):
        await inside.list()


async def test_the_planner_acts_through_it(api: Kubernetes, provider: KubernetesProvider, url: str) -> None:
    """The load needs four prefill nodes and then none of them; the pods come and go."""
    clock = Clock()
    fleet, client, demand = Fleet(clock), connect(url), DemandCounter()
    registry = cast(NodeRegistry, fleet)
    lease = PlannerLease(KVIndex(client, fleet.namespace), "a", ttl_s=TTL_S, clock=clock)
    admin = FleetAdmin(registry, provider, "tiny", clock, lambda *change: None)
    bounds = {"prefill": Bounds(1, 6, 0), "decode": Bounds(1, 6, 0)}
    planner = Planner(
        *(registry, admin, lease, lambda: demand.total),
        mode="act",
        rules=Rules(bounds, hold_s=20.0, cooldown_s=5.0),
        slo=Slo(ttft_s=1.0, tbt_s=0.1),
        clock=clock,
        on_decision=lambda *event: None,
    )

    async def step(arrivals: int) -> None:
        clock.now_s += 5
        for _ in range(arrivals):
            demand.arrived(0.2, 100, 0)
        await planner.round()
        supplied = {one.node_id: one for one in await provider.list()}
        for name, node in supplied.items():
            if node.counts and name not in fleet.members:  # it registers
                fleet.nodes[name] = node
                fleet.join(name)
        for name in [one for one in fleet.members if one not in supplied or not supplied[one].counts]:
            await Fleet.stop(fleet, name)

    for _ in range(6):
        await step(100)
    grown = replicas(api, "prefill")
    assert grown >= 4
    assert sum(name.startswith("prefill") for name in fleet.members) == grown
    for _ in range(40):
        await step(0)
    assert replicas(api, "prefill") == 1
    await client.aclose()


async def test_the_role_permits_what_the_provider_does(api: Kubernetes, provider: KubernetesProvider) -> None:
    """And no more. What a conductor's pod gets is in deploy/kubernetes/provider."""
    api.add("leaderworkersets", "both", 1)
    for epoch, role in enumerate(("decode", "both"), 1):
        await provider.stop(await provider.start(role, "tiny", fence=epoch), fence=epoch)
    documents: list[dict[str, Any]] = list(yaml.safe_load_all((PROVIDER / "rbac.yaml").read_text()))
    for document in documents:
        kubernetes_validate.validate(document, "1.30", strict=True)
    account, role_of, binding = documents
    permitted = {
        (verb, group, resource)
        for rule in role_of["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert permitted == set(api.calls)
    assert {group for _, group, resource in permitted if resource.startswith("leaderworkersets")} == {
        api_group(PROVIDER.parent / "leaderworkerset" / "decode.yaml")
    }
    assert binding["subjects"][0]["name"] == account["metadata"]["name"]
    component = yaml.safe_load((PROVIDER / "kustomization.yaml").read_text())
    added = {one["path"]: one["value"] for one in yaml.safe_load(component["patches"][0]["patch"])}
    assert added["/spec/template/spec/serviceAccountName"] == account["metadata"]["name"]
    assert added["/spec/template/spec/containers/0/args/-"] == "fleet.provider=kubernetes"


async def test_calls_at_once_connect_once(api: Kubernetes, provider: KubernetesProvider) -> None:
    first, second = await asyncio.gather(provider._api(), provider._api())
    assert first is second
