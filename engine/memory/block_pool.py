"""Bookkeeping of the paged pool: keys, users and eviction of its blocks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from moonpool.engine.errors import OutOfBlocks
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.eviction.kept_blocks import KeptBlocks
from moonpool.kvstore.eviction.surplus_copies import SurplusCopies

BlockCallback = Callable[[int, BlockKey], None]


class _Piece(NamedTuple):
    block_ids: Sequence[int]
    on_evicted: Callable[[], None]


class BlockPool:
    """Bookkeeping of ``num_blocks`` blocks; the bytes are elsewhere. One thread only.

    A block is *free* (no content), *used* (acquired at least once), or *idle*: sealed, not acquired, cached
    until its room is needed. A user of a block also uses the blocks before it in its chain, except those that
    it has passed: released because its window is behind them. Eviction goes leaf first: the pool always has a
    prefix of each chain. Where only passed blocks are left to evict, the blocks after them lose their keys.
    Blocks whose content is one piece, such as an adapter, are used together: when the last one is evicted,
    the piece ends, and all of it that nothing reads is evicted.

    ``on_sealed(block, key)`` is called when a key becomes findable, ``on_evicted(block, key)`` when it no
    longer is, while its block's bytes are valid, ``on_release()`` after a release. Cold copies in ``surplus``
    are evicted first, blocks in ``kept`` last. Await ``ready`` before writing to allocated blocks: evicted
    bytes may still be read, until ``when_read`` returns.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, on_release: Callable[[], None] | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.on_sealed: BlockCallback | None = None
        self.on_evicted: BlockCallback | None = None
        self.on_release = on_release
        self.surplus: SurplusCopies[BlockKey] = SurplusCopies()
        self.kept: KeptBlocks[BlockKey] = KeptBlocks()
        self.when_read: Callable[[], Awaitable[None]] | None = None
        # Blocks that running sequences may need for their next tokens.
        self.num_growing: Callable[[], int] = lambda: 0
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * num_blocks
        self._keys: list[BlockKey | None] = [None] * num_blocks
        self._parents = [-1] * num_blocks
        self._num_children = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._block_of: dict[BlockKey, int] = {}
        self._yielded: set[int] = set()  # kept, but their chain has begun to go
        self._pieces: dict[int, _Piece] = {}  # by each of their blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated: free and idle ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_spare(self) -> int:
        """Free blocks that may be taken ahead of need, without a running sequence losing its own for it."""
        return max(self.num_free - self.num_growing(), 0)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Idle blocks."""
        return len(self._idle)

    def used(self) -> Iterator[int]:
        """Iterate over the blocks in use. Do not change the pool meanwhile."""
        return (block for block, refs in enumerate(self._refs) if refs)

    def match(self, keys: Sequence[BlockKey]) -> list[int]:
        """Return the blocks of the longest cached prefix of ``keys``. Call ``acquire`` before the next
        await."""
        found: list[int] = []
        block_of = self._block_of
        for key in keys:
            block = block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """Return how many of the blocks are idle: acquiring them lowers ``num_free`` by that."""
        return sum(block in self._idle for block in block_ids)

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Add a user to each block of a chain's prefix (from ``match``); undone by ``release``."""
        refs, idle = self._refs, self._idle
        for block in block_ids:
            if refs[block] == 0:
                del idle[block]
            refs[block] += 1
        self._touch(block_ids)

    def allocate(self, n: int) -> list[int]:
        """Allocate ``n`` blocks with one user each. Evicts idle blocks, oldest leaf first.

        Raises OutOfBlocks when fewer than ``n`` are free; nothing is changed then.
        """
        if n > self.num_free:
            raise OutOfBlocks(n, self.num_free)
        while len(self._free) < n:
            self._evict_one()
        return self._use([self._free.pop() for _ in range(n)])

    def allocate_evenly(self, n: int, parts: int) -> list[int] | None:
        """As ``allocate``, but ``n / parts`` blocks with each remainder by ``parts``. Return None and change
        nothing where fewer of one are free."""
        of_each = n // parts
        if min(self.counts_by_part([*self._free, *self._idle], parts)) < of_each:
            return None
        while min(self.counts_by_part(self._free, parts)) < of_each:
            self._evict_one()
        left, blocks = [of_each] * parts, list[int]()
        for block in reversed(self._free):
            if left[block % parts]:
                left[block % parts] -= 1
                blocks.append(block)
        taken = set(blocks)
        self._free = [block for block in self._free if block not in taken]
        return self._use(blocks)

    def counts_by_part(self, block_ids: Iterable[int], parts: int) -> list[int]:
        """Return how many of the blocks have each remainder by ``parts``."""
        counts = Counter(block % parts for block in block_ids)
        return [counts[part] for part in range(parts)]

    def _use(self, blocks: list[int]) -> list[int]:
        for block in blocks:
            self._refs[block] = 1
            self._generations[block] += 1
        return blocks

    async def ready(self) -> None:
        """Wait until reads of evicted blocks have ended."""
        if self.when_read is not None:
            await self.when_read()

    def seal(self, block_id: int, key: BlockKey, parent: BlockKey | None = None) -> int:
        """Give a used block its key: its content is complete and will not change. ``parent``: the key before
        it in the chain, None for the first.

        Returns the block of the key. If another block has it already, that one gets the caller as user and
        ``block_id`` is released: store the returned id in the block table. Where a block before it has lost
        its key, it gets none.
        """
        assert self._refs[block_id] > 0, f"block {block_id} is sealed without a user"
        first = self._block_of.get(key)
        if first == block_id:
            return block_id
        assert self._keys[block_id] is None, f"block {block_id} is sealed already, under another key"
        if first is not None:
            self.acquire((first,))
            self.release((block_id,))
            return first
        if parent is not None and parent not in self._block_of:
            return block_id
        self._block_of[key] = block_id
        self._keys[block_id] = key
        if parent is not None:
            parent_block = self._block_of[parent]
            self._parents[block_id] = parent_block
            self._num_children[parent_block] += 1
        if self.on_sealed is not None:
            self.on_sealed(block_id, key)
        return block_id

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove one user of each block. Pass a sequence's blocks in table order and in one call.

        Unused blocks become idle if sealed or kept together, else free.
        """
        refs = self._refs
        # Last to first, so that a leaf is older than its parents.
        for block in reversed(block_ids):
            refs[block] -= 1
            if refs[block] == 0:
                if self._keys[block] is None and block not in self._pieces:
                    self._free.append(block)
                else:
                    self._idle[block] = None
            assert refs[block] >= 0, f"block {block} was released too often"
        self._touch(block_ids)
        if self.on_release is not None and block_ids:
            self.on_release()

    def keep_together(self, block_ids: Sequence[int], on_evicted: Callable[[], None]) -> None:
        """Make used blocks one piece: one chain, or all without keys.

        From now on its users acquire and release it in one call each; the store may read a prefix of its
        chain beside them. ``on_evicted()`` is called when the piece ends.
        """
        piece = _Piece(block_ids, on_evicted)
        self._pieces.update(dict.fromkeys(block_ids, piece))

    def num_users(self, block_id: int) -> int:
        return self._refs[block_id]

    def block_of(self, key: object) -> int | None:
        """Return the block of the key."""
        return self._block_of.get(key)  # type: ignore[call-overload, no-any-return]

    def generation_of(self, block_id: int) -> int:
        """It changes when the block is allocated again."""
        return self._generations[block_id]

    def parent_of(self, block_id: int) -> BlockKey | None:
        """Return the key before a sealed block in its chain; None for the first."""
        parent = self._parents[block_id]
        return self._keys[parent] if parent >= 0 else None

    def lineage(self, block_id: int) -> list[int]:
        """Return the chain of blocks up to a sealed block, first block first."""
        blocks = [block_id]
        while (parent := self._parents[blocks[-1]]) >= 0:
            blocks.append(parent)
        return blocks[::-1]

    def key_of(self, block_id: int) -> BlockKey | None:
        return self._keys[block_id]

    def sealed(self) -> Iterator[tuple[int, BlockKey]]:
        """Iterate over all (block, key) pairs. Do not change the pool meanwhile."""
        return ((block, key) for key, block in self._block_of.items())

    def evict(self, key: BlockKey) -> bool:
        """Evict an idle leaf. Return False for other blocks and unknown keys."""
        block = self._block_of.get(key)
        if block is None or block not in self._idle or self._num_children[block]:
            return False
        self._evict(block)
        return True

    def in_use(self, keys: Iterable[BlockKey]) -> bool:
        """Whether a sequence uses one of these blocks."""
        found = (self._block_of.get(key) for key in keys)
        return any(block is not None and self._refs[block] > 0 for block in found)

    def is_shared(self, key: BlockKey, successor: BlockKey | None) -> bool:
        """Whether the chain goes on here after a block otherwise than with ``successor``."""
        block = self._block_of.get(key)
        return block is not None and self._num_children[block] > (successor in self._block_of)

    def _touch(self, block_ids: Sequence[int]) -> None:
        if self.surplus:
            self.surplus.use([key for block in block_ids if (key := self._keys[block]) is not None])

    def _evict_one(self) -> None:
        block_of, num_children = self._block_of, self._num_children
        for key in self.surplus.unused():
            if (block := block_of[key]) in self._idle and not num_children[block]:
                self._evict(block)
                return
        # The head is a leaf, unless a prefix was released before the blocks after it.
        leaf = self._unkept_leaf() if self.kept else None
        if leaf is None:
            leaf = next((block for block in self._idle if num_children[block] == 0), None)
            if leaf is not None and self.kept and leaf not in self._pieces:
                # The rest of this chain is worth little now, and needs no search.
                self._yielded.update(self.lineage(leaf))
        self._evict(self._passed() if leaf is None else leaf)

    def _unkept_leaf(self) -> int | None:
        """The oldest idle leaf that is not kept; None: there is none. Kept blocks become the youngest."""
        idle = self._idle
        for _ in range(len(idle)):
            block = next(iter(idle))
            if not self._is_kept(block):
                break
            idle.move_to_end(block)
        return next(
            (block for block in idle if self._num_children[block] == 0 and not self._is_kept(block)), None
        )

    def _is_kept(self, block: int) -> bool:
        return self._keys[block] in self.kept and block not in self._yielded

    def _passed(self) -> int:
        """Make the oldest passed block without idle children a leaf, and return it."""
        children: dict[int, list[int]] = {}
        for block, parent in enumerate(self._parents):
            if parent >= 0:
                children.setdefault(parent, []).append(block)
        passed = next(b for b in self._idle if not any(child in self._idle for child in children[b]))
        after = list(children[passed])
        for block in after:
            after += children.get(block, ())
        for block in reversed(after):
            self._unseal(block)
        return passed

    def _evict(self, block: int) -> None:
        """Evict an idle leaf, and with it the piece that it is of: all blocks after those that are read."""
        piece = self._pieces.get(block)
        blocks: Sequence[int] = (block,)
        if piece is not None:
            blocks = piece.block_ids
            for each in blocks:
                del self._pieces[each]
            piece.on_evicted()
        for each in reversed(blocks):
            if each not in self._idle:
                break
            if self._keys[each] is not None:
                self._unseal(each)
            del self._idle[each]
            self._free.append(each)

    def _unseal(self, block: int) -> None:
        """Take the key of a block without children."""
        key = self._keys[block]
        assert key is not None
        if self.on_evicted is not None:
            self.on_evicted(block, key)
        self.surplus.forget(key)
        self._yielded.discard(block)
        del self._block_of[key]
        self._keys[block] = None
        parent = self._parents[block]
        if parent >= 0:
            self._num_children[parent] -= 1
            self._parents[block] = -1

    def check_integrity(self) -> None:
        """Assert all invariants, in time proportional to the pool."""
        free, idle = set(self._free), set(self._idle)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & idle, "a block is both free and idle"
        children = [0] * self.num_blocks
        for block in range(self.num_blocks):
            refs, key, parent = self._refs[block], self._keys[block], self._parents[block]
            assert (refs > 0) == (block not in free and block not in idle), f"block {block} is in no list"
            piece = self._pieces.get(block)
            assert block not in idle or key or piece, f"idle block {block} has no key"
            assert piece is None or self._is_whole(piece), "a torn piece"
            assert piece is None or block not in free, f"free block {block} is of a piece"
            assert block not in free or key is None, f"free block {block} has a key"
            assert key is None or self._block_of[key] == block, f"the key of block {block} names another"
            if parent >= 0:
                children[parent] += 1
                assert self._keys[parent] is not None, f"block {block} has lost its parent"
        assert children == self._num_children, "child counts are off"
        assert all(key in self._block_of for key in self.surplus.unused()), "a copy that is not there"
        assert len(self._block_of) == sum(key is not None for key in self._keys), "a key names no block"

    def _is_whole(self, piece: _Piece) -> bool:
        """Whether its blocks are one chain of which prefixes are read, or without keys and in equal use."""
        refs = [self._refs[block] for block in piece.block_ids]
        keys = [self._keys[block] for block in piece.block_ids]
        before = [self._parents[block] for block in piece.block_ids]
        if not any(keys):
            return len(set(refs)) == 1
        return all(keys) and before == [-1, *piece.block_ids[:-1]] and refs == sorted(refs, reverse=True)
