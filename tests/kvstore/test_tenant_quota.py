"""A tenant's cached blocks stay within its quota, by its own eviction."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.eviction.tenant_metrics import TenantLabels
from moonpool.kvstore.eviction.tenant_quota import TenantQuotas

NBYTES = 100


def chain(name: str, length: int) -> list[BlockKey]:
    return [BlockKey(f"{name}{i}".encode().ljust(16, b".")) for i in range(length)]


def fill(quotas: TenantQuotas, tenant: str, keys: list[BlockKey], limit_blocks: int = 4) -> None:
    """A request computes the whole chain."""
    quotas.claim(tenant, limit_blocks * NBYTES, keys, [])
    for i, key in enumerate(keys):
        quotas.stored(key, keys[i - 1] if i else None, Tier.POOL)


def test_the_end_of_the_chain_unused_for_longest_goes() -> None:
    quotas = TenantQuotas(NBYTES)
    old, new = chain("a", 3), chain("b", 3)
    fill(quotas, "acme", old)
    fill(quotas, "acme", new)
    assert quotas.excess(lambda _: True) == [old[2], old[1]]
    quotas.claim("acme", 4 * NBYTES, old[:1], [Tier.POOL])
    fill(quotas, "acme", chain("c", 1))
    assert quotas.excess(lambda _: True) == [new[2]], "what was used again stays"
    quotas.check_integrity()


def test_a_tenant_over_quota_evicts_only_its_own_blocks() -> None:
    quotas = TenantQuotas(NBYTES)
    fill(quotas, "small", chain("s", 4))
    fill(quotas, "", chain("n", 50))
    greedy = chain("g", 9)
    fill(quotas, "greedy", greedy)
    assert quotas.excess(lambda _: True) == greedy[:3:-1]
    assert (quotas.num_blocks("small"), quotas.num_blocks("greedy"), quotas.num_blocks("")) == (4, 4, 0)


def test_blocks_in_use_wait_for_their_turn() -> None:
    quotas = TenantQuotas(NBYTES)
    keys = chain("a", 6)
    fill(quotas, "acme", keys)
    assert quotas.excess(lambda key: key != keys[5]) == []
    assert quotas.excess(lambda _: True) == [keys[5], keys[4]]


def test_room_is_made_before_more_blocks_come() -> None:
    quotas = TenantQuotas(NBYTES)
    old = chain("a", 3)
    fill(quotas, "acme", old)
    fill(quotas, "other", chain("b", 4))
    assert (quotas.room("acme"), quotas.room("other"), quotas.room("nobody")) == (1, 0, None)
    assert quotas.excess(lambda _: True, "acme", 2) == [old[2]]
    assert quotas.excess(lambda _: True, "acme", 9) == [old[1], old[0]], "more than the quota allows"
    assert (quotas.room("acme"), quotas.num_blocks("other")) == (4, 4)
    quotas.check_integrity()


def test_blocks_of_an_earlier_life_count_when_they_are_used_again() -> None:
    quotas = TenantQuotas(NBYTES)
    keys = chain("a", 6)
    quotas.claim("acme", 4 * NBYTES, keys, [Tier.SSD] * 6)
    assert quotas.excess(lambda _: True) == [keys[5], keys[4]]


def test_a_quota_that_is_lifted_bounds_nothing() -> None:
    quotas = TenantQuotas(NBYTES)
    fill(quotas, "acme", chain("a", 9))
    quotas.claim("acme", 0, chain("a", 9), [Tier.POOL] * 9)
    assert quotas.excess(lambda _: True) == []
    quotas.check_integrity()


def test_what_a_tenant_has_is_counted_by_tier_and_what_it_lost_by_reason() -> None:
    quotas = TenantQuotas(NBYTES)
    keys = chain("a", 6)
    fill(quotas, "acme", keys)
    quotas.moved(keys[5], Tier.HOST)
    quotas.moved(keys[4], Tier.SSD)
    quotas.moved(BlockKey(b"unowned".ljust(16)), Tier.SSD)
    assert quotas.usage()["acme"].num_blocks == [4, 1, 1]
    quotas.gone(keys[5])
    quotas.excess(lambda _: True)
    assert quotas.usage()["acme"].num_blocks == [4, 0, 0]
    assert quotas.usage()["acme"].num_evicted == {"quota": 1, "room": 1}


def test_the_number_of_labels_is_bounded() -> None:
    labels = TenantLabels(most=2)
    assert [labels.of(name) for name in ("a", "b", "c", "a", "", "d")] == [
        *("a", "b", "other", "a", "none", "other")
    ]


STEPS = st.lists(
    st.tuples(st.sampled_from("xy"), st.integers(0, 3), st.integers(1, 6), st.integers(0, 6)), max_size=40
)


@given(STEPS, st.integers(1, 5))
def test_within_the_quota_after_every_trim_and_always_prefixes(
    steps: list[tuple[str, int, int, int]], limit_blocks: int
) -> None:
    quotas = TenantQuotas(NBYTES)
    held: set[BlockKey] = set()
    for tenant, number, length, lost in steps:
        keys = chain(f"{tenant}{number}", length)
        present = next((i for i, key in enumerate(keys) if key not in held), length)
        quotas.claim(tenant, limit_blocks * NBYTES, keys, [Tier.HOST] * present)
        for i, key in enumerate(keys):
            quotas.stored(key, keys[i - 1] if i else None, Tier.POOL)
            held.add(key)
        for key in reversed(chain(f"{tenant}{number}", 6)[lost:]):  # the tiers themselves evict some
            if key in held:
                held.discard(key)
                quotas.gone(key)
        for key in quotas.excess(lambda _: True):
            held.discard(key)
        quotas.check_integrity()
        for name in "xy":
            assert quotas.num_blocks(name) <= limit_blocks
            for each in range(4):
                flags = [key in held for key in chain(f"{name}{each}", 6)]
                assert flags == sorted(flags, reverse=True), "a chain with a hole"
