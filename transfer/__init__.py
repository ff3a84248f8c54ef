"""Moves bytes between processes: registered regions, batches of spans, typed errors within a deadline.

agent = await TransferAgent.start(options.transfer, agent_id="decode-0", epoch=7)
pool = agent.allocate(256 << 20, "pool")
peer = await agent.connect(AgentDescriptor.unpack(received))
report = await peer.read([Span(pool.id, 0, 4096)], [Span(remote_id, 8192, 4096)], deadline_s=1.0)
"""

from moonpool.transfer.agent import TransferAgent
from moonpool.transfer.connections.descriptor import AgentDescriptor
from moonpool.transfer.connections.notification import Notification
from moonpool.transfer.copying.joint_read import JointRead
from moonpool.transfer.copying.memcpy import move_runs
from moonpool.transfer.errors import (
    AccessDenied,
    AgentClosed,
    ChecksumMismatch,
    DeadlineExceeded,
    DescriptorError,
    GrantLapsed,
    NoPath,
    PathFailed,
    PeerLost,
    RegionError,
    SpanError,
    StaleEpoch,
    TransferError,
)
from moonpool.transfer.memory.checksum import Checksums, checksum
from moonpool.transfer.memory.region import Region
from moonpool.transfer.memory.span import Span, Spans
from moonpool.transfer.memory.write_grants import WriteGrant
from moonpool.transfer.native.cuda import CudaError, CudaUnavailable
from moonpool.transfer.peers.batch import Batch, TransferReport
from moonpool.transfer.peers.peer import Peer

__all__ = [
    "AccessDenied",
    "AgentClosed",
    "AgentDescriptor",
    "Batch",
    "ChecksumMismatch",
    "Checksums",
    "CudaError",
    "CudaUnavailable",
    "DeadlineExceeded",
    "DescriptorError",
    "GrantLapsed",
    "JointRead",
    "NoPath",
    "Notification",
    "PathFailed",
    "Peer",
    "PeerLost",
    "Region",
    "RegionError",
    "Span",
    "SpanError",
    "Spans",
    "StaleEpoch",
    "TransferAgent",
    "TransferError",
    "TransferReport",
    "WriteGrant",
    "checksum",
    "move_runs",
]
