"""Copies of device memory: directly, or through pinned host memory."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Iterator

import numpy as np
import xxhash

from moonpool.transfer.memory.allocation import allocate
from moonpool.transfer.memory.checksum import Checksums
from moonpool.transfer.memory.chunks import split_runs, windows
from moonpool.transfer.native.arrays import U64
from moonpool.transfer.native.cuda import Cuda, CudaError
from moonpool.transfer.native.libc import IOV_MAX

SLOT_NBYTES = 4 << 20
_NUM_SLOTS = 3

Wanted = Callable[[], bool]
Move = Callable[[U64, U64, U64], bool]
"""(addresses in a slot, other addresses, sizes) -> False: the copy is no longer wanted."""

_log = logging.getLogger(__name__)
# A device may still write to the slots of these, so they must not be freed.
_leaked: list[Staging] = []


Hashers = dict[int, tuple[int, Checksums]]
"""By the address of a region: its size, and what computes checksums in it."""


class Staging:
    """A CUDA stream, and slots of pinned memory with an event each. Used by one thread at a time.

    The stream does not wait for others: kernels that use the same memory must have ended.
    """

    def __init__(self, cuda: Cuda, device: int, hashers: Hashers | None = None) -> None:
        """hashers: of memory with an owner that computes checksums on the device."""
        self.device = device
        self._hashers = {} if hashers is None else hashers
        self._cuda = cuda
        self._slots = allocate(_NUM_SLOTS * SLOT_NBYTES, "slots", "anonymous")
        cuda.pin(self._slots.address, self._slots.nbytes)
        self._stream = cuda.new_stream()
        self._events = [cuda.new_event() for _ in range(_NUM_SLOTS)]

    def copy(self, to: U64, source: U64, nbytes: U64, wanted: Wanted) -> bool:
        """Copy ``nbytes[i]`` from ``source[i]`` to ``to[i]``, directly. False: it is no longer wanted."""
        if not wanted():
            return False
        self._cuda.copy(to, source, nbytes, self._stream)
        self._cuda.record(self._events[0], self._stream)
        self._cuda.wait_for_event(self._events[0])
        return True

    def upload(self, to: U64, other: U64, nbytes: U64, fill: Move) -> bool:
        """Copy to ``to`` what ``fill`` puts into slots; one slot is copied while the next is filled."""
        to, other, nbytes = _fitting(to, other, nbytes)
        for turn, (begin, end, slot) in enumerate(self._slotted(nbytes)):
            event = self._events[turn % _NUM_SLOTS]
            if turn >= _NUM_SLOTS:
                self._cuda.wait_for_event(event)
            if not fill(slot, other[begin:end], nbytes[begin:end]):
                return False
            self._cuda.copy(to[begin:end], slot, nbytes[begin:end], self._stream)
            self._cuda.record(event, self._stream)
        self.finish()
        return True

    def download(self, source: U64, other: U64, nbytes: U64, empty: Move) -> bool:
        """Copy from ``source`` to slots for ``empty``; one slot is emptied while the next are filled."""
        source, other, nbytes = _fitting(source, other, nbytes)
        parts = self._slotted(nbytes)

        def enqueue(turn: int) -> None:
            if turn < len(parts):
                begin, end, slot = parts[turn]
                self._cuda.copy(slot, source[begin:end], nbytes[begin:end], self._stream)
                self._cuda.record(self._events[turn % _NUM_SLOTS], self._stream)

        for turn in range(_NUM_SLOTS):
            enqueue(turn)
        for turn, (begin, end, slot) in enumerate(parts):
            self._cuda.wait_for_event(self._events[turn % _NUM_SLOTS])
            if not empty(slot, other[begin:end], nbytes[begin:end]):
                return False
            enqueue(turn + _NUM_SLOTS)
        return True

    def checksums(self, address: U64, nbytes: U64) -> list[int]:
        """``transfer.checksum`` of each run of device memory: on the device where its owner can, else of a
        copy in host memory."""
        for begin, (size, hasher) in list(self._hashers.items()):
            if len(address) and begin <= address.min() and (address + nbytes).max() <= begin + size:
                on_device: list[int] = hasher(address - np.uint64(begin), nbytes).tolist()
                return on_device
        ends = np.cumsum(nbytes).tolist()
        found: list[int] = []
        digest, seen = xxhash.xxh3_64(), 0

        def read(slot: U64, _: U64, sizes: U64) -> bool:
            nonlocal digest, seen
            for at, size in zip(slot.tolist(), sizes.tolist(), strict=True):
                digest.update((ctypes.c_uint8 * size).from_address(at))
                seen += size
                if seen == ends[len(found)]:
                    found.append(digest.intdigest())
                    digest = xxhash.xxh3_64()
            return True

        self.download(address, address, nbytes, read)
        return found

    def _slotted(self, nbytes: U64) -> list[tuple[int, int, U64]]:
        """(begin, end, address of each of these rows in a slot), for one slot after another."""
        parts = []
        for turn, (begin, end, _) in enumerate(windows(nbytes, IOV_MAX, SLOT_NBYTES)):
            sizes = nbytes[begin:end]
            first = np.uint64(self._slots.address + turn % _NUM_SLOTS * SLOT_NBYTES)
            parts.append((begin, end, first + np.cumsum(sizes) - sizes))
        return parts

    def finish(self) -> None:
        """Wait for all copies."""
        self._cuda.wait_for_stream(self._stream)

    def close(self) -> None:
        with self._cuda.on(self.device):
            self._cuda.destroy_stream(self._stream)
            for event in self._events:
                self._cuda.destroy_event(event)
            self._cuda.unpin(self._slots.address)


def _fitting(address: U64, other: U64, nbytes: U64) -> tuple[U64, U64, U64]:
    """The same runs, split to fit slots."""
    if nbytes.max() <= SLOT_NBYTES:
        return address, other, nbytes
    run, skipped, nbytes = split_runs(nbytes, SLOT_NBYTES)
    return address[run] + skipped, other[run] + skipped, nbytes


class StagingPool:
    """Stagings, made on demand and kept. Thread-safe."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.hashers: Hashers = {}
        self._idle: list[Staging] = []
        self._busy: list[Staging] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def borrow(self, device: int) -> Iterator[Staging]:
        """A staging of ``device``, the current device meanwhile. Its copies are complete at the end."""
        with self.cuda.on(device):
            staging = self._find(device)
            try:
                yield staging
            finally:
                # If this fails the staging stays busy: the device may still write to its slots.
                staging.finish()
                with self._lock:
                    self._busy.remove(staging)
                    self._idle.append(staging)

    def _find(self, device: int) -> Staging:
        with self._lock:
            found = next((staging for staging in self._idle if staging.device == device), None)
            if found is not None:
                self._idle.remove(found)
        # Outside the lock: pinning memory takes milliseconds.
        found = found or Staging(self.cuda, device, self.hashers)
        with self._lock:
            self._busy.append(found)
        return found

    def close(self) -> None:
        """Free the stagings. None is borrowed any more."""
        for staging in self._idle:
            try:
                staging.close()
            except CudaError as error:
                # After a device error nothing can be freed before the process ends.
                _log.error("a stream of device %d cannot be freed: %s", staging.device, error)
                _leaked.append(staging)
        _leaked.extend(self._busy)
        self._idle.clear()
