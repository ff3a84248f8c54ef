"""A node as the registry keeps it: what its messages teach, and what they are not blamed for."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from moonpool.conductor.costs.model import CostModel
from moonpool.conductor.fleet.member import Member
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.protos import node_pb2


class Time:
    now_s = 100.0


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
async def member(time: Time) -> AsyncIterator[Member]:
    profile = {"decode_base_s": 1e-3, "decode_context_s": 1e-6}
    member = Member(
        NodeRecord("d0", 1, "decode", rpc_address="127.0.0.1:1", profile=profile),
        CostModel(),
        lambda: time.now_s,
        conductor_id="c",
        on_reachable=lambda _: None,
        on_change=lambda _: None,
    )
    yield member
    await member.client.close()


async def test_steps_over_the_context_of_other_conductors_are_as_long_as_predicted(
    member: Member, time: Time
) -> None:
    """The node is not slow: it attends over 100,000 tokens that another conductor placed."""
    cost = member.view.cost
    actual_s = cost.profile.step_s(8, 100_000)
    for _ in range(100):
        time.now_s += actual_s
        member._on_step(node_pb2.StepTokens(num_running=8, num_steps=1, num_context_tokens=100_000), 0)
    assert cost.decode_correction.factor(time.now_s) == pytest.approx(1.0, rel=0.01)
