"""Prompts that wait are placed again where another node would begin much sooner."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.costs.model import NodeCost, Profile
from moonpool.conductor.migration.relief import plan_relief
from moonpool.conductor.placing.node_view import NodeView

COST = NodeCost(Profile(1e-3, 1e-5, 0.0, 1e-3, 1e-4, 0.0))


def node(name: str, *seconds: float) -> NodeView:
    """A node with prompts of these compute times, the first of which runs."""
    view = NodeView(name, COST)
    for number, compute_s in enumerate(seconds):
        view.queue.add((name, number), order_s=float(number), compute_s=compute_s, now_s=0.0)
    return view


def keys(nodes: Sequence[NodeView], **options: object) -> list[object]:
    return [relief.key for relief in plan_relief(nodes, 0.0, **options)]  # type: ignore[arg-type]


def test_a_newcomer_takes_over_the_end_of_a_queue_until_both_wait_alike() -> None:
    busy = node("busy", *[2.0] * 8)
    found = plan_relief([busy, node("new")], 0.0)
    assert [relief.key for relief in found] == [("busy", number) for number in (7, 6, 5, 4)]
    assert [relief.gain_s for relief in found] == [14.0, 10.0, 6.0, 2.0]


def test_little_gain_moves_nothing() -> None:
    assert keys([node("a", 2.0, 2.0), node("b", 2.0)]) == []
    assert keys([node("a", 0.2, 0.2, 0.2), node("b")]) == []
    assert keys([node("a", 5.0)]) == keys([]) == []
    # What runs stays, however long it takes.
    assert keys([node("a", 60.0), node("b")]) == []
    # A prompt that takes long gains little by a second.
    assert keys([node("a", 1.5, 9.0), node("b")]) == []


def test_some_stay_and_a_decision_is_bounded() -> None:
    busy = node("busy", *[1.0] * 9)
    assert ("busy", 8) not in keys([busy, node("new")], stay={("busy", 8)})
    assert len(keys([busy, node("new")], most=2)) == 2
    assert len(keys([busy, node("new")], room=lambda name: 3 if name == "new" else 0)) == 3
    assert keys([busy, node("new")], room=lambda name: 0) == []


@given(st.lists(st.lists(st.floats(0.01, 20), max_size=12), min_size=1, max_size=5))
def test_the_longest_queue_never_grows(queues: list[list[float]]) -> None:
    """Where what it moves goes to the node that would begin first."""
    nodes = [node(f"n{number}", *seconds) for number, seconds in enumerate(queues)]
    seconds = {
        (view.node_id, i): compute_s
        for view, lengths in zip(nodes, queues, strict=True)
        for i, compute_s in enumerate(lengths)
    }
    before_s = max((view.queue.wait_s(0.0) for view in nodes), default=0.0)
    for relief in plan_relief(nodes, 0.0, most=1000):
        source = next(view for view in nodes if view.node_id == relief.source)
        assert source.queue.remove(relief.key, 0.0)
        target = min(nodes, key=lambda view: view.queue.wait_s(0.0))
        assert target is not source
        assert isinstance(relief.key, tuple)
        target.queue.add(relief.key, order_s=99.0, compute_s=seconds[relief.key], now_s=0.0)
    assert max((view.queue.wait_s(0.0) for view in nodes), default=0.0) <= before_s + 1e-6
