"""How long a node was there and worked, and its energy: totals since its start, as its record says."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from moonpool.kvstore.index.redis.node_record import NodeRecord
from moonpool.runtime.number_checks import NumberOutOfRange, Range, number

_TOTAL = Range(0.0, 1e12)


@dataclass(frozen=True, slots=True)
class NodeTotals:
    """Joules are None where the machine does not tell. ``processor_joules``: of the machine ``host``."""

    host: str
    wall_s: float
    busy_s: float = 0.0
    told_s: float = 0.0  # of them, that conductors were told with a request
    gpu_joules: float | None = None
    processor_joules: float | None = None

    @classmethod
    def of(cls, record: NodeRecord) -> NodeTotals | None:
        """None: it says nothing valid. Engines of other projects and store nodes say nothing."""
        work, health = record.extra.get("work"), record.extra.get("health")
        if not isinstance(work, dict):
            return None
        health = health if isinstance(health, dict) else {}
        try:
            seconds = {name: number(name, work[name], _TOTAL) for name in ("wall_s", "busy_s", "told_s")}
            gpus = [gpu["energy_joules"] for gpu in health.get("gpus", ())]
            of_gpus = None if None in gpus or not gpus else sum(number("joules", one, _TOTAL) for one in gpus)
            joules = health.get("energy_joules")
            of_processors = None if joules is None else number("joules", joules, _TOTAL)
        except (KeyError, TypeError, NumberOutOfRange):
            return None
        return cls(record.host, **seconds, gpu_joules=of_gpus, processor_joules=of_processors)

    def at_start(self) -> NodeTotals:
        """Of the same node at its start."""
        return NodeTotals(
            self.host,
            0.0,
            gpu_joules=None if self.gpu_joules is None else 0.0,
            processor_joules=None if self.processor_joules is None else 0.0,
        )

    def since(self, before: NodeTotals) -> NodeTotals:
        """What came after ``before``."""
        found: dict[str, Any] = {"host": self.host}
        for name in (each.name for each in fields(self) if each.name != "host"):
            now, then = getattr(self, name), getattr(before, name)
            found[name] = None if now is None or then is None else now - then
        return NodeTotals(**found)
