"""Regions: memory that a transfer agent moves bytes from or to, and its current uses."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from moonpool.transfer.errors import RegionError, SpanError, TransferError
from moonpool.transfer.memory.allocation import DeviceMemory, Memory
from moonpool.transfer.memory.checksum import checksums
from moonpool.transfer.memory.chunks import based
from moonpool.transfer.memory.span import Spans, check_bounds, region_ids, spans_in
from moonpool.transfer.memory.staging import Staging, StagingPool
from moonpool.transfer.native.arrays import U32, U64

# Time for a use to stop: it is between two system calls, or its socket was shut.
_STOP_S = 5.0
MAX_OPEN_REGIONS = 4096


class Region:
    """Registered memory. The agent never reuses an ``id``, so a stale span cannot name new memory.

    device: ordinal of the CUDA device that has the memory; None: the host.
    """

    def __init__(
        self, table: RegionTable, region_id: int, name: str, memory: Memory | DeviceMemory, writable: bool
    ) -> None:
        self._table = table
        self._memory = memory
        self.id = region_id
        self.name = name
        self.writable = writable
        self.nbytes = memory.nbytes
        self.address = memory.address
        self.device: int | None = memory.device
        self.on_closed: Callable[[], object] | None = None
        """Called after the last use, before the memory is freed."""

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes, uint8 [nbytes]. Raises RegionError for device memory."""
        if isinstance(self._memory, DeviceMemory):
            raise RegionError(self.id, f"is in the memory of CUDA device {self.device}, not the host's")
        return self._memory.array

    @property
    def buffer(self) -> memoryview:
        """The bytes as a memoryview of format B."""
        view = memoryview(self.array.data)
        return view if self.writable else view.toreadonly()

    @property
    def backing(self) -> str:
        """anonymous, memfd, registered or cuda."""
        return self._memory.backing

    @property
    def fd(self) -> int:
        """The memfd's descriptor, or -1."""
        return self._memory.fd

    @property
    def closed(self) -> bool:
        return self.id not in self._table

    def close(self) -> None:
        """End all uses of the memory. Idempotent.

        Batches that use it, ours and our peers', end with RegionError. When this returns, no thread of the
        agent touches the bytes. Allocated memory is freed with the last array or view of it.
        """
        if self._table.remove(self):
            if self.on_closed is not None:
                self.on_closed()
            self._memory.close()

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Region({self.id}, {self.name!r}, {self.nbytes} bytes, {self.backing})"


class Hold:
    """A use of some regions. It keeps their memory; ``stop`` is called when one of them is closed."""

    def __init__(
        self, table: RegionTable, regions: tuple[Region, ...], stop: Callable[[RegionError], None]
    ) -> None:
        self._table = table
        self.regions = regions
        self.stop = stop

    @property
    def device(self) -> int | None:
        """Device of the first region in device memory; None: all are in host memory."""
        return next((region.device for region in self.regions if region.device is not None), None)

    def staging(self) -> AbstractContextManager[Staging]:
        """A staging of its ``device``. When the context ends, its copies are complete."""
        assert self.device is not None
        assert self._table.staging is not None
        return self._table.staging.borrow(self.device)

    def checksums(self, spans: Spans) -> U64:
        """Current checksums of spans of its regions: uint64 [n]."""
        bases = {region.id: region.address for region in self.regions}
        addresses = based(spans.region, spans.offset, bases)
        if self.device is None:
            return checksums(addresses, spans.nbytes)
        with self.staging() as staging:
            return np.array(staging.checksums(addresses, spans.nbytes), np.uint64)

    def release(self) -> None:
        """From any thread. Idempotent."""
        self._table.release(self)


