"""What the store asks of the tiers it does not own: the engine's pool above it, the disk below."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from moonpool.kvstore.blocks.keys import BlockKey

if TYPE_CHECKING:
    from typing_extensions import Buffer

Bytes = npt.NDArray[np.uint8]


class PoolTier(Protocol):
    """The engine's pool. What it holds of a chain is a prefix of it; it makes room by itself and tells the
    store by ``TieredStore.demote``.

    in_main_memory: whether ``bytes_of`` has anything to show. needs_loop: the event loop moves its bytes, so
    that whoever waits for ``copy_out`` must be another thread.
    """

    @property
    def in_main_memory(self) -> bool: ...

    @property
    def needs_loop(self) -> bool: ...

    def __contains__(self, key: object) -> bool: ...

    def keys(self) -> Iterable[BlockKey]: ...

    def block_of(self, key: BlockKey) -> int | None: ...

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        """The key before a held one in its chain; None for the first."""

    def lineage(self, key: BlockKey) -> list[int]:
        """The blocks of a held key's chain up to it, the first one first: what to acquire with it."""

    def bytes_of(self, block: int) -> Bytes:
        """uint8 [block_nbytes], to be read while the block is acquired, or before the next await. Only where
        the pool is in main memory."""

    def copy_out(self, blocks: Sequence[int], destinations: Sequence[Bytes]) -> list[int]:
        """Copy blocks to main memory, on any thread; xxh3-64 of what arrived there.

        Raises MoonpoolError where they cannot be reached; the destinations' bytes are undefined then.
        """

    async def checksums(self, blocks: Sequence[int]) -> list[int]:
        """xxh3-64 of the bytes of acquired blocks. Raises as ``copy_out``."""

    def known_checksum(self, block: int) -> int | None:
        """Its checksum where it was computed before."""

    def acquire(self, blocks: Sequence[int]) -> None: ...

    def release(self, blocks: Sequence[int]) -> None: ...


class DiskTier(Protocol):
    """Blocks on disk, closed by itself: it holds the blocks before each one it holds. Only what is ``async``
    touches the disk, never on the caller's thread and never for longer than its own deadline."""

    on_dropped: Callable[[Sequence[BlockKey], str], None] | None
    """Called with blocks that went by themselves, and why: evicted, corrupt, unreadable."""

    def __contains__(self, key: object) -> bool: ...

    def __len__(self) -> int: ...

    def keys(self) -> list[BlockKey]: ...

    def parent_of(self, key: BlockKey) -> BlockKey | None: ...

    def checksum_of(self, key: BlockKey) -> int: ...

    def use(self, keys: Sequence[BlockKey]) -> int: ...

    async def put(
        self,
        keys: Sequence[BlockKey],
        sources: Sequence[Buffer],
        *,
        parents: Sequence[BlockKey | None],
        checksums: Sequence[int | None],
    ) -> list[bool]:
        """Which of the blocks are held, durably, when this returns. Parents come before their children, or
        are being put. ``checksums``: None where one is not known."""

    async def get(self, keys: Sequence[BlockKey], destinations: Sequence[Buffer]) -> list[bool]:
        """Which destinations were filled, verified. The others are unchanged, and are not written later."""

    async def verify(self, keys: Sequence[BlockKey]) -> list[bool]: ...

    async def remove(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Drop blocks with what follows them; returns all that went."""

    @property
    def is_stalled(self) -> bool: ...

    def check_integrity(self) -> None: ...

    async def close(self) -> None: ...
