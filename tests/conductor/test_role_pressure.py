"""What autoscalers read: how long a request waits for a role, and the room in its pools."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.conductor.placing.decode_schedule import DecodeSchedule
from moonpool.conductor.planning.role_figures import kv_free, queue_s


def member(role: str, *, prompts_s: float = 0.0, waiting: int = 0, free: int = 0) -> Any:
    """Ten blocks; of its two running requests one ends every 2 s on average."""
    schedule = DecodeSchedule()
    for key in ("a", "b"):
        schedule.add(key, starts_s=0.0, ends_s=4.0, num_tokens=1)
        schedule.begin(key, 0.0)
    schedule.add("waits", starts_s=0.0, ends_s=0.5, num_tokens=1)
    queue = SimpleNamespace(wait_s=lambda now_s: prompts_s / 2)
    return SimpleNamespace(
        record=SimpleNamespace(role=role, load=SimpleNamespace(num_blocks=10, free_blocks=free)),
        view=SimpleNamespace(queue=queue, foreign_queue_s=prompts_s / 2, num_waiting=waiting),
        load=SimpleNamespace(schedule=schedule),
    )


def test_nodes_of_both_roles_count_for_each() -> None:
    fleet = [
        member("prefill", prompts_s=3.0, free=10),
        member("decode", waiting=2, free=1),
        member("both", prompts_s=1.0, waiting=1, free=4),
    ]
    assert queue_s(fleet, "prefill", 0.0) == pytest.approx((3.0 + 1.0) / 2)
    assert queue_s(fleet, "decode", 0.0) == pytest.approx((2 * 2.0 + 2.0) / 2)
    assert queue_s(fleet, "both", 0.0) == pytest.approx(1.0 + 2.0)
    assert kv_free(fleet, "prefill") == pytest.approx(14 / 20)
    assert kv_free(fleet, "decode") == pytest.approx(5 / 20)
    assert kv_free(fleet, "both") == pytest.approx(4 / 10)


def test_a_role_without_nodes_has_room_and_no_queue() -> None:
    assert (queue_s([], "both", 0.0), kv_free([], "both")) == (0.0, 1.0)
    assert DecodeSchedule().wait_s(3) == 0.0
