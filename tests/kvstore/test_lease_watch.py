"""Laws of believing a lapsed lease."""

from __future__ import annotations

import pytest

from moonpool.kvstore.index.follower import LeaseWatch


def test_a_lease_is_believed_only_after_one_whole_lease_of_unbroken_watching() -> None:
    watch = LeaseWatch(3.0)
    believed = [watch.answered(at, at + 0.01) for at in (0.0, 1.0, 2.0, 2.9, 3.1)]
    assert believed == [False, False, False, False, True]


@pytest.mark.parametrize(("cause", "restart"), [("lost", 5.0), ("we slept", 6.0), ("redis slept", 7.0)])
def test_an_interruption_starts_the_watch_anew(cause: str, restart: float) -> None:
    watch = LeaseWatch(3.0)
    for at in range(4):
        watch.answered(at, at)
    assert watch.answered(4, 4)
    if cause == "lost":
        watch.disconnected()
    assert not watch.answered(5 if cause == "redis slept" else restart, restart)
    assert [watch.answered(restart + at, restart + at) for at in (1, 2, 2.9, 3.1)] == [
        False,
        False,
        False,
        True,
    ]