class RegionTable:
    """The regions of one agent. ``hold`` and ``release`` are thread-safe; the rest is for the owner's thread.

    A region has slot id % MAX_OPEN_REGIONS.
    """

    def __init__(
        self, open_ids: U32, publish: Callable[[Region], None], on_close: Callable[[Region], None]
    ) -> None:
        """open_ids: uint32 [MAX_OPEN_REGIONS], the id of the open region of each slot, or 0.

        Peers on this host check it after a copy. publish: called with each region before its id is written.
        """
        self.staging: StagingPool | None = None
        """Set with the first region in device memory."""
        self._open_ids = open_ids
        self._publish = publish
        self._on_close = on_close
        # The next id of each free slot; the slot that has been free longest comes first. No region has id 0.
        self._next_ids = deque(range(1, MAX_OPEN_REGIONS))
        self._regions: dict[int, Region] = {}
        self._holds: dict[Hold, None] = {}
        self._changed = threading.Condition(threading.RLock())

    def __contains__(self, region_id: int) -> bool:
        return region_id in self._regions

    def __len__(self) -> int:
        return len(self._regions)

    def __iter__(self) -> Iterator[Region]:
        return iter(list(self._regions.values()))

    def find(self, region_id: int) -> Region | None:
        return self._regions.get(region_id)

    def get(self, region_id: int) -> Region:
        region = self._regions.get(region_id)
        if region is None:
            raise RegionError(region_id, "is not open")
        return region

    def add(self, name: str, memory: Memory | DeviceMemory, writable: bool) -> Region:
        if not self._next_ids:
            raise TransferError(f"an agent can have {MAX_OPEN_REGIONS - 1} regions open at a time, not more")
        region = Region(self, self._next_ids.popleft(), name, memory, writable)
        with self._changed:
            self._regions[region.id] = region
            self._publish(region)
            self._open_ids[region.id % MAX_OPEN_REGIONS] = region.id
        return region

    def hold(self, region_ids: Iterable[int], stop: Callable[[RegionError], None]) -> Hold:
        """Hold regions. Raises RegionError, and holds none, when one is not open."""
        with self._changed:
            hold = Hold(self, tuple(self.get(region_id) for region_id in region_ids), stop)
            self._holds[hold] = None
            return hold

    def release(self, hold: Hold) -> None:
        with self._changed:
            if self._holds.pop(hold, hold) is None:
                self._changed.notify_all()

    def remove(self, region: Region) -> bool:
        """Stop all uses of the region and wait for their end. False: it was removed before."""
        region_id = region.id
        with self._changed:
            if self._regions.pop(region_id, None) is None:
                return False
            self._open_ids[region_id % MAX_OPEN_REGIONS] = 0
            users = [hold for hold in self._holds if region in hold.regions]
        self._on_close(region)
        # Outside the lock: a use that ends at once releases its hold.
        for hold in users:
            hold.stop(RegionError(region_id, "was closed while a batch was using it"))
        with self._changed:
            gone = self._changed.wait_for(lambda: not any(hold in self._holds for hold in users), _STOP_S)
        if not gone:
            raise TransferError(f"region {region_id} is still in use {_STOP_S:g} s after it was closed")
        if region_id + MAX_OPEN_REGIONS < 1 << 32:
            self._next_ids.append(region_id + MAX_OPEN_REGIONS)
        return True

    def close(self) -> None:
        for region in self:
            region.close()

    def check_integrity(self) -> None:
        """Check the table. No batch may be in progress."""
        assert not self._holds, f"{len(self._holds)} holds are left"
        published = set(self._open_ids[self._open_ids > 0].tolist())
        assert published == set(self._regions), "the published ids differ from the table"

    def addresses(self, spans: Spans, *, writable: bool) -> U64:
        """Address of each span, uint64 [n]. Raises SpanError: out of bounds, not open or read-only."""
        addresses = spans.offset.copy()
        ids = region_ids(spans)
        for region_id in ids:
            where = spans_in(spans, region_id, ids)
            region = self._regions.get(region_id)
            if region is None:
                raise SpanError(int(where[0]), f"region {region_id} is not open")
            if writable and not region.writable:
                raise SpanError(int(where[0]), f"region {region_id} is read-only")
            check_bounds(spans, region_id, region.nbytes, where)
            if len(ids) == 1:
                addresses += np.uint64(region.address)
            else:
                addresses[where] += np.uint64(region.address)
        return addresses
