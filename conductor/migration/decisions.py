"""Which running requests should move to which decode nodes, and why: pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from moonpool.conductor.admission.tenants import EVERYWHERE, Regions, may_hold
from moonpool.conductor.placing.node_view import NodeView

ASKED = "asked"  # by an operator
DRAIN = "drain"
# A node with a step of at most this part of the target has room for requests of slower nodes.
_CALM_PART = 0.8
# Most moves of one decision.
_MOST_MOVES = 4
# A request that ends within so many tokens is not worth a move.
_LEAST_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Running:
    """A request that decodes on ``node_id``. ``expected_tokens``: it will probably still produce.
    ``priority``: lower goes first. ``regions``: it may move to nodes there only."""

    request_id: str
    node_id: str
    num_tokens: int
    expected_tokens: int
    priority: int = 0
    regions: Regions = EVERYWHERE
    region: str = ""  # where it decodes

    def num_blocks(self, block_size: int) -> int:
        """Blocks of its KV in the end, probably."""
        return -(-(self.num_tokens + self.expected_tokens) // block_size)


@dataclass(frozen=True, slots=True)
class Waiting:
    """A request that was placed to decode on ``node_id``, with ``num_tokens`` so far, and has no blocks there
    yet. ``computed``: nothing else is missing, such as a prompt's KV from another node."""

    request_id: str
    node_id: str
    num_tokens: int
    priority: int
    computed: bool

    def num_blocks(self, block_size: int) -> int:
        """Blocks that it needs to begin: for its tokens and the next one."""
        return self.num_tokens // block_size + 1


