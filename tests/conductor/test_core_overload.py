"""What a conductor does when more is asked than the cluster can give: limits, classes, SLOs."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from moonpool.conductor.admission.fair_share import Work
from moonpool.conductor.admission.tenants import ANYONE, Tenant
from moonpool.conductor.errors import ConductorClosed, DeadlineExceeded, RequestFailed, RequestRejected
from moonpool.kvstore.blocks.keys import chain
from moonpool.protos import node_pb2
from tests.conductor.core_nodes import (
    MODEL,
    PROMPT,
    ScriptedNode,
    continuation,
    request,
    running,
)
from tests.conductor.faults import breaks, hangs, once

ACME = Tenant("acme", max_requests=1)
FRUGAL = Tenant("frugal", tokens_per_minute=60)


async def test_a_tenant_at_its_limit_does_not_keep_others_out(url: str) -> None:
    async with running(url, "p0", "d0", namespace="tenant") as cluster:
        cluster.nodes["d0"].script = hangs
        stream = cluster.conductor.generate(request("first", client=ACME))
        await anext(stream)
        with pytest.raises(RequestRejected, match="tenant acme has 1 requests") as raised:
            await cluster.generate(request("second", client=ACME))
        assert raised.value.stage == "limit"
        cluster.nodes["d0"].script = lambda *_: asyncio.sleep(0)
        assert await cluster.generate(request("other")) == continuation(PROMPT, 8)
        await stream.aclose()
        assert await cluster.generate(request("second", client=ACME)) == continuation(PROMPT, 8)


async def test_who_has_used_its_tokens_is_told_when_there_are_more(url: str) -> None:
    async with running(url, "p0", "d0", namespace="tokens") as cluster:
        await cluster.generate(request("first", client=FRUGAL))
        # 40 prompt tokens and 8 of output were used of the 60; the second takes it into debt.
        await cluster.generate(request("second", client=FRUGAL))
        with pytest.raises(RequestRejected, match="60 tokens a minute") as raised:
            await cluster.generate(request("third", client=FRUGAL))
        assert 30 < raised.value.retry_after_s < 40


async def test_a_tenant_s_slo_moves_its_turn_and_a_client_s_own_only_back(url: str) -> None:
    options = {"slo_ttft_s": 30.0, "slo_tbt_s": 0.2, "rejection": "none"}
    chat = Tenant("chat", slo_ttft_s=2.0, slo_tbt_s=0.05)
    async with running(url, "p0", "d0", namespace="slos", **options) as cluster:
        for number, (client, asked_s) in enumerate([(ANYONE, 0.0), (chat, 0.0), (ANYONE, 2.0), (chat, 9.0)]):
            await cluster.generate(request(f"r{number}", client=client, slo_ttft_s=asked_s))
        usual, tenant, hurried, patient = cluster.nodes["p0"].works
        assert tenant.patience_s - usual.patience_s == pytest.approx(-28.0, abs=1.0)
        assert hurried.patience_s == pytest.approx(usual.patience_s, abs=1.0)
        assert patient.patience_s - usual.patience_s == pytest.approx(-21.0, abs=1.0)
        assert [work.tbt_s for work in (usual, tenant)] == [0.2, 0.05]


async def test_a_request_is_rejected_by_its_own_slo(url: str) -> None:
    options = {"slo_ttft_s": 1.0, "rejection": "baseline"}
    async with running(url, "p0", "d0", namespace="own", **options) as cluster:
        node = cluster.nodes["p0"]
        node.profile = {"prefill_base_s": 5.0, "decode_base_s": 1e-3}
        await cluster.told_profile(node)
        with pytest.raises(RequestRejected, match="1 s are allowed"):
            await cluster.generate(request("usual"))
        nightly = Tenant("nightly", slo_ttft_s=60.0)
        with pytest.raises(RequestRejected, match="2 s are allowed"):
            await cluster.generate(request("hurried", client=nightly, slo_ttft_s=2.0))
        assert await cluster.generate(request("patient", client=nightly)) == continuation(PROMPT, 8)


async def test_a_batch_request_waits_while_interactive_ones_are_computed(url: str) -> None:
    async with running(url, "p0", "d0", namespace="batch") as cluster:
        node = cluster.nodes["p0"]
        node.profile = {"prefill_base_s": 100.0, "decode_base_s": 1e-3}
        await cluster.told_profile(node)
        computed = asyncio.Event()

        async def waits(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            if work.request_id == "interactive":
                await computed.wait()

        node.script = waits
        interactive = asyncio.create_task(cluster.generate(request("interactive")))
        await cluster.until(lambda: node.works)
        batch = asyncio.create_task(cluster.generate(request("batch", batch=True)))
        turn = cluster.conductor._deps.batch_queue
        await cluster.until(lambda: turn._notified is not None)
        assert [work.request_id for work in node.works] == ["interactive"]
        computed.set()
        assert await batch == await interactive == continuation(PROMPT, 8)
        assert [work.request_id for work in node.works] == ["interactive", "batch"]
        assert node.works[0].priority < node.works[1].priority


async def test_a_batch_request_at_the_door_ends_with_its_deadline(url: str) -> None:
    async with running(url, "p0", "d0", namespace="door") as cluster:
        node = cluster.nodes["p0"]
        node.profile = {"prefill_base_s": 100.0, "decode_base_s": 1e-3}
        await cluster.told_profile(node)
        node.script = hangs
        stream = cluster.conductor.generate(request("interactive"))
        first = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await cluster.until(lambda: node.works)
        doomed = [cluster.generate(request(f"b{i}", batch=True, deadline_s=0.2)) for i in range(3)]
        for outcome in await asyncio.gather(*doomed, return_exceptions=True):
            assert isinstance(outcome, DeadlineExceeded | RequestRejected), outcome
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await stream.aclose()


async def test_waiting_for_its_turn_is_not_running(url: str) -> None:
    options = {"request_timeout_s": 1.0, "rejection": "none"}
    async with running(url, "p0", "d0", namespace="turn", **options) as cluster:
        node, tell = cluster.nodes["d0"], cluster.nodes["d0"].tell
        node.tell = lambda *a: None  # type: ignore[method-assign]
        node.load = replace(node.load, free_blocks=0)
        await node.announce()
        member = cluster.conductor._deps.registry.members["d0"]
        await cluster.until(lambda: member.view.num_free_blocks == 0)
        batch = asyncio.create_task(cluster.generate(request("batch", batch=True)))
        # Its prefill is done: one that is overdue would make its node look too slow for the other request.
        with pytest.raises(DeadlineExceeded, match="1 s passed after 1 tokens"):
            # Its own limit does not exceed the conductor's.
            await cluster.generate(request("interactive", deadline_s=300.0))
        assert [work.request_id for work in node.works] == ["interactive"]
        # The batch request has waited as long as it may run.
        node.tell = tell  # type: ignore[method-assign]
        node.load = replace(node.load, free_blocks=4096)
        await node.announce()
        assert await batch == continuation(PROMPT, 8)


async def test_it_does_not_wait_for_its_turn_for_ever(url: str) -> None:
    async with running(url, "p0", "d0", namespace="waited", wait_timeout_s=0.2) as cluster:
        node = cluster.nodes["p0"]
        node.profile = {"prefill_base_s": 100.0, "decode_base_s": 1e-3}
        await cluster.told_profile(node)
        node.script = hangs
        interactive = asyncio.create_task(cluster.generate(request("interactive")))
        await cluster.until(lambda: node.works)
        with pytest.raises(DeadlineExceeded, match=r"waited 0\.2 s"):
            await cluster.generate(request("batch", batch=True))
        interactive.cancel()
        await asyncio.gather(interactive, return_exceptions=True)


@pytest.mark.parametrize(
    ("limits", "client", "batch"),
    [({"max_requests": 2}, ANYONE, False), ({"max_requests": 4}, ANYONE, True), ({}, ACME, False)],
)
async def test_a_request_of_more_sequences_than_the_limit_runs_them_in_turn(
    url: str, limits: dict[str, int], client: Tenant, batch: bool
) -> None:
    async with running(url, "p0", "d0", namespace=f"in-turn-{len(limits)}-{batch}", **limits) as cluster:
        admission, most = cluster.conductor._deps.admission, 0

        async def count(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            nonlocal most
            most = max(most, admission.num_requests)

        cluster.nodes["d0"].script = count
        parts = [
            cluster.generate(request(f"r-{i}", client=client, batch=batch, follows=i > 0)) for i in range(7)
        ]
        assert await asyncio.gather(*parts) == [continuation(PROMPT, 8)] * 7
        assert 1 <= most <= 2
        assert admission.num_requests == 0


async def test_a_part_waits_where_a_request_of_its_own_would_miss_its_slo(url: str) -> None:
    async with running(url, "p0", "d0", namespace="slo-parts", slo_ttft_s=0.5) as cluster:
        node = cluster.nodes["p0"]
        node.profile = {"prefill_base_s": 0.4, "decode_base_s": 1e-3}
        await cluster.told_profile(node)
        computed = asyncio.Event()

        async def waits(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            await computed.wait()

        node.script = waits
        names = ["first", "second", "alone"]
        first, second, alone = (
            asyncio.create_task(cluster.generate(request(name, follows=name == "second"))) for name in names
        )
        with pytest.raises(RequestRejected, match="first token would take"):
            await alone
        computed.set()
        assert await first == await second == continuation(PROMPT, 8)


async def test_a_part_that_waits_can_be_cancelled_and_is_ended_with_the_conductor(url: str) -> None:
    async with running(url, "p0", "d0", namespace="part", max_requests=1) as cluster:
        cluster.nodes["d0"].script = hangs
        stream = cluster.conductor.generate(request("first"))
        await anext(stream)
        cancelled, second = (
            asyncio.create_task(cluster.generate(request(name, follows=True))) for name in ("a", "b")
        )
        admission = cluster.conductor._deps.admission
        await cluster.until(lambda: len(admission._waiting) == 2)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        with pytest.raises(DeadlineExceeded):
            await cluster.generate(request("c", follows=True, deadline_s=0.05))
        assert len(admission._waiting) == 1
        await cluster.conductor.close()
        with pytest.raises(ConductorClosed):
            await second
        with pytest.raises(ConductorClosed):
            await anext(stream)


async def test_who_is_rejected_pays_nothing(url: str) -> None:
    async with running(url, "p0", "d0", namespace="refund", slo_ttft_s=0.5) as cluster:
        node = cluster.nodes["p0"]
        node.profile = {"prefill_base_s": 2.0, "decode_base_s": 1e-3}
        await cluster.told_profile(node)
        for i in range(5):  # 40 tokens each, of 60
            with pytest.raises(RequestRejected, match="first token would take"):
                await cluster.generate(request(f"r{i}", client=FRUGAL))
        node.profile = {"prefill_base_s": 1e-3, "decode_base_s": 1e-3}
        await cluster.told_profile(node)
        assert await cluster.generate(request("later", client=FRUGAL)) == continuation(PROMPT, 8)


async def test_a_tenant_pays_once_and_for_what_was_decoded(url: str) -> None:
    async with running(url, "p0", "d0", namespace="pays") as cluster:

        def charged(name: str) -> Work:
            (work,) = (use.work for use in cluster.conductor._deps.usage.own() if use.tenant.name == name)
            return work

        profile = {"prefill_base_s": 0.5, "decode_base_s": 0.25}
        for node in cluster.nodes.values():
            node.profile = profile
            await node.announce()
        members = cluster.conductor._deps.registry.members
        await cluster.until(
            lambda: all(member.view.cost.profile.decode_base_s == 0.25 for member in members.values())
        )
        cluster.nodes["p0"].script = once(0, breaks)
        tenants = [Tenant(name) for name in ("retried", "rejected", "gone")]
        assert await cluster.generate(request("a", client=tenants[0])) == continuation(PROMPT, 8)
        assert cluster.names("a").count("retry") == 1
        work = charged("retried")
        assert work.prefill_s == pytest.approx(0.5, rel=0.2), "the retry is not its own doing"
        assert work.decode_s == pytest.approx(8 * 0.25, rel=0.2)
        # A failure before the first token costs nothing; leaving costs what was placed.
        cluster.nodes["p0"].script = breaks
        with pytest.raises(RequestFailed):
            await cluster.generate(request("b", client=tenants[1]))
        assert charged("rejected") == (0, 0)
        cluster.nodes["p0"].script = hangs
        leaving = asyncio.create_task(cluster.generate(request("c", client=tenants[2])))
        await cluster.until(lambda: cluster.nodes["p0"].works[-1].request_id == "c")
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        assert charged("gone").prefill_s > 0
        assert charged("gone").decode_s == 0


async def test_batch_requests_leave_half_of_the_room(url: str) -> None:
    async with running(url, "p0", "d0", namespace="half", max_requests=2) as cluster:
        cluster.nodes["d0"].script = hangs
        stream = cluster.conductor.generate(request("b0", batch=True))
        await anext(stream)
        with pytest.raises(RequestRejected, match="1 batch requests"):
            await cluster.generate(request("b1", batch=True))
        cluster.nodes["d0"].script = lambda *_: asyncio.sleep(0)
        assert await cluster.generate(request("interactive")) == continuation(PROMPT, 8)
        await stream.aclose()


async def test_an_slo_that_cannot_be_kept_rejects_before_anything_is_computed(url: str) -> None:
    async with running(url, "p0", "d0", namespace="slo", slo_ttft_s=0.5) as cluster:
        node = cluster.nodes["p0"]
        node.profile = {"prefill_base_s": 2.0, "decode_base_s": 1e-3}
        await cluster.told_profile(node)
        with pytest.raises(RequestRejected, match="first token would take 2 s") as raised:
            await cluster.generate(request())
        assert (raised.value.stage, raised.value.retry_after_s) == ("arrival", pytest.approx(1.5))
        assert not node.works
    async with running(url, "p0", "d0", namespace="anyway", slo_ttft_s=0.5, rejection="none") as cluster:
        cluster.nodes["p0"].profile = {"prefill_base_s": 2.0, "decode_base_s": 1e-3}
        await cluster.nodes["p0"].announce()
        assert await cluster.generate(request()) == continuation(PROMPT, 8)


@pytest.mark.parametrize(("rejection", "stage"), [("baseline", "decode"), ("early", "arrival")])
async def test_full_decode_wastes_a_prefill_or_does_not(url: str, rejection: str, stage: str) -> None:
    slo = {"slo_tbt_s": 0.015, "rejection": rejection}
    async with running(url, "p0", "d0", namespace=rejection, **slo) as cluster:
        node = cluster.nodes["d0"]
        node.profile = {"decode_base_s": 0.0, "decode_sequence_s": 0.01}
        node.script = hangs
        await node.announce()
        stream = cluster.conductor.generate(request("running"))
        await anext(stream)  # its decode has begun, as far as the schedule knows
        num_prefills = len(cluster.nodes["p0"].works)
        schedule = cluster.conductor._deps.registry.members["d0"].load.schedule
        await cluster.until(lambda: schedule.batch_at(0.0, 0.0)[0] == 1)
        # On average while it decodes, half of its 8 tokens are there besides the prompt.
        assert schedule.batch_at(0.0, 0.0)[1] == len(PROMPT) + 4
        with pytest.raises(RequestRejected, match="a token would take") as raised:
            await cluster.generate(request("late"))
        assert raised.value.stage == stage
        assert len(cluster.nodes["p0"].works) - num_prefills == (1 if stage == "decode" else 0)
        await stream.aclose()
        await cluster.until(lambda: len(schedule) == 0)


async def test_a_hit_that_was_stale_is_not_taken_for_slowness(url: str) -> None:
    async with running(url, "p0", "d0", namespace="stale") as cluster:
        node, registry = cluster.nodes["p0"], cluster.conductor._deps.registry
        prompt = list(range(1600))
        node.profile = {"prefill_token_s": 1e-2, "decode_base_s": 1e-3}
        node.num_cached_tokens, node.compute_s = 0, 16.0
        node.hold(chain(registry.root_key("") or b"", prompt, MODEL.block_size)[:-1])
        await node.announce()
        member = registry.members["p0"]
        await cluster.until(lambda: member.view.cost.profile.prefill_token_s == 1e-2)
        await cluster.until(lambda: registry.mirror.num_blocks == 99)
        for i in range(3):
            await cluster.generate(request(f"r{i}", prompt))
            timeline = cluster.conductor.timeline(f"r{i}")
            assert timeline is not None
            (placed,) = (event for event in timeline.events if event.name == "placed")
            assert placed.facts["placement"].prefill.compute_s < 2, "the index promises a hit"
        assert member.breaker.closed(cluster.conductor._deps.clock())


async def test_a_node_that_is_far_too_slow_is_given_a_rest(url: str) -> None:
    async with running(url, "p0", "d0", namespace="slow") as cluster:
        member = cluster.conductor._deps.registry.members["p0"]
        for _ in range(2):
            member.breaker.took(0.01, 1.0)
        now_s = cluster.conductor._deps.clock()
        assert member.breaker.closed(now_s), "twice may be chance"
        member.breaker.took(0.01, 1.0)
        assert not member.breaker.closed(now_s)
        # It comes back by itself, with a probe.
        assert await cluster.generate(request()) == continuation(PROMPT, 8)
