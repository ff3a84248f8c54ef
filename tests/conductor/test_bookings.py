"""The table of bookings: no room is given away twice, and nothing that is gone is held back."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.coordination.bookings import Booking, Bookings, Choice, Report, Wanted
from moonpool.conductor.placing.node_view import Load

D0, D1 = Choice("d0@1", capacity=10), Choice("d1@1", capacity=10)
P0, P1 = Choice("p0@1", ttft_s=0.1), Choice("p1@1", ttft_s=0.2)


def table(**own: Load) -> Bookings:
    return Bookings(lambda node: own.get(node.partition("@")[0], Load()))


def wanted(prefills: Sequence[Choice], decodes: Sequence[Choice] = (), num_blocks: int = 3) -> Wanted:
    return Wanted(prefills, decodes, num_blocks, prefill_s=0.3)


def test_the_first_node_with_room_is_taken_and_never_beyond_its_capacity() -> None:
    bookings, taken = table(d0=Load(3), d1=Load(0)), {0: 3, 1: 0}
    for number in range(1, 9):
        booking = bookings.book(wanted([P0], [D0, D1]), conductor_id="ab"[number % 2], number=number)
        if booking.had_room:
            taken[booking.decode] += 3
        else:
            assert booking.decode == 0
    assert taken == {0: 9, 1: 9}, "ours counts too"


def test_the_prefill_node_is_the_earliest_with_the_load_of_everybody_else() -> None:
    bookings = table(p0=Load(0, 0.5))
    # Our own work is in our own estimates already; for another conductor it counts.
    assert bookings.book(wanted([P0, P1])) == Booking(0, -1, True)
    assert bookings.book(wanted([P0, P1]), conductor_id="a", number=1).prefill == 1
    assert bookings.foreign("p1@1") == Load(0, 0.3)
    assert bookings.book(wanted([P0, P1]), conductor_id="a", number=2).prefill == 1, "its own does not"
    assert bookings.book(wanted([P1, P0])).prefill == 1


def test_a_report_replaces_what_it_includes_and_keeps_what_is_under_way() -> None:
    bookings = table()
    for number in (1, 2, 3):
        bookings.book(wanted([P0], [D0]), conductor_id="a", number=number)
    assert bookings.foreign("d0@1").num_blocks == 9
    # 1 has started, 2 waits for our answer, 3 was asked for after the report was written.
    nodes = bookings.hear("a", Report(5, {"d1@1": Load(3)}, num_begun=2, open=(2,)))
    assert nodes == {"p0@1", "d0@1", "d1@1"}
    assert (bookings.foreign("d0@1").num_blocks, bookings.foreign("d1@1").num_blocks) == (6, 3)
    assert bookings.hear("a", Report(4, {"d1@1": Load(9)})) == set(), "overtaken"
    bookings.hear("a", Report(6, {}, num_begun=3))
    assert bookings.foreign("d0@1") == bookings.foreign("d1@1") == Load()


def test_a_conductor_that_is_gone_holds_nothing_back() -> None:
    bookings = table()
    bookings.hear("gone", Report(1, {"d0@1": Load(10)}))
    assert bookings.book(wanted([P0], [D0, D1])).decode == 1
    assert bookings.forget("gone") == {"d0@1"}
    assert bookings.forget("gone") == set()
    assert bookings.book(wanted([P0], [D0, D1])).decode == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.booleans()), max_size=60))
def test_no_order_of_bookings_and_reports_gives_room_away_twice(steps: list[tuple[str, int, bool]]) -> None:
    """Conductors that start what they booked, or not yet, and report at any time."""
    bookings, begun = table(), dict.fromkeys("abc", 0)
    started: dict[str, dict[str, int]] = {name: {} for name in "abc"}
    version = 0
    for name, num_blocks, reports in steps:
        begun[name] += 1
        booking = bookings.book(wanted([], [D0, D1], num_blocks), conductor_id=name, number=begun[name])
        if booking.had_room:
            node = (D0, D1)[booking.decode].node
            started[name][node] = started[name].get(node, 0) + num_blocks
        if reports:
            version += 1
            loads = {node: Load(count) for node, count in started[name].items()}
            bookings.hear(name, Report(version, loads, begun[name]))
        for choice in (D0, D1):
            assert sum(own.get(choice.node, 0) for own in started.values()) <= choice.capacity
