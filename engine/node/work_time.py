"""The time that a node worked, and what it has told conductors of it."""

from __future__ import annotations

import time

from moonpool.engine.batching.sequence import Spent
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.engine.node.messages import token_out
from moonpool.protos import node_pb2


class WorkTime:
    """Of one epoch of a node, from the moment that it began to start, by ``time.monotonic``."""

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self.told_s = 0.0

    def tell(self, event: StepEvent) -> node_pb2.TokenOut:
        """The message of an event, with the seconds that its sequence took since the message before."""
        sequence = event.sequence
        spent, sequence.spent = sequence.spent, Spent()
        self.told_s += spent.busy_s
        return token_out(event, spent)

    def facts(self, busy_s: float) -> dict[str, float]:
        """For the node's record. ``busy_s``: of its engine. What was not told is of requests that were given
        up, or runs."""
        return {
            "wall_s": round(time.monotonic() - self._began_s, 3),
            "busy_s": round(busy_s, 4),
            "told_s": round(self.told_s, 4),
        }
