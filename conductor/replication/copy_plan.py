"""Plans copies of hot prefixes, and the release of copies that are no longer wanted.

Pure, and the same live and simulated. A fetched prefix is a copy already; the copies planned here spare
requests the wait for one. As many nodes should hold a prefix as its requests keep busy, with room to spare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from moonpool.conductor.costs.links import LinkModel
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.replication.heat import Heat, HotChain, common_blocks
from moonpool.kvstore.blocks.keys import BlockKey

Holders = Callable[[Sequence[BlockKey]], Mapping[str, int]]
# Whether bytes from one node to another cost no money.
IsFree = Callable[[str, str], bool]

# The requests of one prefix should keep each of its holders busy for at most this part of the time; the rest
# is for bursts and other requests.
_BUSY_PART = 0.5
# A copy is released when it would not be needed at this multiple of the demand, so that noise has no effect.
_HYSTERESIS = 2.0
# A prefix is copied to a store node from its second use within a half-life on.
USED_AGAIN = 1.5
# Prefixes considered in one round, and copies made: with bandwidth, the limits of a round.
_CONSIDERED = 32
_COPIES = 16


@dataclass(frozen=True, slots=True)
class Copy:
    """``target`` reads its missing blocks of ``keys`` from ``source``: the last ``num_blocks``.

    ``keys`` is the beginning of a hot chain that ends with the block ``chain``; later copies bring the rest.
    """

    source: str
    target: str
    keys: tuple[BlockKey, ...]
    num_blocks: int
    nbytes: int
    chain: BlockKey


def add_copy(made: list[Copy], copy: Copy) -> None:
    """Add a copy that was made. With the one that it continues it becomes one."""
    for i, former in enumerate(made):
        begins = len(former.keys) == len(copy.keys) - copy.num_blocks
        if begins and (former.target, former.chain) == (copy.target, copy.chain):
            num_blocks, nbytes = former.num_blocks + copy.num_blocks, former.nbytes + copy.nbytes
            made[i] = replace(copy, num_blocks=num_blocks, nbytes=nbytes)
            return
    made.append(copy)


class Budget:
    """The bandwidth of copies. What a round leaves is kept for the next ones, up to one block."""

    def __init__(self, nbytes_per_s: float) -> None:
        self._nbytes_per_s = nbytes_per_s
        self._left_nbytes = 0.0

    def nbytes(self, seconds: float, block_nbytes: int) -> float:
        """For the round that begins, ``seconds`` after the one before."""
        self._left_nbytes = min(self._left_nbytes, block_nbytes) + self._nbytes_per_s * seconds
        return self._left_nbytes

    def spend(self, nbytes: float) -> None:
        self._left_nbytes -= nbytes


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
    """Copies of at most ``budget_nbytes`` together, the longest shared parts first, then the most wanted.

    A chain that does not fit is copied from its beginning; the next rounds go on. Copies to one target must
    be made in order: they may share leading blocks. ``holders``: leading blocks of a chain on each node.
    Sources may have any role; targets are prefill nodes in ``fleet`` that read faster than they compute.
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
    if not wanted:
        return []
    # First copies before second ones. Of those, the beginning that most requests have in common. Then hotter
    # prefixes first: the sort is stable.
    lengths = _shared_blocks([chain.keys for nth, chain, _, _ in wanted if nth == 0])
    wanted.sort(key=lambda entry: (entry[0], -lengths.get(entry[1].keys[-1], 0)))

    idle_first = sorted(fleet, key=lambda node: (node.queue.wait_s(now_s), node.num_placed, node.node_id))
    copies: list[Copy] = []
    busy = dict(links.busy(now_s))
    for _, chain, have, held in wanted[:_COPIES]:
        source = min(have, key=lambda node_id: (busy.get(node_id, 0.0), node_id))
        will_hold = dict(held)
        for copy in copies:
            length = common_blocks(copy.keys, chain.keys)
            will_hold[copy.target] = max(will_hold.get(copy.target, 0), length)
        taken = {copy.target for copy in copies if copy.chain == chain.keys[-1]}
        target = _target(chain, will_hold, fleet, idle_first, taken)
        if target is None:
            continue
        part = next_part(chain.keys, source, target.node_id, will_hold, shape, budget_nbytes)
        if part is None:
            continue
        if not pays(part, target, links, shape, now_s):
            continue
        budget_nbytes -= part.nbytes
        busy[source] = busy.get(source, 0.0) + part.nbytes
        copies.append(part)
    return copies


