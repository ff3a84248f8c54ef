"""Where the time of a node's start goes, by phase."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moonpool.conductor.fleet.member import Member
from moonpool.conductor.planning.observation import UNKNOWN_JOIN_S
from moonpool.conductor.planning.role_figures import join_phases, longest_join_s
from moonpool.engine.node.join_phases import JoinPhases
from moonpool.kvstore.index.redis.node_record import JOIN_PHASES


def test_phases_follow_each_other_and_each_ends_once() -> None:
    now_s = 100.0
    phases = JoinPhases(first=False, clock=lambda: now_s)
    reads: list[int] = []
    progress = phases.watch(lambda done, total, name: reads.append(done))
    now_s = 103.0
    progress(5, 10, "weights")  # half of them: the phase goes on
    assert phases.seconds == {"process": 0.0}
    now_s = 104.0
    progress(10, 10, "weights")
    now_s = 104.5
    progress(10, 10, "weights")  # a second rank has read them, too
    now_s = 105.0
    for phase in JOIN_PHASES[2:]:
        phases.ends(phase)
        now_s += 1.0
    assert phases.seconds == {
        "process": 0.0,
        "weights": 4.0,
        "warm_up": 1.0,
        "services": 1.0,
        "registration": 1.0,
    }
    assert tuple(phases.seconds) == JOIN_PHASES
    assert reads == [5, 10, 10]


def test_only_the_first_start_of_a_process_counts_its_age() -> None:
    assert JoinPhases(first=True).seconds["process"] > 0
    assert JoinPhases(first=False).seconds["process"] == 0


def members(*extras: dict[str, Any], first_token_s: float | None = None) -> Iterable[Member]:
    made = [SimpleNamespace(record=SimpleNamespace(extra=one), first_token_s=first_token_s) for one in extras]
    return cast(Iterable[Member], made)


def test_the_longest_of_several_nodes_counts_in_each_phase() -> None:
    one, other = {"weights": 2.0, "warm_up": 1.0}, {"weights": 1.5, "warm_up": 3.0, "services": 0.2}
    found = join_phases(members({"join": one}, {"join": other}, first_token_s=0.7))
    assert found == {"weights": 2.0, "warm_up": 3.0, "services": 0.2, "first_token": 0.7}
    assert longest_join_s(members({"join_s": 4.0}, {"join_s": 6.0})) == 6.0


@pytest.mark.parametrize(
    "join", [None, 3, [], {"weights": "long"}, {"weights": float("nan")}, {"lunch": 1.0}]
)
def test_what_a_node_says_wrongly_is_left_out(join: object) -> None:
    """Its record comes from Redis."""
    assert join_phases(members({"join": join})) == {}
    assert longest_join_s(members({"join_s": "soon"})) == UNKNOWN_JOIN_S
