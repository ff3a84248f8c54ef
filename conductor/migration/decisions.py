"""Which running requests should move to which decode nodes, and why: pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from moonpool.conductor.placing.node_view import NodeView


@dataclass(frozen=True, slots=True)
class Running:
    """A request that decodes on ``node_id``. ``expected_tokens``: it will probably still produce."""

    request_id: str
    node_id: str
    num_tokens: int
    expected_tokens: int

    def num_blocks(self, block_size: int) -> int:
        """Blocks of its KV in the end, probably."""
        return -(-(self.num_tokens + self.expected_tokens) // block_size)


@dataclass(frozen=True, slots=True)
class Move:
    """``cause``: drain. ``reason``: a sentence for users."""

    request_id: str
    source: str
    target: str
    cause: str
    reason: str


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """A decode node as these decisions see it; planned moves change copies of it."""

    view: NodeView
    num_running: int
    num_context_tokens: int
    num_free_blocks: int
    num_waiting: int

    @classmethod
    def of(cls, view: NodeView) -> DecodeLoad:
        return cls(view, view.num_running, view.num_context_tokens, view.num_free_blocks, view.num_waiting)

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
        return not self.num_waiting and request.num_blocks(block_size) <= free


def best_target(
    request: Running, loads: Iterable[DecodeLoad], *, block_size: int, now_s: float
) -> DecodeLoad | None:
    """The node with room whose step would be shortest with the request; None: no other node has room."""
    fits = [
        load for load in loads if load.view.node_id != request.node_id and load.has_room(request, block_size)
    ]
    return min(
        fits,
        key=lambda load: (load.with_one(request, block_size).step_s(now_s), load.view.node_id),
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

    ``nodes``: those that take requests. A request without a target stays until it ends or there is room.
    """
    loads = {view.node_id: DecodeLoad.of(view) for view in nodes}
    leaving = [request for request in running if request.node_id in draining]
    moves = []
    for request in sorted(leaving, key=lambda one: (-one.expected_tokens, one.request_id)):
        target = best_target(request, loads.values(), block_size=block_size, now_s=now_s)
        if target is not None:
            name = target.view.node_id
            loads[name] = target.with_one(request, block_size)
            reason = f"{request.node_id} hands its requests on; a step of {name} is shortest with it"
            moves.append(Move(request.request_id, request.node_id, name, "drain", reason))
    return moves
