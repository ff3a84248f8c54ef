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


class DecodeNodes:
    """The decode nodes as these decisions see them: planned moves change copies of their ``views``."""

    def __init__(
        self, views: Iterable[NodeView], *, closed: Collection[str] = (), block_size: int, now_s: float
    ) -> None:
        """``closed``: those that take no requests now."""
        self.views = {view.node_id: view for view in views}
        self.closed = closed
        self._block_size = block_size
        self._now_s = now_s

    def step_s(self, view: NodeView, request: Running | None = None) -> float:
        """The predicted seconds of a step, with ``request`` too."""
        num_running, num_tokens = view.num_running, view.num_context_tokens
        if request is not None:
            num_running, num_tokens = num_running + 1, num_tokens + request.num_tokens
        return view.cost.step_s(num_running, num_tokens, self._now_s)

    def add(self, request: Running, node_id: str) -> None:
        """The request moves there."""
        view = self.views[node_id]
        self.views[node_id] = replace(
            view,
            num_running=view.num_running + 1,
            num_context_tokens=view.num_context_tokens + request.num_tokens,
            num_free_blocks=view.num_free_blocks - request.num_blocks(self._block_size),
        )

    def best_target(self, request: Running, *, crowded: bool = False) -> NodeView | None:
        """The node with room for all its blocks and the shortest step with it, in its region if there is one;
        None: no other node that it may move to has room.

        A block for each running sequence stays free, as the engine keeps it. A node on which others wait has
        room only if ``crowded``.
        """
        fits = [
            view
            for name, view in self.views.items()
            if name != request.node_id
            and name not in self.closed
            and may_hold(request.regions, view.region)
            and (crowded or not view.num_waiting)
            and request.num_blocks(self._block_size) <= free_blocks(view) - 1
        ]
        return min(
            fits,
            key=lambda view: (view.region != request.region, self.step_s(view, request), view.node_id),
            default=None,
        )

    def make_room(
        self,
        waiting: Waiting,
        movable: Sequence[Running],
        planned: Sequence[Move],
        cause: str,
        reason: str,
    ) -> list[Move]:
        """The moves that give ``waiting`` its blocks: small requests, and none that is not needed. Empty: it
        has room, or cannot get it."""
        source = self.views.get(waiting.node_id)
        # Blocks that it was given already count as used: without others that wait, it has them.
        if source is None or not source.num_waiting or any(one.source == waiting.node_id for one in planned):
            return []
        missing = waiting.num_blocks(self._block_size) - free_blocks(source)
        if missing <= 0:
            return []
        before, chosen = dict(self.views), []
        movable = sorted(movable, key=lambda one: (one.num_tokens, one.request_id))
        # One that suffices alone, rather than several.
        for request in [one for one in movable if self._freed(one) >= missing] + movable:
            if missing <= 0:
                break
            target = self.best_target(request)
            if target is not None:
                self.add(request, target.node_id)
                chosen.append((request, target.node_id))
                missing -= self._freed(request)
        self.views = before
        for one in list(chosen):
            if missing + self._freed(one[0]) <= 0:
                chosen.remove(one)
                missing += self._freed(one[0])
        if missing > 0 or len(chosen) > _MOST_MOVES:
            return []
        for request, target_id in chosen:
            self.add(request, target_id)
        return [Move(one.request_id, one.node_id, target_id, cause, reason) for one, target_id in chosen]

    def _freed(self, request: Running) -> int:
        """Its blocks, and the one that the engine keeps for it."""
        return -(-request.num_tokens // self._block_size) + 1


def free_blocks(view: NodeView) -> int:
    """Without those that the engine keeps for running sequences, one each."""
    return view.num_free_blocks - view.num_running


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
    targets = DecodeNodes(nodes, block_size=block_size, now_s=now_s)
    movable = [request for request in running if request.node_id in draining]
    moves = []
    for request in sorted(movable, key=lambda one: (-one.expected_tokens, one.request_id)):
        needs, target = request, targets.best_target(request)
        if target is None:
            needs = replace(request, expected_tokens=1)
            target = targets.best_target(needs, crowded=True)
        if target is not None:
            name = target.node_id
            targets.add(needs, name)
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
    decoding = DecodeNodes(nodes, closed=closed, block_size=block_size, now_s=now_s)
    moves: list[Move] = []
    for request in sorted(waiting, key=lambda one: (-one.num_tokens, one.request_id)):
        needed = request.num_blocks(block_size)
        free = [
            free_blocks(view)
            for name, view in decoding.views.items()
            if name == request.node_id or name not in closed
        ]
        if not request.computed or max(free, default=0) >= needed or sum(free) < needed:
            continue
        movable = [one for one in running if one.node_id == request.node_id]
        reason = f"{request.request_id} waits for {needed} blocks, and fits nowhere"
        moves += decoding.make_room(request, movable, moves, "defragment", reason)
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
    decoding = DecodeNodes(nodes, closed=closed, block_size=block_size, now_s=now_s)
    moves: list[Move] = []
    for request in sorted(waiting, key=lambda one: (one.priority, one.request_id)):
        movable = [
            one for one in running if one.node_id == request.node_id and one.priority > request.priority
        ]
        reason = f"{request.request_id} is more urgent and needs {request.num_blocks(block_size)} blocks"
        moves += decoding.make_room(request, movable, moves, "priority", reason)
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
    decoding = DecodeNodes(nodes, closed=closed, block_size=block_size, now_s=now_s)
    hot = [(decoding.step_s(view), name) for name, view in decoding.views.items() if view.num_running > 1]
    moves = []
    for step_s, source in sorted(hot, key=lambda one: (-one[0], one[1])):
        if step_s <= tbt_s:
            break
        movable = [one for one in running if one.node_id == source and one.expected_tokens >= _LEAST_TOKENS]
        for request in sorted(
            movable, key=lambda one: (-one.expected_tokens, one.num_tokens, one.request_id)
        ):
            target = decoding.best_target(request)
            if target is None or (then_s := decoding.step_s(target, request)) > _CALM_PART * tbt_s:
                continue
            decoding.add(request, target.node_id)
            reason = (
                f"a step of {source} takes {1e3 * step_s:.3g} ms, the target is {1e3 * tbt_s:.3g} ms; "
                f"{1e3 * then_s:.3g} ms on {target.node_id}"
            )
            moves.append(Move(request.request_id, source, target.node_id, "hot-spot", reason))
            break
    return moves
