"""Blocks on their way from one tier to another, and which of them follow which in their chains."""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from typing import Generic, Protocol, TypeVar

from moonpool.kvstore.blocks.keys import BlockKey


class _Block(Protocol):
    @property
    def parent(self) -> BlockKey | None: ...


Block = TypeVar("Block", bound=_Block)


class InTransit(Generic[Block]):
    """By key, as a dict is; ``after`` costs what it finds, however many there are. A block's ``parent``, the
    key before it in its chain, does not change while it is here."""

    def __init__(self) -> None:
        self._blocks: dict[BlockKey, Block] = {}
        self._after: dict[BlockKey, dict[BlockKey, None]] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def __iter__(self) -> Iterator[BlockKey]:
        return iter(self._blocks)

    def keys(self) -> KeysView[BlockKey]:
        return self._blocks.keys()

    def get(self, key: BlockKey) -> Block | None:
        return self._blocks.get(key)

    def after(self, key: BlockKey) -> list[BlockKey]:
        """The blocks here that come right after ``key``, itself here or not, the first added first."""
        return list(self._after.get(key, ()))

    def add(self, key: BlockKey, block: Block) -> None:
        """``key`` is not here yet."""
        self._blocks[key] = block
        if block.parent is not None:
            self._after.setdefault(block.parent, {})[key] = None

    def pop(self, key: BlockKey) -> Block | None:
        """Take a block out; None: it is not here."""
        block = self._blocks.pop(key, None)
        if block is not None and block.parent is not None:
            siblings = self._after[block.parent]
            del siblings[key]
            if not siblings:
                del self._after[block.parent]
        return block