def plan_warming(
    heat: Heat,
    holders: Holders,
    target: str,
    shape: Shape,
    *,
    budget_nbytes: float,
    now_s: float,
    is_free: IsFree = lambda source, target: True,
) -> list[Copy]:
    """Copies of at most ``budget_nbytes`` together to a node that has joined: the hottest prefixes first.

    Only where bytes are free: what will be used there is not known.
    """
    copies: list[Copy] = []
    for chain in heat.hottest(_CONSIDERED, now_s):
        if heat.uses(chain, now_s) < USED_AGAIN or len(copies) == _COPIES:
            break
        held = dict(holders(chain.keys))
        have = [
            node_id
            for node_id, blocks in held.items()
            if blocks >= len(chain.keys) and is_free(node_id, target)
        ]
        for copy in copies:
            held[target] = max(held.get(target, 0), common_blocks(copy.keys, chain.keys))
        part = next_part(chain.keys, min(have), target, held, shape, budget_nbytes) if have else None
        if part is not None and target not in have:
            budget_nbytes -= part.nbytes
            copies.append(part)
    return copies


def plan_store_copies(
    heat: Heat,
    holders: Holders,
    stores: Sequence[str],
    shape: Shape,
    *,
    budget_nbytes: float,
    now_s: float,
    is_free: IsFree = lambda source, target: True,
) -> list[Copy]:
    """Copies of at most ``budget_nbytes`` together, so that each prefix in use is on one of ``stores``: there
    it outlives its prefill node, and reads do not disturb that node.

    The store node follows from the key, so that all conductors choose the same one: of those that reading
    from the holder is free for.
    """
    copies: list[Copy] = []
    for chain in heat.hottest(_CONSIDERED, now_s) if stores else ():
        if heat.uses(chain, now_s) < USED_AGAIN or len(copies) == _COPIES:
            break
        held, length = holders(chain.keys), len(chain.keys)
        have = [node_id for node_id, blocks in held.items() if blocks >= length]
        if not have or not set(have).isdisjoint(stores):
            continue
        near = sorted(name for name in stores if is_free(min(have), name))
        if not near:
            continue
        target = near[int.from_bytes(chain.keys[0][:8], "little") % len(near)]
        part = next_part(chain.keys, min(have), target, held, shape, budget_nbytes)
        if part is not None:
            budget_nbytes -= part.nbytes
            copies.append(part)
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
            chain = heat.of(copy.chain)
            wanted = copies_wanted(heat, chain, now_s, _HYSTERESIS) if chain is not None else 1
            spare[key] = have - max(wanted, 1)
        if spare[key] > 0:
            spare[key] -= 1
            unwanted.append(copy)
    return unwanted


def copies_wanted(heat: Heat, chain: HotChain, now_s: float, factor: float = 1.0) -> int:
    """Nodes that should hold the prefix at ``factor`` times its recent demand."""
    return math.ceil(factor * heat.nodes_worth(chain, now_s) / _BUSY_PART)


def pays(copy: Copy, target: NodeView, links: LinkModel, shape: Shape, now_s: float) -> bool:
    """Whether reading its blocks takes the target less, egress included, than computing them once."""
    num_tokens = copy.num_blocks * shape.block_size
    held_tokens = len(copy.keys) * shape.block_size - num_tokens
    transfer_s = links.seconds(copy.source, copy.target, copy.nbytes, now_s)
    transfer_s += links.egress_s(copy.source, copy.target, copy.nbytes)
    return transfer_s < target.cost.prefill_s(num_tokens, held_tokens, now_s)


def next_part(
    keys: tuple[BlockKey, ...],
    source: str,
    target: str,
    held: Mapping[str, int],
    shape: Shape,
    budget_nbytes: float,
) -> Copy | None:
    """The next blocks of a chain that ``target`` lacks, as many as the budget allows; None: no block."""
    start = held.get(target, 0)
    num_blocks = min(len(keys) - start, int(budget_nbytes // shape.block_nbytes))
    if num_blocks <= 0:
        return None
    nbytes = num_blocks * shape.block_nbytes
    return Copy(source, target, keys[: start + num_blocks], num_blocks, nbytes, keys[-1])


def _shared_blocks(chains: Sequence[tuple[BlockKey, ...]]) -> dict[BlockKey, int]:
    """By its last block: the leading blocks that a chain has in common with any other, the most."""
    longest: dict[BlockKey, int] = {}
    for keys, others in combinations(chains, 2):
        length = common_blocks(keys, others)
        for key in (keys[-1], others[-1]):
            longest[key] = max(longest.get(key, 0), length)
    return longest


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
