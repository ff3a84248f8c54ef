"""What a batch moves. Created once a batch; everything that works on the batch reads it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from moonpool.transfer.copying.joint_read import JointRead
from moonpool.transfer.memory.span import Spans
from moonpool.transfer.native.arrays import U64

Direction = Literal["read", "write"]


@dataclass(frozen=True, slots=True, eq=False)
class BatchRequest:
    """A read or write of checked spans.

    addresses: of the local spans, uint64 [n]. checksums: expected of each span, uint64 [n]; None: unknown, or
    not to be verified. verify_on_network: verify writes at the peer even without ``checksums``.
    grant: the peer's, to write ``remote``.
    deadline_s: as given by the caller; ends_at: the same deadline by ``time.monotonic``. The event loop's own
    clock stands still while the loop is busy (uvloop), so the deadline does not use it.
    """

    direction: Direction
    local: Spans
    addresses: U64
    remote: Spans
    deadline_s: float
    ends_at: float
    checksums: U64 | None
    verify_on_network: bool
    notify: bytes | None
    grant: int
    joint: JointRead | None
    nbytes: int
    local_regions: list[int]
    remote_regions: list[int]

    def seconds_left(self) -> float:
        return self.ends_at - time.monotonic()

    def verifies_remote(self, networked: bool) -> bool:
        """Whether a write is verified at the peer, over a path that is ``networked`` or not."""
        verified = self.checksums is not None or (self.verify_on_network and networked)
        return verified and self.direction == "write"
