"""How much of one node each tenant's cached blocks may take, and which of its own go when it is too much.

Bookkeeping only: whoever owns the blocks says what comes and goes, and evicts what it is told. Where the
quotas together fit the node, no tenant with a quota can push out another's blocks, for it is trimmed first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore.keys import BlockKey

# First blocks of chains whose tenant is remembered before any of their blocks is there.
_MOST_ROOTS = 1 << 16


@dataclass(slots=True)
class _Share:
    limit_blocks: int
    blocks: OrderedDict[BlockKey, None] = field(default_factory=OrderedDict)  # longest unused first


class TenantQuotas:
    """Blocks of tenants with a quota, in whatever tier of a node. Those of others are not looked at."""

    def __init__(self, block_nbytes: int) -> None:
        self._block_nbytes = block_nbytes
        self._shares: dict[str, _Share] = {}
        self._roots: OrderedDict[BlockKey, str] = OrderedDict()
        self._owner: dict[BlockKey, str] = {}
        self._parent: dict[BlockKey, BlockKey | None] = {}
        self._children: dict[BlockKey, set[BlockKey]] = {}

    def num_blocks(self, tenant: str) -> int:
        share = self._shares.get(tenant)
        return len(share.blocks) if share is not None else 0

    def claim(self, tenant: str, limit_nbytes: int, chain: Sequence[BlockKey], num_held: int) -> None:
        """A request of ``tenant`` uses ``chain``, of which the node holds the first ``num_held`` blocks. The
        latest limit holds; 0, or no tenant: nothing is bounded."""
        if not tenant or not chain:
            return
        if not limit_nbytes:
            self._forget_tenant(tenant)
            return
        share = self._shares.setdefault(tenant, _Share(0))
        share.limit_blocks = max(limit_nbytes // self._block_nbytes, 1)
        self._roots[chain[0]] = tenant
        self._roots.move_to_end(chain[0])
        if len(self._roots) > _MOST_ROOTS:
            self._roots.popitem(last=False)
        for i, key in enumerate(chain[:num_held]):
            self.stored(key, chain[i - 1] if i else None)
        # Of a chain, the end goes first.
        for key in reversed(chain[:num_held]):
            if key in share.blocks:
                share.blocks.move_to_end(key)

    def stored(self, key: BlockKey, parent: BlockKey | None) -> None:
        """The node holds a block; it is its parent's tenant's, or whose chain begins with it. Idempotent."""
        if key in self._owner:
            return
        tenant = self._roots.get(key) if parent is None else self._owner.get(parent)
        if tenant is None or tenant not in self._shares:
            return
        self._owner[key] = tenant
        self._parent[key] = parent
        if parent is not None:
            self._children.setdefault(parent, set()).add(key)
        self._shares[tenant].blocks[key] = None

    def gone(self, key: BlockKey) -> None:
        """No tier holds it any more. Idempotent."""
        tenant = self._owner.pop(key, None)
        if tenant is None:
            return
        del self._shares[tenant].blocks[key]
        parent = self._parent.pop(key)
        if parent is not None and (siblings := self._children.get(parent)) is not None:
            siblings.discard(key)
            if not siblings:
                del self._children[parent]

    def excess(self, let_go: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """Blocks beyond their tenants' quotas: the ends of the chains that were not used for longest. Each is
        forgotten here once ``let_go`` has agreed to it; where one must stay for now, its tenant waits.
        """
        victims = []
        for share in self._shares.values():
            while len(share.blocks) > share.limit_blocks:
                leaf = next(iter(share.blocks))
                while below := self._children.get(leaf):
                    leaf = next(iter(below))
                if not let_go(leaf):
                    break
                victims.append(leaf)
                self.gone(leaf)
        return victims

    def _forget_tenant(self, tenant: str) -> None:
        share = self._shares.get(tenant)
        if share is not None:
            for key in list(share.blocks):
                self.gone(key)
            del self._shares[tenant]

    def check_integrity(self) -> None:
        """Assert everything this class promises; costs time proportional to what is held."""
        held = [key for share in self._shares.values() for key in share.blocks]
        assert len(held) == len(set(held)) == len(self._owner) == len(self._parent), "a block counts twice"
        assert all(key in self._shares[tenant].blocks for key, tenant in self._owner.items()), "lost"
        for parent, children in self._children.items():
            assert children, "an empty set of children"
            assert all(self._parent[child] == parent for child in children), "a child of another"
