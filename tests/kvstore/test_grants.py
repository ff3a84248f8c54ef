"""What a holder reads within its grant is what was granted, whatever the network and the clocks do."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.grants.held import HeldGrant
from moonpool.kvstore.grants.table import GrantTable, Slot
from moonpool.transfer import DeadlineExceeded, GrantLapsed

LONGEST_S = 10.0
NUM_SLOTS = 4


@dataclass
class World:
    """Two processes: one has slots and grants them, the other asks and reads. ``rate``: of the holder's clock
    for each second of the first one's."""

    rate: float
    now_s: float = 0.0
    content: list[int] = field(default_factory=lambda: [0] * NUM_SLOTS)
    pins: list[int] = field(default_factory=lambda: [0] * NUM_SLOTS)
    num_lapsed: int = 0

    def __post_init__(self) -> None:
        self.table = GrantTable(self.generation, longest_s=LONGEST_S, clock=lambda: self.now_s)
        self.held: list[tuple[int, HeldGrant, dict[int, int]]] = []

    def generation(self, slot: Slot) -> int:
        return self.content[slot[1]]

    def holders_s(self) -> float:
        return 1e6 + self.now_s * self.rate

    def ask(self, slots: list[int], ttl_s: float, there_s: float, back_s: float) -> None:
        """A request for a grant, so long on its way."""
        asked_s = self.holders_s()
        self.now_s += there_s
        for slot in slots:
            self.pins[slot] += 1

        def end(lapsed: bool) -> None:
            self.num_lapsed += lapsed
            for slot in slots:
                self.pins[slot] -= 1

        grant = self.table.grant("a holder", [(Tier.HOST, slot) for slot in slots], ttl_s, end)
        found = {slot: self.content[slot] for slot in slots}
        assert grant.granted_s <= LONGEST_S
        self.now_s += back_s
        held = HeldGrant("the other", asked_s, grant.granted_s, clock=self.holders_s)
        self.held.append((grant.id, held, found))

    def renew(self, number: int, ttl_s: float, there_s: float, back_s: float) -> None:
        grant_id, held, _ = self.held[number]
        asked_s = self.holders_s()
        self.now_s += there_s
        granted_s = self.table.renew(grant_id, ttl_s)
        self.now_s += back_s
        held.renewed(asked_s, granted_s)

    def reuse(self) -> None:
        """Everything that may be reused gets other content."""
        self.table.sweep()
        for slot, pins in enumerate(self.pins):
            if not pins:
                self.content[slot] += 1

    def read(self, number: int, seconds: float) -> None:
        """A read that takes so long, and whose slots are seen at its end: the worst moment."""
        _, held, granted = self.held[number]
        try:
            with held.within(60.0) as limit_s:
                self.now_s += seconds
                self.reuse()
                found = {slot: self.content[slot] for slot in granted}
                if seconds * self.rate > limit_s:
                    raise DeadlineExceeded("the other", limit_s, "a read")
        except GrantLapsed:
            return
        assert found == granted, "reused slots were read"


seconds = st.floats(0, 12)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_no_reused_slot_is_read_under_a_grant(data: st.DataObject) -> None:
    world = World(rate=data.draw(st.floats(0.995, 1.005)))
    for _ in range(data.draw(st.integers(1, 15))):
        step = data.draw(st.sampled_from(["ask", "read", "read", "renew", "release", "wait"]))
        number = data.draw(st.integers(0, max(len(world.held) - 1, 0)))
        if step == "ask":
            slots = data.draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=3, unique=True))
            world.ask(slots, data.draw(seconds), data.draw(seconds), data.draw(seconds))
        elif step == "wait":
            world.now_s += data.draw(seconds)
            world.reuse()
        elif not world.held:
            continue
        elif step == "read":
            world.read(number, data.draw(seconds))
        elif step == "renew":
            world.renew(number, data.draw(seconds), data.draw(seconds), data.draw(seconds))
        else:
            world.table.release(world.held.pop(number)[0])
        world.table.check_integrity()
    world.now_s += LONGEST_S
    world.table.sweep()
    assert not len(world.table)
    assert world.pins == [0] * NUM_SLOTS


def test_an_id_is_not_given_twice_and_ends_once() -> None:
    ends: list[bool] = []
    now_s = [0.0]
    table = GrantTable(lambda slot: 0, longest_s=1.0, clock=lambda: now_s[0])
    first, second = (table.grant("x", [], 5.0, ends.append) for _ in range(2))
    assert first.id != second.id
    assert (first.granted_s, first.expires_s) == (1.0, 1.0), "it is told what it was granted"
    table.release(first.id)
    table.release(first.id)
    table.release(random.Random(1).getrandbits(63))
    assert ends == [False]
    assert table.renew(first.id, 1.0) == 0.0
    now_s[0] = 1.0
    assert table.sweep() == 1
    assert ends == [False, True]


def test_a_reused_slot_under_a_grant_is_found() -> None:
    generation = [7]
    table = GrantTable(lambda slot: generation[0], longest_s=1.0, clock=time.monotonic)
    table.grant("x", [(Tier.HOST, 3)], 1.0, lambda lapsed: None)
    table.check_integrity()
    generation[0] = 8
    with pytest.raises(AssertionError, match="reused"):
        table.check_integrity()


def test_a_holder_that_is_late_is_told_so() -> None:
    asked_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    with HeldGrant("node a", asked_s, 30.0).within(10.0) as limit_s:
        assert limit_s == 10.0
    short = HeldGrant("node a", asked_s, 0.05)
    with (
        pytest.raises(GrantLapsed, match=r"node a granted its memory for 0.05 s.*lease_ttl_s"),
        short.within(10.0) as limit_s,
    ):
        assert limit_s < 0.05
        time.sleep(0.06)  # as if it were stopped
    with pytest.raises(GrantLapsed), short.within(10.0):
        raise AssertionError("nothing is read then")
    longer = HeldGrant("node a", asked_s, 5.0)
    with pytest.raises(GrantLapsed), longer.within(10.0) as limit_s:
        raise DeadlineExceeded("node a", limit_s, "a read")
