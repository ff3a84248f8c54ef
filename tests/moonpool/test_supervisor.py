"""The supervisor and its client: a planner that lost its lease changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from moonpool.conductor.fleet.errors import PlannerOutdated, ProviderFailed
from moonpool.conductor.fleet.providers.local import LocalProvider
from moonpool.conductor.fleet.providers.provider import STARTING, SuppliedNode
from moonpool.local.supervisor import Supervisor
from moonpool.runtime.config.options import SecurityOptions
from moonpool.runtime.security import process
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import CONDUCTOR, Caller


class Cluster:
    served_names: Sequence[str] = ("tiny",)

    def __init__(self) -> None:
        self.nodes: list[str] = []
        self.settings: list[Sequence[str]] = []
        self.models: dict[str, str] = {}  # of the nodes

    async def start_node(self, role: str, settings: Sequence[str] = (), model: str = "") -> str:
        self.nodes.append(f"{role}-{len(self.nodes)}")
        self.settings.append(settings)
        self.models[self.nodes[-1]] = model
        return self.nodes[-1]

    def settle(self, settings: Sequence[str], model: str = "") -> None:
        self.settings = [settings]

    def stop_node(self, name: str) -> None:
        self.nodes.remove(name)

    def switch_node(self, name: str, role: str, model: str) -> None:
        self.settings = [[name, role, model]]

    def supplied(self, model: str = "") -> Sequence[SuppliedNode]:
        own = [name for name in self.nodes if model in ("", self.models[name])]
        return [SuppliedNode(name, "decode", STARTING, drain_s=0.5) for name in own]


@pytest.fixture
def security() -> Security:
    used = Security(
        SecurityOptions(cluster_key="the key of this cluster, long enough"), Caller(CONDUCTOR, "c")
    )
    process.use(used)
    return used


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest_asyncio.fixture
async def supervisor_address(cluster: Cluster, security: Security) -> AsyncIterator[str]:
    supervisor = Supervisor(cluster)
    yield await supervisor.start(security)
    await supervisor.close()


@pytest_asyncio.fixture
async def provider(supervisor_address: str) -> AsyncIterator[LocalProvider]:
    made = LocalProvider(supervisor_address)
    yield made
    await made.close()


async def test_an_older_epoch_is_refused(provider: LocalProvider, cluster: Cluster) -> None:
    assert await provider.start("decode", "tiny", fence=3) == "decode-0"
    for call in (provider.start("decode", "tiny", fence=2), provider.stop("decode-0", fence=2)):
        with pytest.raises(ProviderFailed, match="a planner of epoch 2 asks, and one of epoch 3 has asked"):
            await call
    assert cluster.nodes == ["decode-0"]
    await provider.start("decode", "tiny", fence=3)
    await provider.start("decode", "tiny")  # an operator's
    assert [node.node_id for node in await provider.list()] == ["decode-0", "decode-1", "decode-2"]
    await provider.stop("decode-0", fence=4)
    with pytest.raises(ProviderFailed, match="epoch 3 asks"):
        await provider.start("decode", "tiny", fence=3)
    assert cluster.nodes == ["decode-1", "decode-2"]


async def test_a_planner_that_is_refused_learns_the_latest_epoch(provider: LocalProvider) -> None:
    await provider.start("decode", "tiny", fence=7)
    with pytest.raises(PlannerOutdated, match="decode node was not started") as refused:
        await provider.start("decode", "tiny", fence=1)
    assert refused.value.latest == 7


async def test_settings_of_a_model_that_is_not_served_are_refused(
    supervisor_address: str, cluster: Cluster
) -> None:
    other = LocalProvider(supervisor_address, "huge")
    with pytest.raises(ProviderFailed, match="serves tiny, not huge: nothing was changed"):
        await other.settle(["engine.block_size=32"])
    await other.close()
    assert not cluster.settings


async def test_a_node_is_switched_to_a_model_of_the_cluster(
    provider: LocalProvider, cluster: Cluster
) -> None:
    await provider.start("decode", "tiny")
    await provider.switch("decode-0", "both", "tiny", fence=3)
    assert cluster.settings == [["decode-0", "both", "tiny"]]
    with pytest.raises(ProviderFailed, match="serves tiny, not huge: nothing was changed"):
        await provider.switch("decode-0", "both", "huge")
    with pytest.raises(ProviderFailed, match=r"decode-0 does not change its model: .*epoch 2 asks"):
        await provider.switch("decode-0", "both", "tiny", fence=2)
    assert [node.drain_s for node in await provider.list()] == [0.5]


async def test_rollouts_of_each_model_have_epochs_of_their_own(
    provider: LocalProvider, cluster: Cluster
) -> None:
    cluster.served_names = ("tiny", "other")
    for model, epoch in (("tiny", 3), ("other", 1)):
        node_id = await provider.start("decode", model, rollout=epoch)
        await provider.stop(node_id, rollout=epoch)
    tiny, other = [await provider.start("decode", model) for model in cluster.served_names]
    for call in (provider.start("decode", "tiny", rollout=2), provider.stop(tiny, rollout=2)):
        with pytest.raises(ProviderFailed, match="a rollout of epoch 2 asks, and one of epoch 3 has asked"):
            await call
    await provider.stop(other, rollout=2)
    assert cluster.nodes == [tiny]
