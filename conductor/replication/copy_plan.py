"""Plans copies of hot prefixes, and the release of copies that are no longer wanted.

Pure, and the same live and simulated. A fetched prefix is a copy already; the copies planned here spare
requests the wait for one. As many nodes should hold a prefix as its requests keep busy, with room to spare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from moonpool.conductor.costs.links import LinkModel
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.replication.heat import Heat, HotChain
from moonpool.kvstore.blocks.keys import BlockKey

Holders = Callable[[Sequence[BlockKey]], Mapping[str, int]]

# The requests of one prefix should keep each of its holders busy for at most this part of the time; the rest
# is for bursts and other requests.
_BUSY_PART = 0.5
# A copy is released when it would not be needed at this multiple of the demand, so that noise has no effect.
_HYSTERESIS = 2.0
# A prefix is copied to a store node from its second use within a half-life on.
_USED_AGAIN = 1.5
# Prefixes considered in one round, and copies made: with bandwidth, the limits of a round.
_CONSIDERED = 32
_COPIES = 16


@dataclass(frozen=True, slots=True)
class Copy:
    """``target`` reads its missing blocks of ``keys`` from ``source``: the last ``num_blocks``."""

    source: str
    target: str
    keys: tuple[BlockKey, ...]
    num_blocks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a block."""

    block_size: int  # tokens
    block_nbytes: int


def plan_replication(
    heat: Heat,
    holders: Holders,
    fleet: NodeTable,
    links: LinkModel,
    shape: Shape,
    *,
    budget_nbytes: float,
    now_s: float,
) -> list[Copy]:
    """Copies of at most ``budget_nbytes`` together, the most wanted first.

    ``holders``: leading blocks of a chain on each node. Sources may have any role; targets are prefill nodes
    in ``fleet`` that read faster than they compute.
    """
    wanted = []
    for chain in heat.hottest(_CONSIDERED, now_s):
        missing = min(copies_wanted(heat, chain, now_s), len(fleet))
        if missing > 0:
            held = holders(chain.keys)
            have = [node_id for node_id, length in held.items() if length >= len(chain.keys)]
            missing -= sum(fleet.get(node_id) is not None for node_id in have)
            if have:
                wanted += [(nth, chain, have, held) for nth in range(min(missing, _COPIES))]
    # First copies before second ones, hotter prefixes first: the sort is stable.
    wanted.sort(key=lambda entry: entry[0])
    if not wanted:
        return []

    idle_first = sorted(fleet, key=lambda node: (node.queue.wait_s(now_s), node.num_placed, node.node_id))
    copies: list[Copy] = []
    busy = dict(links.busy(now_s))
    for _, chain, have, held in wanted[:_COPIES]:
        source = min(have, key=lambda node_id: (busy.get(node_id, 0.0), node_id))
        taken = {copy.target for copy in copies if copy.keys is chain.keys}
        target = _target(chain, held, fleet, idle_first, taken)
        if target is None:
            continue
        num_blocks = len(chain.keys) - held.get(target.node_id, 0)
        nbytes = num_blocks * shape.block_nbytes
        num_tokens = num_blocks * shape.block_size
        held_tokens = len(chain.keys) * shape.block_size - num_tokens
        compute_s = target.cost.prefill_s(num_tokens, held_tokens, now_s)
        if nbytes > budget_nbytes or links.seconds(source, target.node_id, nbytes, now_s) >= compute_s:
            continue
        budget_nbytes -= nbytes
        busy[source] = busy.get(source, 0.0) + nbytes
        copies.append(Copy(source, target.node_id, chain.keys, num_blocks, nbytes))
    return copies


def plan_store_copies(
    heat: Heat, holders: Holders, stores: Sequence[str], shape: Shape, *, budget_nbytes: float, now_s: float
) -> list[Copy]:
    """Copies of at most ``budget_nbytes`` together, so that each prefix in use is on one of ``stores``: there
    it outlives its prefill node, and reads do not disturb that node.

    The store node follows from the key, so that all conductors choose the same one.
    """
    copies: list[Copy] = []
    for chain in heat.hottest(_CONSIDERED, now_s) if stores else ():
        if heat.uses(chain, now_s) < _USED_AGAIN or len(copies) == _COPIES:
            break
        held, length = holders(chain.keys), len(chain.keys)
        have = [node_id for node_id, blocks in held.items() if blocks >= length]
        if not have or not set(have).isdisjoint(stores):
            continue
        target = sorted(stores)[int.from_bytes(chain.keys[0][:8], "little") % len(stores)]
        num_blocks = length - held.get(target, 0)
        nbytes = num_blocks * shape.block_nbytes
        if nbytes <= budget_nbytes:
            budget_nbytes -= nbytes
            copies.append(Copy(min(have), target, chain.keys, num_blocks, nbytes))
    return copies


def plan_release(
    heat: Heat, made: Iterable[Copy], holders: Holders, fleet: NodeTable, *, now_s: float
) -> list[Copy]:
    """The copies of ``made`` that are no longer wanted, even at a multiple of the demand, or already gone."""
    unwanted: list[Copy] = []
    spare: dict[BlockKey, int] = {}
    for copy in made:
        key = copy.keys[-1]
        held = holders(copy.keys)
        if held.get(copy.target, 0) < len(copy.keys):
            unwanted.append(copy)
            continue
        if key not in spare:
            have = sum(
                length >= len(copy.keys) and fleet.get(node_id) is not None
                for node_id, length in held.items()
            )
            chain = heat.of(key)
            wanted = copies_wanted(heat, chain, now_s, _HYSTERESIS) if chain is not None else 1
            spare[key] = have - max(wanted, 1)
        if spare[key] > 0:
            spare[key] -= 1
            unwanted.append(copy)
    return unwanted


def copies_wanted(heat: Heat, chain: HotChain, now_s: float, factor: float = 1.0) -> int:
    """Nodes that should hold the prefix at ``factor`` times its recent demand."""
    return math.ceil(factor * heat.nodes_worth(chain, now_s) / _BUSY_PART)


def _target(
    chain: HotChain,
    held: Mapping[str, int],
    fleet: NodeTable,
    idle_first: Sequence[NodeView],
    taken: set[str],
) -> NodeView | None:
    """The node with the longest incomplete prefix, else the least busy one without any of it."""
    partial = [
        (-length, node_id)
        for node_id, length in held.items()
        if length < len(chain.keys) and node_id not in taken and fleet.get(node_id) is not None
    ]
    if partial:
        return fleet.get(min(partial)[1])
    without = (node for node in idle_first if node.node_id not in held and node.node_id not in taken)
    return next(without, None)
