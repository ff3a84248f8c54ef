"""Comparison of the index with the blocks that nodes really hold, and with mirrors of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.errors import ChangesCorrupt
from moonpool.kvstore.index.redis.kv_index import KVIndex, replay
from moonpool.kvstore.index.redis.node_record import EXTERNAL_ROLE, NodeRecord
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.errors import NodeUnavailable, RemoteError

Held = dict[BlockKey, Tier]
AskNode = Callable[[NodeRecord], Awaitable[Held]]
AskMirror = Callable[[str], Awaitable[Held]]

_CALL_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Difference:
    """What ``subject`` (the index or a mirror) says of a node, compared with the truth."""

    subject: str
    missing: Held = field(default_factory=dict)  # held, not in the index
    wrong: Held = field(default_factory=dict)  # with the right tier
    stale: frozenset[BlockKey] = frozenset()  # in the index, not held

    def __bool__(self) -> bool:
        return bool(self.missing or self.wrong or self.stale)

    def and_still(self, later: Difference) -> Difference:
        """The differences found both times: blocks change between two questions."""
        return Difference(
            self.subject,
            {key: tier for key, tier in later.missing.items() if key in self.missing},
            {key: tier for key, tier in later.wrong.items() if key in self.wrong},
            self.stale & later.stale,
        )


@dataclass(frozen=True, slots=True)
class NodeFinding:
    """One node: the index and each mirror compared with the node's own answer. ``unasked``: why the node was
    not asked; mirrors are then compared with the index."""

    record: NodeRecord
    num_blocks: int  # in the index
    differences: Sequence[Difference]
    unasked: str = ""


async def ask_node(record: NodeRecord) -> Held:
    """The blocks a node says it holds. Raises ``NodeUnavailable``, ``RemoteError``, ``ChangesCorrupt``."""
    held: Held = {}
    async with rpc.channel(record.rpc_address) as channel:
        with rpc.node_errors(record.node_id):
            call = node_pb2_grpc.NodeStub(channel).ListBlocks(
                node_pb2.ListBlocksRequest(), timeout=_CALL_TIMEOUT_S
            )
            async for part in call:
                held |= replay([part.changes])
    return held


async def verify(
    index: KVIndex, mirrors: Mapping[str, AskMirror], *, ask: AskNode = ask_node, settle_s: float = 1.0
) -> list[NodeFinding]:
    """Compare everything twice, ``settle_s`` apart: what differs both times is wrong. Raises
    ``IndexUnavailable`` and the mirrors' errors."""
    first = {finding.record.node_id: finding for finding in await _compare(index, mirrors, ask)}
    if not any(any(finding.differences) for finding in first.values()):
        return list(first.values())
    await asyncio.sleep(settle_s)
    found = []
    for finding in await _compare(index, mirrors, ask):
        before = first.get(finding.record.node_id)
        earlier = {d.subject: d for d in before.differences} if before is not None else {}
        same_life = before is not None and before.record.epoch == finding.record.epoch
        lasting = [
            earlier[d.subject].and_still(d) if same_life and d.subject in earlier else Difference(d.subject)
            for d in finding.differences
        ]
        found.append(NodeFinding(finding.record, finding.num_blocks, lasting, finding.unasked))
    return found


async def repair(index: KVIndex, findings: Sequence[NodeFinding]) -> int:
    """Publish what is true. Returns how many entries were corrected; mirrors follow by the stream. Raises
    ``IndexUnavailable``, ``NodeUnknown``, ``EpochSuperseded`` (the node left or restarted)."""
    count = 0
    for finding in findings:
        for difference in finding.differences:
            if difference:
                right = {**difference.missing, **difference.wrong}
                await index.publish(
                    finding.record.node_id, finding.record.epoch, right.items(), difference.stale
                )
                count += len(right) + len(difference.stale)
    return count


async def _compare(index: KVIndex, mirrors: Mapping[str, AskMirror], ask: AskNode) -> list[NodeFinding]:
    findings = []
    records = await index.nodes()
    named = await index.snapshot()
    for node_id, record in sorted(records.items()):
        indexed, unasked = named.get(node_id, {}), ""
        true = indexed
        differences = []
        if record.role == EXTERNAL_ROLE:
            unasked = "it is an external engine"
        else:
            try:
                true = await ask(record)
                differences.append(_difference("the index", indexed, true))
            except (NodeUnavailable, RemoteError, ChangesCorrupt) as error:
                unasked = str(error)
        for name, mirror in mirrors.items():
            differences.append(_difference(name, await mirror(node_id), true))
        findings.append(NodeFinding(record, len(indexed), differences, unasked))
    return findings


def _difference(subject: str, indexed: Held, true: Held) -> Difference:
    return Difference(
        subject,
        {key: tier for key, tier in true.items() if key not in indexed},
        {key: tier for key, tier in true.items() if indexed.get(key, tier) is not tier},
        frozenset(indexed.keys() - true.keys()),
    )
