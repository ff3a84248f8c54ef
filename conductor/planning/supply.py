"""Nodes on their way: which are expected, which to give up, and for how long no other is asked for."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from moonpool.conductor.fleet.providers.provider import FAILED, SuppliedNode

# A node that is not in the index so long after its start, or after several times the usual time, never comes.
_LEAST_WAIT_S = 120.0
_WAIT_JOINS = 4.0
# A node that joins and dies, again and again, is given up. What is longer ago than this, and than several
# times the usual time to join, does not count.
_MOST_DEPARTURES = 3
_DEPARTURES_S = 600.0
# How long a node is waited for that is in the index, and that this conductor cannot reach.
UNREACHED_S = 30.0
# After a failure of a provider or of a node's start: doubled with each one in a row.
_FIRST_PAUSE_S = 15.0
_LONGEST_PAUSE_S = 600.0
# A node that could not be stopped is asked to stop again after this time.
_STOP_AGAIN_S = 5.0


@dataclass(slots=True)
class Supply:
    """Of one role."""

    num_failures: int = 0  # in a row
    held_until_s: float = 0.0
    why: str = ""
    # Nodes in the index that could not be reached for ``UNREACHED_S``: others are asked for instead.
    lost: set[str] = field(default_factory=set)
    _counted: set[str] = field(default_factory=set)  # nodes that served once, or were counted as failed
    _ended: set[str] = field(default_factory=set)  # nodes that were given up
    # Of these, the ones that could not be stopped: why they are to be, and when to try again.
    _unstopped: dict[str, tuple[str, float]] = field(default_factory=dict)
    _seen_s: dict[str, float] = field(default_factory=dict)  # when each was first looked at
    _away_s: dict[str, float] = field(default_factory=dict)  # since when nodes are gone that had joined
    _departures: dict[str, list[float]] = field(default_factory=dict)  # when each went away lately
    _unreached_s: dict[str, float] = field(default_factory=dict)  # since when nodes in the index do not serve

    def failed(self, why: str, now_s: float) -> None:
        """The provider failed, or a node did: ask for no other for a while. Nodes that fail within that while
        were asked for before it, so they neither count nor make it longer."""
        if now_s < self.held_until_s:
            return
        pause_s = min(_FIRST_PAUSE_S * 2**self.num_failures, _LONGEST_PAUSE_S)
        self.num_failures += 1
        self.held_until_s, self.why = now_s + pause_s, why

    def held(self, now_s: float) -> str:
        """Why no node is asked for now; empty: one may be."""
        if now_s >= self.held_until_s:
            return ""
        return f"none is asked for within {self.held_until_s - now_s:.0f} s: {self.why}"

    def look(
        self,
        supplied: Sequence[SuppliedNode],
        joined: Collection[str],
        join_s: float,
        now_s: float,
        refused: Mapping[str, str] = {},
        unreached: Collection[str] = (),
    ) -> tuple[list[str], dict[str, str]]:
        """Count what happened since the last look. ``joined``: names of the nodes in the index; ``refused``:
        of those, the ones that cannot serve here, and why; ``unreached``: the ones that should serve, and
        that this conductor cannot reach.

        Returns the nodes that are still expected, and those to give up, with the reason.
        """
        expected: list[str] = []
        gives_up: dict[str, str] = {}
        wait_s = max(_LEAST_WAIT_S, _WAIT_JOINS * join_s)
        for node in supplied:
            name, known = node.node_id, node.node_id in self._counted
            self._seen_s.setdefault(name, now_s)
            if name not in unreached:
                self._unreached_s.pop(name, None)
                if name in self.lost and name in joined and name not in refused:
                    self.num_failures = 0  # it is back
                self.lost.discard(name)
            # A node that starts again is as old as at first: count from when it was seen here.
            waited_s = min(node.age_s, now_s - self._seen_s[name])
            if name in self._unstopped and (name in refused or name not in joined):
                why, again_s = self._unstopped[name]
                if node.counts and now_s >= again_s:
                    gives_up[name] = why
            elif name in refused and not known:
                gives_up[name] = f"it cannot serve here: {refused[name]}"
            elif name in joined:
                self._away_s.pop(name, None)
                if self._unstopped.pop(name, None) is not None:
                    self._ended.discard(name)
                if name in unreached:
                    if node.counts and self._is_waited_for(name, now_s):
                        expected.append(name)
                elif not known:
                    self._counted.add(name)
                    self.num_failures = 0
            elif node.state == FAILED and not known:
                self._counted.add(name)
                self.failed(f"{name} {node.reason}", now_s)
            elif node.counts and known and name not in self._ended:
                if name not in self._away_s:
                    self._away_s[name] = now_s
                    since_s = now_s - max(_DEPARTURES_S, _WAIT_JOINS * join_s)
                    before = [at_s for at_s in self._departures.get(name, ()) if at_s >= since_s]
                    self._departures[name] = [*before, now_s]
                if len(self._departures[name]) >= _MOST_DEPARTURES:
                    gives_up[name] = f"it left the index {_MOST_DEPARTURES} times"
                elif now_s - self._away_s[name] <= 2 * join_s:
                    expected.append(name)  # its supervisor starts it again
            elif node.counts and not known and waited_s > wait_s:
                gives_up[name] = f"it has not registered {node.age_s:.0f} s after its start"
            elif node.counts and not known:
                expected.append(name)
        for name, why in gives_up.items():
            if self._unstopped.pop(name, None) is None:  # else it was counted when it was first given up
                self._counted.add(name)
                self._ended.add(name)
                self.failed(f"{name}: {why}", now_s)
        self._forget({node.node_id for node in supplied})
        return expected, gives_up

    def still_runs(self, node_id: str, why: str, now_s: float) -> None:
        """A node that was given up could not be stopped: a later look gives it up again, unless it serves."""
        self._unstopped[node_id] = why, now_s + _STOP_AGAIN_S

    def _is_waited_for(self, name: str, now_s: float) -> bool:
        """Whether a node that is out of reach is still expected. The first time that it is not, it failed."""
        if now_s - self._unreached_s.setdefault(name, now_s) <= UNREACHED_S:
            return True
        if name not in self.lost:
            self.lost.add(name)
            self.failed(f"{name}: in the index, but out of reach for {UNREACHED_S:g} s", now_s)
        return False

    def _forget(self, but: Collection[str]) -> None:
        """Keep what is known of these nodes alone."""
        self._counted.intersection_update(but)
        self._ended.intersection_update(but)
        self.lost.intersection_update(but)
        for known in (self._unstopped, self._seen_s, self._away_s, self._departures, self._unreached_s):
            for name in known.keys() - but:
                del known[name]
