"""Whether a history of one key can be explained by operations that take effect one after the other (Wing and
Gong, with the memory of Lowe)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PENDING = math.inf


@dataclass(frozen=True, slots=True)
class Operation:
    """``value``: what was put, or what a get returned (None: nothing), or whether a remove found something.
    ``ended_s`` is ``PENDING`` where the outcome is unknown: it takes effect at any time after its call, or
    never."""

    kind: str  # "put", "get" or "remove"
    value: int | bool | None
    called_s: float
    ended_s: float


def is_linearizable(history: Iterable[Operation]) -> bool:
    """Whether some order of the operations, which respects the times of their calls and returns, gives each
    get and remove what it returned. The key has no value at first."""
    done = sorted((each for each in history if each.ended_s < PENDING), key=lambda each: each.called_s)
    # A get without an answer says nothing.
    pending = [each for each in history if each.ended_s == PENDING and each.kind != "get"]
    operations = [*done, *pending]
    all_done = (1 << len(done)) - 1
    seen: set[tuple[int, int | None]] = set()
    stack: list[tuple[int, int | None]] = [(0, None)]
    while stack:
        place = stack.pop()
        if place in seen:
            continue
        seen.add(place)
        taken, state = place
        if taken & all_done == all_done:
            return True
        for number in _next(operations, len(done), taken):
            operation = operations[number]
            if _fits(operation, state):
                after = (
                    state if operation.kind == "get" else operation.value if operation.kind == "put" else None
                )
                stack.append((taken | 1 << number, after))
    return False


def _next(operations: Sequence[Operation], num_done: int, taken: int) -> list[int]:
    """The operations that may take effect next: none of the others ended before they were called."""
    left = [number for number in range(len(operations)) if not taken >> number & 1]
    first_end_s = min(operations[number].ended_s for number in left)
    return [number for number in left if operations[number].called_s <= first_end_s]


def _fits(operation: Operation, state: int | None) -> bool:
    if operation.ended_s == PENDING or operation.kind == "put":
        return True
    if operation.kind == "get":
        return operation.value == state
    return operation.value == (state is not None)