@dataclass(frozen=True, slots=True)
class Move:
    """``cause``: one of the options of ``conductor.migrate``, or asked. ``reason``: a sentence for users."""

    request_id: str
    source: str
    target: str
    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A decode node as these decisions see it; planned moves change copies of it. ``closed``: it takes no
    requests now."""

    view: NodeView
    num_running: int
    num_context_tokens: int
    num_free_blocks: int
    num_waiting: int
    closed: bool = False

    @classmethod
    def of(cls, view: NodeView, closed: Collection[str] = ()) -> DecodeLoad:
        return cls(
            view,
            view.num_running,
            view.num_context_tokens,
            view.num_free_blocks,
            view.num_waiting,
            view.node_id in closed,
        )

    def step_s(self, now_s: float) -> float:
        """The predicted seconds of a step."""
        return self.view.cost.step_s(self.num_running, self.num_context_tokens, now_s)

    def with_one(self, request: Running, block_size: int) -> DecodeLoad:
        return replace(
            self,
            num_running=self.num_running + 1,
            num_context_tokens=self.num_context_tokens + request.num_tokens,
            num_free_blocks=self.num_free_blocks - request.num_blocks(block_size),
        )

    def has_room(self, request: Running, block_size: int) -> bool:
        """For all its blocks. A block for each running sequence stays free, as the engine keeps it; a node on
        which others wait has none."""
        free = self.num_free_blocks - self.num_running - 1
        return not self.closed and not self.num_waiting and request.num_blocks(block_size) <= free


def best_target(
    request: Running, loads: Iterable[DecodeLoad], *, block_size: int, now_s: float
) -> DecodeLoad | None:
    """The node with room and the shortest step with the request, in its region if there is one; None: no
    other node that it may move to has room."""
    fits = [
        load
        for load in loads
        if load.view.node_id != request.node_id
        and may_hold(request.regions, load.view.region)
        and load.has_room(request, block_size)
    ]
    return min(
        fits,
        key=lambda load: (
            load.view.region != request.region,
            load.with_one(request, block_size).step_s(now_s),
            load.view.node_id,
        ),
        default=None,
    )


def plan_drain(
    running: Sequence[Running],
    draining: Collection[str],
    nodes: Iterable[NodeView],
    *,
    block_size: int,
    now_s: float,
) -> list[Move]:
    """Moves that empty the nodes that end, or no longer decode: the requests that would last longest first.

    ``nodes``: those that take requests. Where none has room for a whole request, one suffices that has room
    for what there is of it: the engine makes room there later, here the request would be cut off. A request
    without a target stays until it ends or there is room.
    """
    loads = {view.node_id: DecodeLoad.of(view) for view in nodes}
    movable = [request for request in running if request.node_id in draining]
    moves = []
    for request in sorted(movable, key=lambda one: (-one.expected_tokens, one.request_id)):
        target = best_target(request, loads.values(), block_size=block_size, now_s=now_s)
        needs = request
        if target is None:
            needs = replace(request, expected_tokens=1)
            crowded = [replace(load, num_waiting=0) for load in loads.values()]
            target = best_target(needs, crowded, block_size=block_size, now_s=now_s)
        if target is not None:
            name = target.view.node_id
            loads[name] = loads[name].with_one(needs, block_size)
            reason = f"{request.node_id} hands its requests on; a step of {name} is shortest with it"
            moves.append(Move(request.request_id, request.node_id, name, DRAIN, reason))
    return moves


def plan_defragment(
    running: Sequence[Running],
    waiting: Sequence[Waiting],
    nodes: Iterable[NodeView],
    *,
    closed: Collection[str] = (),
    block_size: int,
    now_s: float,
) -> list[Move]:
    """Moves that make room for prompts which fit on no node, though the sum of free blocks suffices.

    The requests with the fewest tokens that suffice leave the node that the prompt waits for. At most one
    prompt for each node; none where the room would not suffice. ``nodes``: all that decode; ``closed``: those
    that take no requests.
    """
    loads = {view.node_id: DecodeLoad.of(view, closed) for view in nodes}
    moves: list[Move] = []
    for request in sorted(waiting, key=lambda one: (-one.num_tokens, one.request_id)):
        needed = request.num_blocks(block_size)
        free = [
            load.num_free_blocks - load.num_running
            for name, load in loads.items()
            if name == request.node_id or not load.closed
        ]
        if not request.computed or max(free, default=0) >= needed or sum(free) < needed:
            continue
        movable = [one for one in running if one.node_id == request.node_id]
        reason = f"{request.request_id} waits for {needed} blocks, and fits nowhere"
        moves += _make_room(request, movable, loads, moves, "defragment", reason, block_size, now_s)
    return moves


def plan_priority(
    running: Sequence[Running],
    waiting: Sequence[Waiting],
    nodes: Iterable[NodeView],
    *,
    closed: Collection[str] = (),
    block_size: int,
    now_s: float,
) -> list[Move]:
    """Moves of less urgent requests from nodes without room for a more urgent one, which would preempt them
    or wait for them otherwise."""
    loads = {view.node_id: DecodeLoad.of(view, closed) for view in nodes}
    moves: list[Move] = []
    for request in sorted(waiting, key=lambda one: (one.priority, one.request_id)):
        movable = [
            one for one in running if one.node_id == request.node_id and one.priority > request.priority
        ]
        reason = f"{request.request_id} is more urgent and needs {request.num_blocks(block_size)} blocks"
        moves += _make_room(request, movable, loads, moves, "priority", reason, block_size, now_s)
    return moves


def plan_hot_spots(
    running: Sequence[Running],
    nodes: Iterable[NodeView],
    *,
    closed: Collection[str] = (),
    tbt_s: float,
    block_size: int,
    now_s: float,
) -> list[Move]:
    """One move from each node with a predicted step longer than ``tbt_s``, to the node with the shortest
    step, if that stays well below: the request that will last longest, of equal ones the smallest."""
    loads = {view.node_id: DecodeLoad.of(view, closed) for view in nodes}
    hot = [load for load in loads.values() if load.num_running > 1 and load.step_s(now_s) > tbt_s]
    moves = []
    for load in sorted(hot, key=lambda one: (-one.step_s(now_s), one.view.node_id)):
        source = load.view.node_id
        movable = [one for one in running if one.node_id == source and one.expected_tokens >= _LEAST_TOKENS]
        for request in sorted(
            movable, key=lambda one: (-one.expected_tokens, one.num_tokens, one.request_id)
        ):
            target = best_target(request, loads.values(), block_size=block_size, now_s=now_s)
            if target is None:
                continue
            then = target.with_one(request, block_size)
            if then.step_s(now_s) > _CALM_PART * tbt_s:
                continue
            loads[target.view.node_id] = then
            step_ms, then_ms = 1e3 * load.step_s(now_s), 1e3 * then.step_s(now_s)
            reason = (
                f"a step of {source} takes {step_ms:.3g} ms, the target is {1e3 * tbt_s:.3g} ms; "
                f"{then_ms:.3g} ms on {then.view.node_id}"
            )
            moves.append(Move(request.request_id, source, then.view.node_id, "hot-spot", reason))
            break
    return moves


def _make_room(
    waiting: Waiting,
    movable: Sequence[Running],
    loads: dict[str, DecodeLoad],
    planned: Sequence[Move],
    cause: str,
    reason: str,
    block_size: int,
    now_s: float,
) -> list[Move]:
    """The moves that give ``waiting`` its blocks: small requests, and none that is not needed. Empty: it has
    room, or cannot get it. Changes ``loads`` by the moves."""
    source = loads.get(waiting.node_id)
    # Blocks that it was given already count as used: without others that wait, it has them.
    if source is None or not source.num_waiting or any(move.source == waiting.node_id for move in planned):
        return []
    missing = waiting.num_blocks(block_size) - (source.num_free_blocks - source.num_running)
    if missing <= 0:
        return []
    targets, chosen = dict(loads), []
    movable = sorted(movable, key=lambda one: (one.num_tokens, one.request_id))
    # One that suffices alone, rather than several.
    for request in [one for one in movable if _freed(one, block_size) >= missing] + movable:
        if missing <= 0:
            break
        target = best_target(request, targets.values(), block_size=block_size, now_s=now_s)
        if target is not None:
            targets[target.view.node_id] = target.with_one(request, block_size)
            chosen.append((request, target.view.node_id))
            missing -= _freed(request, block_size)
    for one in list(chosen):
        if missing + _freed(one[0], block_size) <= 0:
            chosen.remove(one)
            missing += _freed(one[0], block_size)
    if missing > 0 or len(chosen) > _MOST_MOVES:
        return []
    for request, target_id in chosen:
        loads[target_id] = loads[target_id].with_one(request, block_size)
    return [Move(one.request_id, one.node_id, target_id, cause, reason) for one, target_id in chosen]


def _freed(request: Running, block_size: int) -> int:
    """Its blocks, and the one that the engine keeps for it."""
    return -(-request.num_tokens // block_size) + 1
