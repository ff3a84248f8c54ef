"""Device memory on both sides, and what the stand-in for the runtime holds."""

from __future__ import annotations

import ctypes
import gc

import numpy as np

from moonpool.transfer import (
    Peer,
    Span,
    TransferAgent,
)
from moonpool.transfer.memory.region import Region
from moonpool.transfer.native.arrays import U64
from tests.transfer.conftest import RemotePeer
from tests.transfer.device import DeviceRegion, stand_in

NBYTES = 8 << 20


def counts() -> dict[str, int]:
    """What there is in the stand-in of this process."""
    gc.collect()
    values = (ctypes.c_long * 5)()
    ctypes.CDLL(stand_in()).stand_in_counts(values)
    return dict(zip(("allocations", "imported", "pinned", "streams", "events"), values, strict=True))


def addresses(*values: int) -> U64:
    return np.array(values, np.uint64)


def halves(region: Region | DeviceRegion | int, nbytes: int = NBYTES) -> list[Span]:
    region_id = region if isinstance(region, int) else region.id
    return [Span(region_id, 0, nbytes // 2), Span(region_id, nbytes // 2, nbytes - nbytes // 2)]


async def connected(agent: TransferAgent, theirs: RemotePeer, seed: int = 1) -> tuple[Peer, int]:
    """A peer and its region in a device's memory."""
    remote = (await theirs.do("allocate_on_device", nbytes=NBYTES, seed=seed))["region"]
    return await agent.connect(theirs.descriptor), int(remote)
