"""The verifier finds what is wrong, not what is on its way, and its repair makes it right."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.comparison import Held, NodeFinding, repair, verify
from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.redis.kv_index import KVIndex
from moonpool.kvstore.index.redis.node_record import EXTERNAL_ROLE, NodeRecord
from moonpool.runtime.errors import NodeUnavailable
from tests.kvstore.nodes import FakeNode, chain
from tests.kvstore.redis_servers import until


@pytest.fixture
async def node(index: KVIndex) -> AsyncIterator[FakeNode]:
    node = await FakeNode(index, "a", lease_ttl_s=30).start()
    node.hold(100)
    await node.settled()
    yield node
    await node.kill()


async def verified(index: KVIndex, node: FakeNode, mirror: IndexMirror | None = None) -> list[NodeFinding]:
    async def ask(record: NodeRecord) -> Held:
        return dict(node.held)

    async def mirrored(node_id: str) -> Held:
        assert mirror is not None
        return {BlockKey(key): tier for key, tier in mirror.held_by(node_id).items()}

    mirrors = {"mirror": mirrored} if mirror is not None else {}
    return await verify(index, mirrors, ask=ask, settle_s=0.05)


async def test_an_index_that_is_right_is_called_so(index: KVIndex, node: FakeNode) -> None:
    (finding,) = await verified(index, node)
    assert not any(finding.differences)
    assert finding.num_blocks == 100


async def test_what_is_missing_wrong_or_stale_is_named_and_repaired(index: KVIndex, node: FakeNode) -> None:
    keys, ghosts = chain(100), chain(7, number=5)
    await index.publish(
        "a", 1, stored=[(keys[3], Tier.SSD), *((ghost, Tier.POOL) for ghost in ghosts)], removed=keys[90:]
    )
    findings = await verified(index, node)
    (difference,) = findings[0].differences
    assert difference.missing == dict.fromkeys(keys[90:], Tier.POOL)
    assert difference.wrong == {keys[3]: Tier.POOL}
    assert difference.stale == set(ghosts)
    assert await repair(index, findings) == 18
    assert not any((await verified(index, node))[0].differences)


async def test_a_mirror_is_compared_with_the_node_and_repaired_by_the_stream(
    index: KVIndex, node: FakeNode
) -> None:
    mirror = IndexMirror(index, lease_ttl_s=30, tick_s=0.02)
    await mirror.start()
    try:
        ghost = chain(1, number=9)[0]
        # The index has a stale entry that the mirror has not, and the other way round.
        await index.publish("a", 1, stored=[(ghost, Tier.POOL)])
        await mirror.caught_up()
        mirror._copy.blocks.remove("a", ghost + chain(100)[-1])
        mirror._copy.blocks.store("a", chain(2, number=9)[1], Tier.POOL)
        findings = await verified(index, node, mirror)
        assert [bool(each) for each in findings[0].differences] == [True, True]
        await repair(index, findings)

        async def right() -> bool:
            return mirror.held_by("a") == node.held and (await index.snapshot())["a"] == node.held

        await until(right)
        assert not any((await verified(index, node, mirror))[0].differences)
    finally:
        await mirror.close()


async def test_changes_on_their_way_are_no_difference(index: KVIndex, node: FakeNode) -> None:
    turn = 0

    async def ask(record: NodeRecord) -> Held:
        # Whenever it is asked it has just changed, and has not said so yet.
        nonlocal turn
        turn += 1
        node.hold(100 - turn)
        node.hold(turn, number=turn)
        return dict(node.held)

    (finding,) = await verify(index, {}, ask=ask, settle_s=0.1)
    assert not any(finding.differences)
    assert turn == 2


async def test_nodes_that_do_not_answer_or_are_not_ours_are_said_to_be_unasked(index: KVIndex) -> None:
    await index.register(NodeRecord("gone", 1, "prefill", rpc_address="127.0.0.1:1"), 30)
    await index.register(NodeRecord("vllm", 1, EXTERNAL_ROLE), 30)

    async def ask(record: NodeRecord) -> Held:
        raise NodeUnavailable(record.node_id, "connection refused")

    gone, vllm = await verify(index, {}, ask=ask, settle_s=0.01)
    assert "connection refused" in gone.unasked
    assert "external engine" in vllm.unasked
