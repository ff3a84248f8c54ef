"""What a hit saves, and that the policy ``prefix`` keeps what saves more."""

from __future__ import annotations

import random
from collections.abc import Hashable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from moonpool.kvstore.eviction import make_policy
from moonpool.kvstore.eviction.savings import Costs, SavedSeconds, saved_s
from moonpool.runtime.cost_profile import CostProfile


def profile(token_s: float, attention_s: float) -> CostProfile[float]:
    return CostProfile(0.0, token_s, attention_s, 0.0, 0.0, 0.0)


COSTS = Costs(
    block_size=16,
    block_nbytes=1 << 20,
    profile=profile(1e-3, 1e-6),
    load_nbytes_per_s=8e9,
)


def test_what_was_not_measured_saves_the_same_everywhere() -> None:
    unknown = replace(COSTS, profile=profile(0.0, 0.0))
    assert {saved_s(unknown, position) for position in range(100)} == {1.0}


def test_a_deep_block_saves_more_unless_a_slower_tier_has_it_too() -> None:
    assert saved_s(COSTS, 0) < saved_s(COSTS, 10) < saved_s(COSTS, 1000)
    on_disk = replace(COSTS, below_nbytes_per_s=2e9)
    (saved,) = {saved_s(on_disk, position) for position in range(50)}
    assert saved == (1 << 20) / 2e9 - (1 << 20) / 8e9
    slow_disk = replace(COSTS, below_nbytes_per_s=1e6)
    assert saved_s(slow_disk, 0) == saved_s(COSTS, 0), "a disk slower than computing saves nothing"


RATES = st.floats(1, 1e12) | st.just(0.0)


@given(st.floats(1e-9, 1), st.floats(0, 1e-3), RATES, RATES, st.integers(0, 100_000))
def test_a_hit_always_saves_something(
    token_s: float, attention_s: float, load: float, below: float, position: int
) -> None:
    costs = Costs(16, 1 << 20, profile(token_s, attention_s), load, below)
    assert 0 < saved_s(costs, position) < float("inf")


def victim(saved: SavedSeconds | None) -> str:
    """Which of two chains gives way, a short and a long one that are used alike."""
    policy = make_policy("prefix", 100, saved)
    chains = {"short": [f"short{i}" for i in range(4)], "long": [f"long{i}" for i in range(60)]}
    rng = random.Random(1)
    held: set[Hashable] = set()
    for _ in range(200):
        chain = chains[rng.choice(["short", "long"])]
        policy.used(chain, len(held & set(chain)))
        for key in chain:
            if key not in held:
                policy.added(key)
                held.add(key)
    return str(policy.victim(lambda key: True)).rstrip("0123456789")


def test_prefix_keeps_what_saves_more() -> None:
    attention = replace(COSTS, profile=profile(1e-3, 1e-4))
    assert victim(lambda position: saved_s(attention, position)) == "short"
    assert victim(lambda position: 1 / (1 + position)) == "long"


def test_equal_savings_change_nothing() -> None:
    on_disk = replace(COSTS, below_nbytes_per_s=2e9)
    assert victim(lambda position: saved_s(on_disk, position % 50)) == victim(None)
