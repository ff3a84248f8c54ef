"""What every way of moving bytes to and from a peer offers, whatever it moves them by."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from moonpool.transfer.connections.wire import RegionInfo
from moonpool.transfer.copying.attempt import Attempt, Direction
from moonpool.transfer.memory.chunks import Chunking
from moonpool.transfer.memory.region import Region


class Path(Protocol):
    """One transport to one peer. All methods are called on the event loop's thread."""

    @property
    def name(self) -> str:
        """local, cuda-ipc, shm, ucx or tcp."""

    @property
    def networked(self) -> bool:
        """Bytes leave the host, so that writes are verified at the other end unless that is turned off."""

    def carries(self, direction: Direction, ours: Sequence[Region], theirs: Sequence[RegionInfo]) -> bool:
        """Whether it can move bytes between these regions, by where they lie."""

    def chunking(self, direction: Direction, nbytes: int, observed: bool) -> Chunking:
        """How it wants a batch of ``nbytes`` cut.

        observed: somebody follows the batch span by span, or verifies it, and that goes chunk by chunk.
        """

    async def open(self, direction: Direction, region_ids: Sequence[int]) -> None:
        """Be ready to start, for these regions of the peer: connect what is not connected. Cheap when it is.

        Raises PathFailed, StaleEpoch, AccessDenied.
        """

    def start(self, attempt: Attempt) -> None:
        """Move it. Does not wait and does not raise: what goes wrong goes to ``attempt.stop`` or
        ``leave``.
        """

    def progress(self, attempt: Attempt) -> Mapping[object, int]:
        """What carries the attempt just now, and of each a number that changes while bytes move; empty where
        that cannot be told, or nothing can get stuck.
        """

    def drop(self, carriers: Collection[object]) -> bool:
        """Give up ``carriers``, out of ``progress``, if others can take over what they carry. False: no."""

    async def close(self) -> None:
        """Release sockets, threads and maps. All attempts have ended. Idempotent."""
