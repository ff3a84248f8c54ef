"""Bytes between processes: registered regions, batches of spans, and a typed error in time when a peer is
gone.

agent = await TransferAgent.start(options.transfer, agent_id="decode-0", epoch=7)
pool = agent.allocate(256 << 20, "pool")
peer = await agent.connect(AgentDescriptor.unpack(received))
report = await peer.read([Span(pool.id, 0, 4096)], [Span(remote_id, 8192, 4096)], deadline_s=1.0)
"""

from transfer.agent import TransferAgent
from transfer.batch import Batch, TransferReport
from transfer.checksum import checksum
from transfer.cuda.library import CudaError, CudaUnavailable
from transfer.descriptor import AgentDescriptor
from transfer.errors import (
    AccessDenied,
    AgentClosed,
    ChecksumMismatch,
    DeadlineExceeded,
    DescriptorError,
    NoPath,
    PathFailed,
    PeerLost,
    RegionError,
    SpanError,
    StaleEpoch,
    TransferError,
)
from transfer.joint_read import JointRead
from transfer.notification import Notification
from transfer.peer import Peer
from transfer.region import Region
from transfer.runs import move_runs
from transfer.span import Span, Spans

__all__ = [
    "AccessDenied",
    "AgentClosed",
    "AgentDescriptor",
    "Batch",
    "ChecksumMismatch",
    "CudaError",
    "CudaUnavailable",
    "DeadlineExceeded",
    "DescriptorError",
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
    "checksum",
    "move_runs",
]
