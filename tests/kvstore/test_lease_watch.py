"""Laws of believing a lapsed lease."""

from __future__ import annotations

from kvstore.lease_watch import LeaseWatch


def test_a_lease_is_believed_only_after_one_whole_lease_of_unbroken_watching() -> None:
    watch = LeaseWatch(3.0)
    believed = [watch.answered(at, at + 0.01) for at in (0.0, 1.0, 2.0, 2.9, 3.1)]
    assert believed == [False, False, False, False, True]


def test_an_interruption_starts_the_watch_anew() -> None:
    for interruption in ("lost", "we slept", "redis slept"):
        watch = LeaseWatch(3.0)
        for at in range(4):
            watch.answered(at, at)
        assert watch.answered(4, 4)
        if interruption == "lost":
            watch.lost()
            assert not watch.answered(5, 5)
        elif interruption == "we slept":
            assert not watch.answered(6, 6)
        else:
            assert not watch.answered(5, 7)
        at = 7.0
        while at < 9.5:
            assert not watch.answered(at, at)
            at += 1
        assert watch.answered(10.1, 10.1)
