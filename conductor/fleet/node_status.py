"""A node as ``/v1/cluster`` shows it."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from typing import Any

from google.protobuf.message import DecodeError

from moonpool.conductor.fleet.member import Member
from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.protos import node_pb2
from moonpool.transfer import AgentDescriptor
from moonpool.transfer.errors import DescriptorError


def node_status(member: Member, now_s: float) -> dict[str, Any]:
    """Plain JSON types."""
    record, load, ledger, cost = member.record, member.record.load, member.load, member.view.cost
    extra = record.extra
    pool = {
        "name": "pool",
        "num_blocks": load.num_blocks,
        "num_used_blocks": load.num_blocks - load.free_blocks,
        "num_cached_blocks": load.cached_blocks,
    }
    return {
        "node_id": record.node_id,
        "role": record.role,
        "replica": asdict(record.replica) if record.replica else None,  # None: it is a whole node
        "host": record.host,
        "region": record.region,
        "zone": record.zone,
        "host_id": extra.get("host_id", ""),  # equal for store nodes that fail together
        "pid": record.pid,
        "ranks": str(extra.get("ranks", "")),  # such as tp 2 × pp 1; empty: one process
        "slow_rank": slow_rank_of(record),
        "better_pp_layers": str(
            extra.get("better_pp_layers", "")
        ),  # that would balance its stages; empty: none
        "join_s": extra.get("join_s"),  # from its start until it served
        "join": extra.get("join", {}),  # seconds by phase: see engine.node.join_phases
        "first_token_s": member.first_token_s,  # from when it joined to its first token; None: none yet
        "num_starts": extra.get("num_starts", 1),  # of its process
        "versions": extra.get("versions", {}),
        "machine": str(extra.get("machine", "")),
        "weights": str(extra.get("weights", "")),  # their dtype
        "epoch": str(record.epoch),  # JSON readers lose 64-bit integers
        "state": member.state,
        "reasons": list(record.reasons),  # why it is unhealthy
        "warnings": warnings_of(record),
        "health": extra.get("health", {}),  # readings of its host and GPUs
        "clock_offset_s": member.clock_offset.seconds,  # its host's clock less ours; None: not known yet
        "options": extra.get("options", {}),  # those that nodes must agree in
        "version": extra.get("version", ""),
        "resident_adapters": extra.get("resident_adapters", []),  # digests of LoRA adapters in memory
        "agent": _agent(record.kv_address),
        "rpc_address": record.rpc_address,
        "metrics_url": record.metrics_url,
        "model": record.model,
        "load": {
            "num_running": load.num_running,
            "num_waiting": load.num_waiting,
            "num_queued_tokens": load.num_queued_tokens,
            "num_blocks": load.num_blocks,
            "num_free_blocks": load.free_blocks,
            "own_prefills": len(member.view.queue),
            "own_decodes": ledger.num_decodes,
            "own_queue_s": member.view.queue.wait_s(now_s),
        },
        "tiers": [
            pool,
            *(
                {"name": name, "num_blocks": fill.num_blocks, "num_used_blocks": fill.num_held}
                for name, fill in record.tiers.items()
            ),
        ],
        "num_placed": member.view.num_placed,
        "breaker_closes_in_s": member.breaker.closes_in_s(now_s),
        "profile": dict(record.profile) if member.engine is None else asdict(cost.profile),
        "engine": "" if member.engine is None else f"{member.engine.kind} at {member.engine.url}",
        "links_nbytes_per_s": dict(record.links),
        "prefill_correction": cost.prefill_correction.factor(now_s),
        "decode_correction": cost.decode_correction.factor(now_s),
    }


def warnings_of(record: NodeRecord) -> list[str]:
    """Sentences of a node about its security."""
    found = record.extra.get("warnings")
    return [str(sentence) for sentence in found] if isinstance(found, list) else []


def slow_rank_of(record: NodeRecord) -> str:
    """A sentence about a rank of the node that its other ranks wait for; empty: there is none."""
    return str(record.extra.get("slow_rank", ""))


@lru_cache(maxsize=4096)
def _agent(kv_address: bytes) -> dict[str, Any]:
    """The transfer agent in a packed ``KvAddress``; empty if it is invalid. Shared: do not write to it."""
    try:
        agent = AgentDescriptor.unpack(node_pb2.KvAddress.FromString(kv_address).agent)
    except (DecodeError, DescriptorError):
        return {}
    return {"boot_id": agent.boot_id, "transports": list(agent.transports)}
