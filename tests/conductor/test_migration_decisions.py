"""Which requests move, and to where: pure functions over a view of the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.costs.model import NodeCost, Profile
from moonpool.conductor.migration.decisions import (
    Move,
    Running,
    Waiting,
    plan_defragment,
    plan_drain,
    plan_hot_spots,
    plan_priority,
)
from moonpool.conductor.migration.rounds import PAUSE_S, MoveRounds
from moonpool.conductor.placing.node_view import NodeView

BLOCK = 16
# A step takes 1 ms, and 1 ms more for each sequence.
PROFILE = Profile(0.0, 1e-5, 0.0, 1e-3, 1e-3, 0.0)


def node(name: str, *, free: int, running: int = 0, waiting: int = 0) -> NodeView:
    return NodeView(
        name,
        NodeCost(PROFILE),
        num_free_blocks=free,
        num_running=running,
        num_waiting=waiting,
        num_blocks=1000,
    )


def run(name: str, at: str, blocks: int, *, expected: int = 160, priority: int = 0) -> Running:
    return Running(name, at, blocks * BLOCK, expected, priority)


def waits(name: str, at: str, blocks: int, *, priority: int = 0, computed: bool = True) -> Waiting:
    return Waiting(name, at, blocks * BLOCK - 1, priority, computed)


def defragmented(
    running: Sequence[Running], waiting: Sequence[Waiting], nodes: Sequence[NodeView]
) -> list[Move]:
    return plan_defragment(running, waiting, nodes, block_size=BLOCK, now_s=0.0)


def prioritised(
    running: Sequence[Running], waiting: Sequence[Waiting], nodes: Sequence[NodeView]
) -> list[Move]:
    return plan_priority(running, waiting, nodes, block_size=BLOCK, now_s=0.0)


def cooled(running: Sequence[Running], nodes: Sequence[NodeView], tbt_s: float = 4e-3) -> list[Move]:
    return plan_hot_spots(running, nodes, tbt_s=tbt_s, block_size=BLOCK, now_s=0.0)


def moves(found: Sequence[Move]) -> list[tuple[str, str, str, str]]:
    return [(one.request_id, one.source, one.target, one.cause) for one in found]


def test_a_node_that_drains_is_emptied_longest_first() -> None:
    running = [run("short", "a", 4, expected=10), run("long", "a", 4, expected=900), run("stays", "b", 4)]
    found = plan_drain(running, {"a"}, [node("b", free=500), node("c", free=500)], block_size=BLOCK, now_s=0)
    assert moves(found) == [("long", "a", "b", "drain"), ("short", "a", "c", "drain")]


def test_a_node_that_drains_is_emptied_where_there_is_room_for_now() -> None:
    """Better short of blocks later than cut off; and not where there is none for what there is."""

    def drained(*nodes: NodeView) -> list[tuple[str, str, str, str]]:
        return moves(plan_drain([run("one", "a", 20, expected=900)], {"a"}, nodes, block_size=BLOCK, now_s=0))

    assert drained(node("b", free=25, waiting=1), node("c", free=90)) == [("one", "a", "c", "drain")]
    assert drained(node("b", free=25, waiting=1), node("c", free=20)) == [("one", "a", "b", "drain")]
    assert not drained(node("b", free=21), node("c", free=22, running=2))


# ------------------------------------------------------------------ defragment

FRAGMENTED = [node("a", free=40, running=2, waiting=1), node("b", free=45)]


def test_a_prompt_that_fits_nowhere_gets_the_room_of_the_cheapest() -> None:
    running = [run("large", "a", 30), run("small", "a", 22), run("elsewhere", "b", 1)]
    (move,) = found = defragmented(running, [waits("prompt", "a", 60)], FRAGMENTED)
    assert moves(found) == [("small", "a", "b", "defragment")]
    assert "prompt" in move.reason


def test_a_move_that_others_make_needless_is_left_out() -> None:
    running = [run("tiny", "a", 3), run("large", "a", 25)]
    found = defragmented(running, [waits("prompt", "a", 60)], FRAGMENTED)
    assert moves(found) == [("large", "a", "b", "defragment")]


def test_nothing_moves_for_a_prompt_that_fits_somewhere_or_cannot_fit() -> None:
    running = [run("small", "a", 22)]
    assert not defragmented(running, [waits("prompt", "a", 44)], FRAGMENTED)  # b has so many
    assert not defragmented(running, [waits("prompt", "a", 90)], FRAGMENTED)  # more than both
    assert not defragmented(running, [waits("prompt", "a", 80)], FRAGMENTED)  # more than a move brings
    assert not defragmented(running, [waits("prompt", "a", 60, computed=False)], FRAGMENTED)
    granted = [node("a", free=40, running=2), node("b", free=45)]
    assert not defragmented(running, [waits("prompt", "a", 60)], granted)  # it has its blocks


def test_a_request_leaves_only_for_a_node_with_room() -> None:
    running = [run("small", "a", 22)]
    prompt = [waits("prompt", "a", 60)]
    assert not defragmented(running, prompt, [FRAGMENTED[0], node("b", free=45, waiting=1)])
    assert not plan_defragment(running, prompt, FRAGMENTED, closed={"b"}, block_size=BLOCK, now_s=0.0)
    # A node that takes no requests may still be left.
    free = [*FRAGMENTED, node("c", free=20)]
    found = plan_defragment(running, prompt, free, closed={"a"}, block_size=BLOCK, now_s=0.0)
    assert moves(found) == [("small", "a", "b", "defragment")]


# ------------------------------------------------------------------ priority


def test_less_urgent_requests_make_room_for_a_more_urgent_one() -> None:
    running = [run("urgent", "a", 20, priority=-1), run("patient", "a", 25, priority=5)]
    nodes = [node("a", free=10, running=2, waiting=1), node("b", free=200)]
    assert moves(prioritised(running, [waits("prompt", "a", 20)], nodes)) == [
        ("patient", "a", "b", "priority")
    ]
    assert not prioritised(running, [waits("prompt", "a", 20, priority=5)], nodes)
    assert not prioritised(running, [waits("prompt", "a", 8)], nodes)  # it has room
    assert not prioritised(running, [waits("prompt", "a", 60)], nodes)  # too little would come free


# ------------------------------------------------------------------ hot spots


def test_a_slow_node_loses_the_request_that_lasts_longest() -> None:
    running = [run("short", "a", 9, expected=40), run("long", "a", 20, expected=400), run("third", "a", 9)]
    nodes = [node("a", free=500, running=4), node("b", free=500, running=1), node("c", free=500)]
    (move,) = found = cooled(running, nodes)
    assert moves(found) == [("long", "a", "c", "hot-spot")]
    assert "5 ms" in move.reason


def test_nothing_moves_to_a_node_that_would_be_nearly_as_slow() -> None:
    running = [run("one", "a", 9)]
    # With it a step takes 4 ms: the target itself, and soon more.
    assert not cooled(running, [node("a", free=500, running=4), node("b", free=500, running=2)])
    assert not cooled(running, [node("a", free=500, running=3), node("b", free=500)])  # fast enough
    ending = [run("ending", "a", 9, expected=3)]
    assert not cooled(ending, [node("a", free=500, running=4), node("b", free=500)])


# ------------------------------------------------------------------ all

_nodes = st.lists(
    st.tuples(st.integers(0, 120), st.integers(0, 8), st.integers(0, 1)), min_size=2, max_size=4
)
_requests = st.lists(
    st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 600), st.integers(-2, 2)), max_size=12
)


@given(_nodes, _requests, _requests)
def test_no_plan_overfills_a_node_or_moves_a_request_twice(
    nodes: list[tuple[int, int, int]],
    requests: list[tuple[int, int, int, int]],
    prompts: list[tuple[int, int, int, int]],
) -> None:
    views = [node(str(i), free=f, running=r, waiting=w) for i, (f, r, w) in enumerate(nodes)]
    running = [run(f"r{i}", str(at), b, expected=e, priority=p) for i, (at, b, e, p) in enumerate(requests)]
    waiting = [waits(f"w{i}", str(at), b, priority=p) for i, (at, b, _, p) in enumerate(prompts)]
    by_id = {one.request_id: one for one in running}
    for found in (
        plan_drain(running, {"0"}, views[1:], block_size=BLOCK, now_s=0.0),
        defragmented(running, waiting, views),
        prioritised(running, waiting, views),
        cooled(running, views),
    ):
        assert len({move.request_id for move in found}) == len(found)
        for view in views:
            coming = [by_id[move.request_id] for move in found if move.target == view.node_id]
            if any(move.cause == "drain" for move in found):
                # For what there is of them, at least.
                coming = [replace(one, expected_tokens=1) for one in coming]
            else:
                assert not coming or not view.num_waiting
            assert sum(one.num_blocks(BLOCK) for one in coming) <= view.num_free_blocks
        assert all(by_id[move.request_id].node_id == move.source != move.target for move in found)


def test_a_storm_of_moves_is_bounded_and_all_of_them_come_in_turn() -> None:
    """Six nodes drain at once: at most 4 moves from each and 16 in all are in flight."""
    rounds = MoveRounds(("drain",), tbt_s=1.0, block_size=BLOCK)
    drained = {f"d{number}" for number in range(6)}
    running = {f"r{number}": run(f"r{number}", f"d{number % 6}", 4) for number in range(120)}
    target, now_s, most = node("idle", free=100_000), 0.0, 0
    while running:
        rounds.begin(list(running.values()), [], [target], drained, [target], now_s)
        in_flight = list(rounds.in_flight.values())
        sources = [move.source for move in in_flight]
        assert len(in_flight) <= 16 and all(sources.count(name) <= 4 for name in drained)
        most = max(most, len(in_flight))
        # The oldest ends, and was moved; another one could not move, and is tried again later.
        rounds.ended(in_flight[0].request_id, now_s)
        del running[in_flight[0].request_id]
        if len(in_flight) > 1:
            rounds.ended(in_flight[1].request_id, now_s)
        now_s += PAUSE_S + 0.1
    assert most == 16
    assert not rounds.in_flight
