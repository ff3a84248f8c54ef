"""The tiers that the store does not own: the engine's pool above it, the disk below."""

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
    """The engine's pool. It has a prefix of each chain, makes room by itself and calls
    ``TieredStore.demote``.

    in_main_memory: whether ``bytes_of`` works. needs_loop: the event loop moves its bytes, so ``copy_out``
    must be awaited on another thread.
    """

    @property
    def in_main_memory(self) -> bool: ...

    @property
    def needs_loop(self) -> bool: ...

    def __contains__(self, key: object) -> bool: ...

    def keys(self) -> Iterable[BlockKey]: ...

    def block_of(self, key: BlockKey) -> int | None: ...

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        """The key before a block in its chain; None for the first."""

    def lineage(self, key: BlockKey) -> list[int]:
        """The blocks of a key's chain up to it, the first one first: acquire them with it."""

    def bytes_of(self, block: int) -> Bytes:
        """uint8 [block_nbytes], valid while the block is acquired or until the next await."""

    def copy_out(self, blocks: Sequence[int], destinations: Sequence[Bytes]) -> list[int]:
        """Copy blocks to main memory, on any thread; returns xxh3-64 of the copies.

        Raises ``MoonpoolError``: the pool cannot be reached; the destinations are undefined.
        """

    async def checksums(self, blocks: Sequence[int]) -> list[int]:
        """xxh3-64 of acquired blocks. Raises as ``copy_out``."""

    def known_checksum(self, block: int) -> int | None:
        """The checksum if it was computed before."""

    def acquire(self, blocks: Sequence[int]) -> None: ...

    def generation_of(self, block: int) -> int:
        """It changes when the block gets other content."""

    def release(self, blocks: Sequence[int]) -> None: ...


class DiskTier(Protocol):
    """Blocks on disk; each one's predecessors are there too. Only ``async`` methods use the disk, never on
    the caller's thread and never longer than its deadline."""

    on_dropped: Callable[[Sequence[BlockKey], str], None] | None
    """Called with blocks that the tier drops by itself, and why: evicted, corrupt, unreadable."""

    @property
    def capacity(self) -> int:
        """Most blocks that it holds at a time."""

    @property
    def nominal_capacity(self) -> int:
        """``capacity`` where there is space for all of them."""

    async def provide(self, num_blocks: int) -> None:
        """Take the space for this many blocks in all. Afterwards ``capacity`` is less if there is none."""

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
        """Return which blocks are held, durably. Parents come before their children, or are being put.
        ``checksums``: None where not known."""

    async def get(self, keys: Sequence[BlockKey], destinations: Sequence[Buffer]) -> list[bool]:
        """Return which destinations were filled, verified. The others are unchanged and not written later."""

    async def verify(self, keys: Sequence[BlockKey]) -> list[bool]: ...

    async def remove(self, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Drop blocks and their descendants; returns all that were dropped."""

    @property
    def is_stalled(self) -> bool: ...

    def check_integrity(self) -> None: ...

    async def close(self) -> None: ...
