"""What is decided about a rank that stays slow, and that one that flaps does not flap its node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from moonpool.engine.node.slow_rank import SlowRankWatch, why_alone
from moonpool.engine.node.slow_rank_decision import LEAST_LIFE_S, LOOK_S, Look, Remedy, Verdict, decide
from moonpool.engine.ranks.rank_times import RankTimes
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.kvstore.index.redis.node_record import NodeRecord

OLD: dict[str, Any] = {"life_s": 2 * LEAST_LIFE_S}


def looks(*spells: tuple[float, int | None]) -> list[Look]:
    """Looks during spells, seconds and the slow rank each, one after the other."""
    ranks = [rank for seconds, rank in spells for _ in range(int(seconds / LOOK_S))]
    return [Look(number * LOOK_S, rank) for number, rank in enumerate(ranks, 1)]


def decided(policy: Remedy, seen: list[Look], **words: Any) -> Verdict | None:
    return decide(policy, seen, now_s=seen[-1].at_s if seen else 0.0, **{**OLD, **words})


@pytest.mark.parametrize("policy", [Remedy.DRAIN, Remedy.REGROUP])
def test_a_rank_that_stays_slow_is_acted_on_after_30_s(policy: Remedy) -> None:
    assert decided(policy, looks((30, None), (29, 1))) is None
    assert decided(policy, looks((30, None), (31, 1))) == Verdict(1, 30.5, policy)
    assert decided(Remedy.OFF, looks((60, 1))) is None


def test_ranks_that_flap_or_are_slow_in_turn_do_not_stay_slow() -> None:
    for seen in (looks(*[(15, 1), (15, None)] * 10), looks(*[(10, 1), (10, 2)] * 10)):
        assert not any(decided(Remedy.REGROUP, seen[:end]) for end in range(len(seen) + 1))
    for ended in (looks((60, 1), (0.5, None)), looks((60, 1), (29, 2))):
        assert decided(Remedy.REGROUP, ended) is None


def test_few_looks_under_load_prove_nothing() -> None:
    assert decided(Remedy.DRAIN, [Look(3.0 * number, 1) for number in range(1, 20)]) is None
    assert decided(Remedy.DRAIN, [Look(2.0 * number, 1) for number in range(1, 30)]) is not None


def test_a_node_ends_at_most_once_in_five_minutes_whatever_its_ranks_do() -> None:
    seen = looks((60, 1))
    assert decided(Remedy.DRAIN, seen, life_s=LEAST_LIFE_S - 1) is None
    assert decided(Remedy.DRAIN, seen, life_s=LEAST_LIFE_S) is not None


def test_ranks_are_replaced_once_an_hour_and_rank_0_only_with_its_process() -> None:
    def remedy(rank: int, regrouped_s: float | None) -> Remedy:
        found = decided(Remedy.REGROUP, looks((60, rank)), regrouped_s=regrouped_s)
        assert found is not None
        return found.remedy

    assert remedy(1, None) is remedy(1, 3601.0) is Remedy.REGROUP
    assert remedy(1, 400.0) is remedy(0, None) is Remedy.DRAIN


OWN = NodeRecord("decode-0", 1, "decode", model="m", extra={"slow_rank": "rank 1 of 2 is slow"})


def test_requests_are_left_only_to_nodes_that_can_take_them() -> None:
    other = NodeRecord("decode-1", 1, "decode", model="m")
    assert why_alone(OWN, [OWN, other]) == ""
    assert why_alone(OWN, [OWN, replace(other, role="both")]) == ""
    for unfit in (
        replace(other, model="other"),
        replace(other, role="prefill"),
        replace(other, state="unhealthy"),
        replace(other, extra={"slow_rank": "rank 1 of 2 is slow"}),
    ):
        assert why_alone(OWN, [OWN, unfit]) == "no other node is ready to decode without a slow rank"
    leaving = replace(other, node_id="decode-2", state="draining")
    assert why_alone(OWN, [OWN, other, leaving]) == "decode-2 is draining, too"
    both = replace(OWN, role="both")
    assert why_alone(both, [both, other]) == "no other node is ready to prefill without a slow rank"


class Index:
    """Answers with the next of ``answers``."""

    def __init__(self, answers: Iterable[dict[str, NodeRecord] | None]) -> None:
        self.answers = iter(answers)

    async def nodes(self) -> dict[str, NodeRecord]:
        if (answer := next(self.answers)) is None:
            raise IndexUnavailable("HGETALL", "it was killed")
        return answer


async def test_a_node_serves_on_until_the_index_names_another_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moonpool.engine.node.slow_rank.LOOK_S", 1e-6)
    monkeypatch.setattr("moonpool.engine.node.slow_rank_decision.LEAST_LIFE_S", 0.0)
    ticks = count()
    clock = lambda: next(ticks) * 0.1  # noqa: E731
    times = RankTimes([1], 2, lambda: 0.0)
    for _ in range(8):
        times.observe([0.01, 0.05], [0.0] * 2, [0.0] * 2, [0.0] * 2)
    index = Index([None, {}, {"decode-1": NodeRecord("decode-1", 1, "decode", model="m")}])
    watch = SlowRankWatch(Remedy.REGROUP, lambda: times, index, lambda: OWN, clock=clock)  # type: ignore[arg-type]
    await asyncio.wait_for(watch.run(), 60)
    assert watch.due.is_set()
    assert watch.found is not None
    assert watch.found.regroups
    assert "rank 1 stays slow: for 30 s, " in str(watch.found)
    assert "rank 1 of 2 is slow (compute): it takes 5.0 times as long" in str(watch.found)
    said = [record.getMessage() for record in caplog.records if "the node serves on" in record.getMessage()]
    assert len(said) == 2
    assert "did not answer HGETALL" in said[0]
    assert "no other node is ready to decode" in said[1]
