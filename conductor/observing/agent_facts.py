"""What a node's transfer agent says of itself: which host it is on, and the ways to it."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from google.protobuf.message import DecodeError

from moonpool.protos import node_pb2
from moonpool.transfer import AgentDescriptor
from moonpool.transfer.errors import DescriptorError


@lru_cache(maxsize=4096)
def agent_facts(kv_address: bytes) -> dict[str, Any]:
    """Of a packed ``KvAddress``; empty for one that makes no sense. The answer is shared: do not write."""
    try:
        agent = AgentDescriptor.unpack(node_pb2.KvAddress.FromString(kv_address).agent)
    except (DecodeError, DescriptorError):
        return {}
    return {"boot_id": agent.boot_id, "transports": list(agent.transports)}
