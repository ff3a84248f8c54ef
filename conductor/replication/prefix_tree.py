"""The hottest prefixes as a tree: what some of them have in common is a node above them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from moonpool.conductor.replication.heat import HotChain, common_blocks
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier

# Prefixes that a tree is made of; branches between them come to fewer than that again.
CHAINS = 25
# Names of nodes that are told of each prefix.
_MOST_NAMES = 8


class PrefixNode:
    """The first ``num_blocks`` of ``keys``. ``chain``: that ends here; None: only others part here."""

    __slots__ = ("branches", "chain", "keys", "num_blocks")

    def __init__(self, keys: Sequence[BlockKey], num_blocks: int, chain: HotChain | None = None) -> None:
        self.keys = keys
        self.num_blocks = num_blocks
        self.chain = chain
        self.branches: dict[BlockKey, PrefixNode] = {}  # by the block after

    def chains(self) -> Iterator[HotChain]:
        """That which ends here, and all below."""
        if self.chain is not None:
            yield self.chain
        for branch in self.branches.values():
            yield from branch.chains()

    def counted(self) -> list[HotChain]:
        """That which ends here, or else the nearest below: a request was counted once in them."""
        if self.chain is not None:
            return [self.chain]
        return [chain for branch in self.branches.values() for chain in branch.counted()]


def prefix_tree(chains: Iterable[HotChain]) -> PrefixNode:
    """Return the root, of no blocks. Keys are chained, so that equal blocks have equal blocks before them."""
    root = PrefixNode((), 0)
    for chain in chains:
        _insert(root, chain)
    return root


def told(
    root: PrefixNode,
    uses_per_s: Callable[[HotChain], float],
    holders: Callable[[Sequence[BlockKey]], Iterable[str]],
    tiers_of: Callable[[BlockKey], Mapping[Tier, int]],
) -> list[dict[str, Any]]:
    """The nodes from the root down, those used most first, as plain JSON types. No prompt's text is known.

    ``blocks``: of the whole prefix; ``uses_per_s``: of it and all that go on from it. ``hits`` and
    ``misses``: requests that began with it, by whether all of it came from a cache; of a node where only
    others part, those of its branches. ``copies`` and ``tiers``: of the last block, since a node that has it
    has those before. ``holders``: some of these nodes, of many.
    """
    found: list[dict[str, Any]] = []

    def visit(node: PrefixNode, depth: int) -> None:
        rows = [(sum(map(uses_per_s, one.chains())), one) for one in node.branches.values()]
        for uses, branch in sorted(rows, key=lambda row: (-row[0], row[1].keys[row[1].num_blocks - 1])):
            last, own = branch.keys[branch.num_blocks - 1], branch.counted()
            tiers = tiers_of(last)
            found.append(
                {
                    "key": last.hex(),
                    "depth": depth,
                    "blocks": branch.num_blocks,
                    "uses_per_s": uses,
                    "hits": sum(chain.hits for chain in own),
                    "misses": sum(chain.misses for chain in own),
                    "tenant": own[0].tenant,
                    "copies": sum(tiers.values()),
                    "holders": list(islice(holders((last,)), _MOST_NAMES)),
                    "tiers": {tier.name.lower(): count for tier, count in tiers.items()},
                }
            )
            visit(branch, depth + 1)

    visit(root, 0)
    return found


def _insert(root: PrefixNode, chain: HotChain) -> None:
    node, keys = root, chain.keys
    while node.num_blocks < len(keys):
        child = node.branches.get(keys[node.num_blocks])
        if child is None:
            child = node.branches[keys[node.num_blocks]] = PrefixNode(keys, len(keys))
        shared = min(common_blocks(child.keys, keys), child.num_blocks)
        if shared < child.num_blocks:
            between = node.branches[keys[node.num_blocks]] = PrefixNode(child.keys, shared)
            between.branches[child.keys[shared]] = child
            child = between
        node = child
    node.chain = chain
