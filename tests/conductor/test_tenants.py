"""How much tenants may ask, and in what order where they compete."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.admission.adapter_shares import AdapterShares
from moonpool.conductor.admission.batch_queue import BatchQueue
from moonpool.conductor.admission.fair_share import FairShare, Work
from moonpool.conductor.admission.limits import TokenBucket
from moonpool.conductor.admission.tenants import ANYONE, Tenant


def test_salts_of_different_tenants_never_meet() -> None:
    assert ANYONE.salt("") == "", "engines without tenants share these blocks"
    assert Tenant("a").salt("b/c") != Tenant("a/b").salt("c")
    acme = Tenant("acme").salt("")
    assert ANYONE.salt(acme) != acme, "nobody salts itself into a tenant"


def test_an_adapter_ahead_of_its_tenants_others_comes_after_them() -> None:
    shares = AdapterShares()
    assert shares.delay_s("acme", "hot", 0.0) == 0
    shares.charge("acme", "hot", Work(8.0, 1.0), 0.0)
    assert shares.delay_s("acme", "hot", 0.0) == 0, "it is alone"
    shares.charge("acme", "cold", Work(1.0, 1.0), 0.0)
    assert shares.delay_s("acme", "cold", 0.0) == 0
    ahead_s = shares.delay_s("acme", "hot", 0.0)
    assert ahead_s == pytest.approx(6.0)  # 8 s alone, 2 s of the other at half the nodes
    assert shares.delay_s("acme", "new", 0.0) == shares.delay_s("other", "hot", 0.0) == 0
    shares.charge("acme", "hot", Work(-8.0, -1.0), 0.0)
    assert shares.delay_s("acme", "hot", 0.0) == 0
    assert shares.delay_s("acme", "hot", 1000.0) == 0


def test_tokens_refill_evenly_and_a_debt_is_waited_for() -> None:
    rate = TokenBucket(600, now_s=0.0)  # ten a second
    rate.use(500, 0.0)
    assert rate.wait_s(0.0) == 0
    rate.use(200, 0.0)
    assert rate.wait_s(0.0) == pytest.approx(10.1)
    assert rate.wait_s(10.2) == 0
    rate.use(0, 1000.0)
    rate.use(600, 1000.0)
    assert rate.wait_s(1000.0) > 0, "an idle hour is not saved up"


def test_a_tenant_within_its_share_waits_for_nobody() -> None:
    fair = FairShare()
    for _ in range(100):
        fair.charge("greedy", 1.0, Work(1.0, 0.3), 0.0)
    assert fair.delay_s("greedy", 0.0) == pytest.approx(100.0)
    assert fair.delay_s("modest", 0.0) == 0.0


def test_the_resource_that_a_tenant_uses_most_decides_and_work_is_given_back() -> None:
    fair = FairShare()
    fair.charge("reader", 1.0, Work(prefill_s=6.0, decode_s=1.0), 0.0)
    fair.charge("writer", 1.0, Work(prefill_s=1.0, decode_s=6.0), 0.0)
    # Where each could be alone it is not delayed: charged when the other was not seen yet, and then by half.
    assert fair.delay_s("reader", 0.0) == pytest.approx(6.0)
    assert fair.delay_s("writer", 0.0) == pytest.approx(12.0)
    fair.charge("writer", 1.0, Work(decode_s=-5.0), 0.0)
    assert fair.delay_s("writer", 0.0) == pytest.approx(2.0)
    fair.charge("writer", 1.0, Work(decode_s=-99.0), 0.0)
    assert fair.delay_s("writer", 0.0) == pytest.approx(2.0), "its prefill"
    fair.charge("writer", 1.0, Work(decode_s=5.0), 0.0)
    assert fair.delay_s("writer", 0.0) == pytest.approx(10.0), "nothing is saved up"


@pytest.mark.slow
@given(st.floats(0.25, 4.0), st.floats(0.25, 4.0))
def test_where_two_compete_work_is_shared_by_weight(weight_a: float, weight_b: float) -> None:
    """Both send a great many requests at once, and a server computes them in the order of their lag."""
    fair = FairShare()
    weights = {"a": weight_a, "b": weight_b}
    queue = []
    for _ in range(2000):
        for name, weight in weights.items():
            queue.append((fair.delay_s(name, 0.0), name))
            fair.charge(name, weight, Work(decode_s=0.01), 0.0)
    served = [name for _, name in sorted(queue)[:800]]
    ratio = served.count("a") / served.count("b")
    assert ratio == pytest.approx(weight_a / weight_b, rel=0.1)


async def until_waiting(queue: BatchQueue, count: int) -> None:
    while queue.num_waiting < count:  # noqa: ASYNC110 - everybody needs one turn of the loop
        await asyncio.sleep(0)


async def test_batch_turns_come_by_priority_then_order() -> None:
    queue, came = BatchQueue(), list[str]()
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def take(name: str, priority: int, order_s: float, tenant: str = "a") -> None:
        async with queue.turn(tenant, priority, order_s, unless=never):
            came.append(name)

    async with asyncio.TaskGroup() as group, queue.turn("a", 0, 0.0, unless=never):
        for name, priority, order_s in (("late", 1, 2.0), ("urgent", 0, 9.0), ("early", 1, 1.0)):
            group.create_task(take(name, priority, order_s))
        group.create_task(take("other", 5, 1.5, tenant="b"))
        await until_waiting(queue, 4)
    assert came == ["urgent", "other", "early", "late"]


async def test_who_is_cancelled_or_aborted_at_the_door_holds_nobody_up() -> None:
    queue = BatchQueue()
    loop = asyncio.get_running_loop()
    never: asyncio.Future[None] = loop.create_future()
    aborted: asyncio.Future[None] = loop.create_future()

    async def take(unless: asyncio.Future[None]) -> None:
        async with queue.turn("a", 0, 0.0, unless=unless):
            pass

    async with queue.turn("a", 0, 0.0, unless=never):
        cancelled, thrown_out, third = (asyncio.create_task(take(f)) for f in (never, aborted, never))
        await until_waiting(queue, 3)
        cancelled.cancel()
        aborted.set_result(None)
        await thrown_out
        assert queue.num_waiting == 1
    await asyncio.wait_for(third, 60)
    async with asyncio.timeout(60), queue.turn("a", 0, 0.0, unless=never):
        pass


async def test_who_was_aborted_before_its_turn_gives_nobody_the_turn_of_another() -> None:
    queue, came = BatchQueue(), list[str]()
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    aborted.set_result(None)

    async def take(name: str) -> None:
        async with queue.turn("a", 0, 0.0, unless=never):
            came.append(name)

    async with queue.turn("a", 0, 0.0, unless=never):
        waits = asyncio.create_task(take("waits"))
        await until_waiting(queue, 1)
        async with queue.turn("a", 0, 0.0, unless=aborted):
            came.append("aborted")
        assert queue.num_waiting == 1
        came.append("holds")
    await asyncio.wait_for(waits, 60)
    assert came == ["aborted", "holds", "waits"]
