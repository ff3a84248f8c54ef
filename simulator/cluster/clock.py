"""Virtual time: a queue of events."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Event:
    """A call at a time, until it is cancelled."""

    __slots__ = ("action", "arguments", "at_s")

    def __init__(self, at_s: float, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.at_s = at_s
        self.action: Callable[..., None] | None = action
        self.arguments = arguments

    def cancel(self) -> None:
        """Idempotent."""
        self.action = None


class Clock:
    """Runs events in the order of their times; at equal times in the order of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Event]] = []
        self._number = 0

    def at(self, at_s: float, action: Callable[..., None], *arguments: Any) -> Event:
        """Call ``action`` at ``at_s``, or now if that has passed."""
        event = Event(max(at_s, self.now_s), action, arguments)
        self._number += 1
        heappush(self._events, (event.at_s, self._number, event))
        return event

    def stop(self) -> None:
        """Drop all events: ``run`` returns."""
        self._events.clear()

    def run(self) -> None:
        """Run until no event is left."""
        while self._events:
            at_s, _, event = heappop(self._events)
            if event.action is not None:
                self.now_s = at_s
                event.action(*event.arguments)
