"""The law: whatever nodes do, tokens leave in order, exactly once, as from a faultless cluster."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moonpool.protos import node_pb2
from tests.conductor.core_nodes import (
    Broken,
    Busy,
    Cluster,
    RedisProcess,
    ScriptedNode,
    continuation,
    request,
    running,
)

MAX_TOKENS = 12
_namespaces = itertools.count()


@dataclass(frozen=True)
class Fault:
    """What happens to the node that is about to produce token ``index`` of request ``number``."""

    kind: str
    number: int
    index: int


class Chaos:
    """Lets each fault happen once. A node that dies is replaced under the same name, in a new life."""

    def __init__(self, cluster: Cluster, faults: list[Fault]) -> None:
        self._cluster = cluster
        self._faults = list(faults)
        self._dying: list[ScriptedNode] = []
        self._comings: list[asyncio.Task[object]] = []

    async def __call__(self, node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
        number = int(work.request_id)
        due = next((f for f in self._faults if (f.number, f.index) == (number, index)), None)
        if due is None or node.dead or node in self._dying:
            return
        self._faults.remove(due)
        match due.kind:
            case "dies":
                self._dying.append(node)
                self._comings.append(asyncio.create_task(self._replace(node)))
                await asyncio.Event().wait()
            case "breaks":
                raise Broken("out of luck")
            case "is busy":
                raise Busy("no room")
            case "skips" if node.role == "decode":
                node.tell(next(iter(node._outboxes)), node.token(work, index + 1, 7))
            case "repeats" if node.role == "decode":
                node.tell(next(iter(node._outboxes)), node.token(work, index - 1, 7))

    async def _replace(self, node: ScriptedNode) -> None:
        await node.die()
        await self._cluster.add(node.node_id, self, direct=node.direct)

    async def settled(self) -> None:
        for coming in self._comings:
            await coming


FAULTS = st.builds(
    Fault,
    st.sampled_from(["dies", "breaks", "is busy", "skips", "repeats"]),
    st.integers(0, 2),
    st.integers(0, MAX_TOKENS - 1),
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(faults=st.lists(FAULTS, max_size=5), direct=st.booleans())
async def test_tokens_leave_in_order_exactly_once(
    redis: RedisProcess, faults: list[Fault], direct: bool
) -> None:
    names = ("p0", "p1", "d0", "d1")
    namespace = f"chaos-{next(_namespaces)}"
    # As many attempts as faults could cost, also when all nodes die under one request.
    async with running(redis.url, namespace=namespace, max_attempts=40) as cluster:
        chaos = Chaos(cluster, faults)
        for name in names:
            await cluster.add(name, chaos, direct=direct)
        prompts = [[number + 2] * (20 * number + 5) for number in range(3)]
        answers = await asyncio.gather(
            *(
                cluster.generate(request(str(number), prompt, MAX_TOKENS))
                for number, prompt in enumerate(prompts)
            )
        )
        assert answers == [continuation(prompt, MAX_TOKENS) for prompt in prompts]
        await chaos.settled()
        cluster_now = cluster.conductor.cluster()
        assert cluster_now["num_requests"] == 0
        for node in cluster_now["nodes"]:
            assert node["load"]["own_prefills"] == node["load"]["own_decodes"] == 0
