"""The interface of a transport to one peer. A new transport subclasses ``Path``, as ``LocalPath`` does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.attempt import Attempt
from moonpool.transfer.copying.batch_request import Direction
from moonpool.transfer.errors import RegionError
from moonpool.transfer.memory.chunks import Chunking
from moonpool.transfer.memory.region import Region
from moonpool.transfer.memory.span import Spans


class WrittenNow(NamedTuple):
    """nbytes: 0 if not done. unfinished: the connection from which the peer may still take bytes, as in
    ``Attempt.unfinished_streams``."""

    nbytes: int
    unfinished: tuple[int, ...] = ()


NOT_WRITTEN = WrittenNow(0)


class Path(ABC):
    """All methods are called on the event loop's thread.

    name: local, cuda-ipc, shm, ucx or tcp. networked: bytes leave the host, so writes are verified at the
    peer unless ``transfer.checksum`` is off.
    """

    name: str
    networked = False
    for_devices = False
    """Only device memory goes this way."""

    def carries(self, direction: Direction, ours: Sequence[Region], theirs: Sequence[RegionInfo]) -> bool:
        """Whether it can move bytes between these regions, by their kinds of memory."""
        return True

    @abstractmethod
    def chunking(
        self, direction: Direction, nbytes: int, verified: bool, region_ids: Sequence[int]
    ) -> Chunking:
        """The chunks of a batch of ``nbytes``.

        verified: each chunk is verified when it arrives. region_ids: of the peer, after ``open`` of them.
        """

    async def open(self, direction: Direction, region_ids: Sequence[int]) -> None:
        """Connect what is needed to move these regions of the peer. Cheap if it is connected.

        Raises PathFailed, StaleEpoch, AccessDenied.
        """
        return

    @abstractmethod
    def start(self, attempt: Attempt) -> None:
        """Start moving, without waiting. Errors go to ``attempt.stop`` or ``attempt.leave``."""

    def read_now(self, region: Region, local: Spans, remote: Spans, checksums: bytes) -> int:
        """Read before this returns, if that takes no longer than posting a batch: the number of bytes.

        region: of all of ``local``, which nothing else has checked; writable host memory. checksums: uint64
        [n], to verify, or empty. 0: post a batch, which also finds what is wrong with these arguments or the
        peer. The local bytes are undefined then.
        """
        return 0

    def write_now(
        self, region: Region, local: Spans, remote: Spans, checksums: bytes | None, grant: int
    ) -> WrittenNow:
        """Write before this returns, if that takes no longer than posting a batch.

        region: of all of ``local``, in host memory; nothing else has been checked. checksums: uint64 [n], to
        verify at the peer; None, only if ``networked``: those of the local bytes; empty: none. If it returns
        0 bytes, post a batch, which also finds what is wrong.
        """
        return NOT_WRITTEN

    def progress(self, attempt: Attempt) -> Mapping[object, int]:
        """Per carrier of the attempt a number that changes while bytes move. Empty: it cannot stall."""
        return {}

    def drop(self, carriers: Collection[object]) -> bool:
        """Drop ``carriers`` of ``progress`` if others can take over their work. False: they cannot."""
        return False

    async def close(self) -> None:
        """Release sockets, threads and maps. All attempts have ended. Idempotent."""
        return


def known_regions(
    region_ids: Iterable[int], known: Callable[[int], RegionInfo | None], attempt: Attempt
) -> list[RegionInfo] | None:
    """What the peer said of its regions. None, and the attempt is stopped, if it has closed one since."""
    infos = []
    for region_id in region_ids:
        info = known(region_id)
        if info is None:
            attempt.stop(RegionError(region_id, "was closed by its owner"))
            return None
        infos.append(info)
    return infos
