"""Blocks on their way from one tier to another, and which of them follow which in their chains."""

from __future__ import annotations

from typing import Protocol, TypeVar

from moonpool.kvstore.blocks.keys import BlockKey


class _Block(Protocol):
    @property
    def parent(self) -> BlockKey | None: ...


Block = TypeVar("Block", bound=_Block)


class InTransit(dict[BlockKey, Block]):
    """Blocks by key; change it by ``add`` and ``take`` only. ``after`` costs as much as it finds.

    A block's ``parent``, the key before it in its chain, does not change while it is here.
    """

    def __init__(self) -> None:
        super().__init__()
        self._after: dict[BlockKey, dict[BlockKey, None]] = {}

    def after(self, key: BlockKey) -> list[BlockKey]:
        """The blocks here that directly follow ``key``, itself here or not, the first added first."""
        return list(self._after.get(key, ()))

    def add(self, key: BlockKey, block: Block) -> None:
        """``key`` is not here yet."""
        self[key] = block
        if block.parent is not None:
            self._after.setdefault(block.parent, {})[key] = None

    def take(self, key: BlockKey) -> Block | None:
        """Take a block out; None: it is not here."""
        block = self.pop(key, None)
        if block is not None and block.parent is not None:
            siblings = self._after[block.parent]
            del siblings[key]
            if not siblings:
                del self._after[block.parent]
        return block
