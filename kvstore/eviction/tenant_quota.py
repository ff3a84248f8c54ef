"""Limits on each tenant's cached blocks, and the choice of its blocks that exceed the limit.

Bookkeeping only: the owner of the blocks reports changes and evicts what it is told. While the quotas
together fit the node, a tenant with a quota cannot displace another's blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier

# Remembered first blocks of chains, by tenant.
_MOST_ROOTS = 1 << 16


@dataclass(slots=True)
class Usage:
    """One tenant's blocks by fastest tier, and the blocks that left the node by reason."""

    num_blocks: list[int] = field(default_factory=lambda: [0] * len(Tier))
    num_evicted: dict[str, int] = field(default_factory=lambda: {"quota": 0, "room": 0})


@dataclass(slots=True)
class _TenantBlocks:
    limit_blocks: int
    usage: Usage = field(default_factory=Usage)
    blocks: OrderedDict[BlockKey, None] = field(default_factory=OrderedDict)  # least recently used first


class TenantQuotas:
    """The blocks of tenants with a quota, in any tier of a node."""

    def __init__(self, block_nbytes: int) -> None:
        self.block_nbytes = block_nbytes
        self._tenants: dict[str, _TenantBlocks] = {}
        self._roots: OrderedDict[BlockKey, str] = OrderedDict()
        self._owner: dict[BlockKey, str] = {}
        self._tier: dict[BlockKey, Tier] = {}
        self._parent: dict[BlockKey, BlockKey | None] = {}
        self._children: dict[BlockKey, set[BlockKey]] = {}

    def num_blocks(self, tenant: str) -> int:
        held = self._tenants.get(tenant)
        return len(held.blocks) if held is not None else 0

    def usage(self) -> dict[str, Usage]:
        """Current usage by tenant. May be called from any thread."""
        return {tenant: held.usage for tenant, held in list(self._tenants.items())}

    def claim(self, tenant: str, limit_nbytes: int, chain: Sequence[BlockKey], tiers: Sequence[Tier]) -> None:
        """A request of ``tenant`` uses ``chain``; its first blocks are in these tiers. The latest limit
        counts; 0: no limit."""
        if not tenant or not chain:
            return
        if not limit_nbytes:
            self._forget_tenant(tenant)
            return
        held = self._tenants.setdefault(tenant, _TenantBlocks(0))
        held.limit_blocks = max(limit_nbytes // self.block_nbytes, 1)
        self._roots[chain[0]] = tenant
        self._roots.move_to_end(chain[0])
        if len(self._roots) > _MOST_ROOTS:
            self._roots.popitem(last=False)
        for i, tier in enumerate(tiers):
            self.stored(chain[i], chain[i - 1] if i else None, tier)
        # In reverse, so that the end of a chain is evicted first.
        for key in reversed(chain[: len(tiers)]):
            if key in held.blocks:
                held.blocks.move_to_end(key)

    def stored(self, key: BlockKey, parent: BlockKey | None, tier: Tier) -> None:
        """The node has a block, which belongs to the tenant of its parent or chain. Idempotent."""
        if key in self._owner:
            self.moved(key, tier)
            return
        tenant = self._roots.get(key) if parent is None else self._owner.get(parent)
        if tenant is None or tenant not in self._tenants:
            return
        self._owner[key] = tenant
        self._parent[key] = parent
        if parent is not None:
            self._children.setdefault(parent, set()).add(key)
        self._tier[key] = tier
        held = self._tenants[tenant]
        held.blocks[key] = None
        held.usage.num_blocks[tier] += 1

    def moved(self, key: BlockKey, tier: Tier) -> None:
        tenant = self._owner.get(key)
        if tenant is not None:
            num_blocks = self._tenants[tenant].usage.num_blocks
            num_blocks[self._tier[key]] -= 1
            num_blocks[tier] += 1
            self._tier[key] = tier

    def gone(self, key: BlockKey) -> None:
        """No tier has the block any more. Idempotent."""
        self._forget(key, "room")

    def _forget(self, key: BlockKey, reason: str) -> None:
        tenant = self._owner.pop(key, None)
        if tenant is None:
            return
        held = self._tenants[tenant]
        del held.blocks[key]
        held.usage.num_blocks[self._tier.pop(key)] -= 1
        held.usage.num_evicted[reason] += 1
        parent = self._parent.pop(key)
        if parent is not None and (siblings := self._children.get(parent)) is not None:
            siblings.discard(key)
            if not siblings:
                del self._children[parent]

    def room(self, tenant: str) -> int | None:
        """How many blocks more its quota allows, negative where it has too many; None: it has no quota."""
        held = self._tenants.get(tenant)
        return None if held is None else held.limit_blocks - len(held.blocks)

    def excess(
        self, release: Callable[[BlockKey], bool], tenant: str = "", num_new: int = 0
    ) -> list[BlockKey]:
        """Return the blocks beyond their tenants' quotas: the ends of the least recently used chains. Each is
        forgotten here once ``release`` agrees; if it refuses one, its tenant waits.

        ``tenant`` is about to get ``num_new`` blocks more.
        """
        victims = []
        for name, held in self._tenants.items():
            limit_blocks = held.limit_blocks - (num_new if name == tenant else 0)
            while held.blocks and len(held.blocks) > limit_blocks:
                leaf = next(iter(held.blocks))
                while below := self._children.get(leaf):
                    leaf = next(iter(below))
                if not release(leaf):
                    break
                victims.append(leaf)
                self._forget(leaf, "quota")
        return victims

    def _forget_tenant(self, tenant: str) -> None:
        held = self._tenants.get(tenant)
        if held is not None:
            for key in list(held.blocks):
                self.gone(key)
            del self._tenants[tenant]

    def check_integrity(self) -> None:
        """Assert every invariant; costs time proportional to the blocks."""
        keys = [key for held in self._tenants.values() for key in held.blocks]
        assert len(keys) == len(set(keys)) == len(self._owner) == len(self._parent), "a block counts twice"
        assert self._tier.keys() == self._owner.keys(), "a block without a tier"
        for held in self._tenants.values():
            assert sum(held.usage.num_blocks) == len(held.blocks), "tiers do not add up"
        assert all(key in self._tenants[tenant].blocks for key, tenant in self._owner.items()), "lost"
        for parent, children in self._children.items():
            assert children, "an empty set of children"
            assert all(self._parent[child] == parent for child in children), "a child of another"
