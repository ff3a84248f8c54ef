"""Which requests that wait for their prefill should be placed again: a node could begin much sooner."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from moonpool.conductor.placing.node_view import NodeView

# A new placement costs calls, and predictions err: it must begin so much sooner, and by this part of its own
# compute time.
_LEAST_GAIN_S = 1.0
_LEAST_GAIN_PART = 0.5
# Most requests of one decision, so that a burst's queue costs no burst of calls.
_MOST = 32


@dataclass(frozen=True, slots=True)
class Relief:
    """A request that should leave the queue of ``source``. ``key``: of its prefill; ``gain_s``: predicted."""

    key: Hashable
    source: str
    gain_s: float


def plan_relief(
    nodes: Iterable[NodeView],
    now_s: float,
    *,
    stay: Collection[Hashable] = (),
    room: Callable[[str], float] = lambda node_id: math.inf,
    most: int = _MOST,
) -> list[Relief]:
    """Requests that wait on nodes with long queues, while others have short ones: the last in turn first.

    Nodes that join find the queues of the others full; without this they would serve new requests only.
    ``nodes``: prefill nodes, which take ``room(node_id)`` requests more at most. ``stay``: keys to leave
    where they are.
    """
    views = {node.node_id: node for node in nodes}
    waits = [(node.foreign_queue_s + node.queue.wait_s(now_s), name) for name, node in views.items()]
    if not waits or max(waits)[0] - min(waits)[0] < _LEAST_GAIN_S:
        return []
    found: list[Relief] = []
    rooms = {name: room(name) for name in views}
    idle_first = [one for one in waits if rooms[one[1]] >= 1]
    heapify(idle_first)
    for _, source in sorted(waits, reverse=True):
        for key, starts_s, compute_s in reversed(list(views[source].queue.waiting(now_s))):
            if not idle_first or len(found) == most:
                return found
            wait_s, target = idle_first[0]
            gain_s = starts_s - wait_s
            if target == source or gain_s < _LEAST_GAIN_S:
                break
            if gain_s >= _LEAST_GAIN_PART * compute_s and key not in stay:
                found.append(Relief(key, source, gain_s))
                rooms[target] -= 1
                if rooms[target] >= 1:
                    heapreplace(idle_first, (wait_s + compute_s, target))
                else:
                    heappop(idle_first)
    return found
