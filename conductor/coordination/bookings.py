"""Bookings: the load that each conductor has placed, and the choice of nodes that counts all of it.

Pure: every conductor keeps these tables, and one of them, the arbiter, decides for all (see ``peers``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from moonpool.conductor.placing.node_view import Load

SHARE_S = 0.05
"""Pause between reports of load to another conductor."""

_NONE = Load()


@dataclass(frozen=True, slots=True)
class Choice:
    """A candidate node. ``capacity``: blocks of a decode node, 0: unlimited. ``ttft_s``: of a prefill node,
    without foreign load.
    """

    node: str  # node id and epoch
    capacity: int = 0
    ttft_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """Candidates for one request. ``num_blocks``: needed on the decode node; ``prefill_s``: of compute."""

    prefills: Sequence[Choice]
    decodes: Sequence[Choice]  # empty: no decode node is needed
    num_blocks: int
    prefill_s: float


@dataclass(frozen=True, slots=True)
class Booking:
    """Positions of the booked nodes among the choices. ``had_room`` False: no decode node had room, the first
    was booked, and the request will wait there.
    """

    prefill: int
    decode: int  # -1: not needed
    had_room: bool


@dataclass(frozen=True, slots=True)
class Report:
    """What another conductor says of its load. Its bookings are numbered: the first ``num_begun``, without
    those in ``open``, are part of ``loads``, or were given up.
    """

    version: int
    loads: Mapping[str, Load]
    num_begun: int = 0
    open: Collection[int] = ()


@dataclass(slots=True)
class _Other:
    report: Report = Report(-1, {})
    booked: dict[int, list[tuple[str, Load]]] = field(default_factory=dict)  # not in the report yet
    loads: dict[str, Load] = field(default_factory=dict)  # both together


class Bookings:
    """The load of all conductors by node, as one of them knows it."""

    def __init__(self, own: Callable[[str], Load]) -> None:
        """``own``: the load that this conductor has on a node now."""
        self._own = own
        self._others: dict[str, _Other] = {}

    def hear(self, conductor_id: str, report: Report) -> set[str]:
        """Another conductor reports. Returns the nodes with a foreign load that may have changed."""
        other = self._others.setdefault(conductor_id, _Other())
        if report.version <= other.report.version:
            return set()  # overtaken by a later one
        nodes = set(other.loads)
        other.report = report
        other.booked = {
            number: loads
            for number, loads in other.booked.items()
            if number > report.num_begun or number in report.open
        }
        other.loads = dict(report.loads)
        for loads in other.booked.values():
            _add(other.loads, loads)
        return nodes | other.loads.keys()

    def forget(self, conductor_id: str) -> set[str]:
        """A conductor has left. Returns the nodes with a changed foreign load. Idempotent."""
        other = self._others.pop(conductor_id, None)
        return set(other.loads) if other is not None else set()

    def foreign(self, node: str, *, without: str = "") -> Load:
        """The load of the other conductors on a node, without one of them."""
        num_blocks, prefill_s = 0, 0.0
        for conductor_id, other in self._others.items():
            if conductor_id != without:
                load = other.loads.get(node, _NONE)
                num_blocks += load.num_blocks
                prefill_s += load.prefill_s
        return Load(num_blocks, prefill_s)

    def book(self, wanted: Wanted, *, conductor_id: str = "", number: int = 0) -> Booking:
        """Choose the earliest prefill node, foreign load included, and the first decode node with room.

        ``conductor_id``: the other conductor that asks, and counts there from now on; empty: this one, which
        counts the request itself when it starts.
        """
        prefills, decodes = wanted.prefills, wanted.decodes
        earliest = [choice.ttft_s + self._foreign_s(choice.node, conductor_id) for choice in prefills]
        prefill = earliest.index(min(earliest)) if earliest else -1
        decode, had_room = (0, False) if decodes else (-1, True)
        for i, choice in enumerate(decodes):
            num_blocks = self.foreign(choice.node).num_blocks + self._own(choice.node).num_blocks
            if not choice.capacity or num_blocks + wanted.num_blocks <= choice.capacity:
                decode, had_room = i, True
                break
        if conductor_id:
            loads = [(prefills[prefill].node, Load(0, wanted.prefill_s))] if prefill >= 0 else []
            if decode >= 0:
                loads.append((decodes[decode].node, Load(wanted.num_blocks)))
            other = self._others.setdefault(conductor_id, _Other())
            other.booked[number] = loads
            _add(other.loads, loads)
        return Booking(prefill, decode, had_room)

    def _foreign_s(self, node: str, conductor_id: str) -> float:
        """Seconds of prefills on a node, without those of ``conductor_id``; empty: of this conductor."""
        foreign_s = self.foreign(node, without=conductor_id).prefill_s
        return foreign_s + self._own(node).prefill_s if conductor_id else foreign_s


def _add(loads: dict[str, Load], more: Iterable[tuple[str, Load]]) -> None:
    for node, load in more:
        before = loads.get(node, _NONE)
        loads[node] = Load(before.num_blocks + load.num_blocks, before.prefill_s + load.prefill_s)
