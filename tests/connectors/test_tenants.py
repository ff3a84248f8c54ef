"""Quotas of tenants in an engine's store: a tenant that has too much loses its own blocks, and no other's."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import REGISTRY

from moonpool.connectors.vllm import engine_node
from tests.connectors.conftest import Make, Redis
from tests.connectors.small_engine import BLOCK, PAGE_NBYTES, Peer, Request, SmallEngine, until

BLOCK_NBYTES = 2 * PAGE_NBYTES  # of two layers
CAPACITY = 128  # blocks of host memory


def prompt(name: str, num_blocks: int, tenant: str, quota: int, **params: Any) -> Request:
    """``quota``: blocks."""
    owned = {"tenant": tenant, "tenant_cached_nbytes": quota * BLOCK_NBYTES}
    return Request(name, num_blocks * BLOCK + 1, cache_salt=tenant, kv_transfer_params=owned | params)


def held(engine: SmallEngine, tenant: str) -> int:
    return engine.node._tenants.quotas.num_blocks(tenant)


def test_a_tenant_displaces_only_its_own_blocks(engine: Make) -> None:
    one = engine("quotas")
    for number in range(6):
        one.serve(prompt(f"{number}", 20, "modest", 120))
    until(lambda: held(one, "modest") == 120)
    # Host memory has 8 free blocks: without a quota, the next prompts would displace the others.
    for number in range(8):
        one.serve(prompt(f"{chr(ord('a') + number)}", 10, "greedy", 8))
    one.serve(prompt("z", 1, "greedy", 8))
    until(lambda: held(one, "greedy") == 8)
    store = one.node._kv.store
    assert (held(one, "modest"), len(store.host)) == (120, CAPACITY)
    store.check_integrity()
    one.node._tenants.quotas.check_integrity()
    labels = {"tenant": "greedy", "reason": "quota"}
    assert REGISTRY.get_sample_value("moonpool_tenant_evicted_blocks_total", labels)


def test_a_prompt_longer_than_the_quota_keeps_its_beginning(engine: Make) -> None:
    one = engine("long")
    one.serve(prompt("m", 20, "t", 5))
    until(lambda: held(one, "t") == 5)
    assert len(one.node._kv.store.host) == 5


def test_blocks_of_a_peer_count_too(engine: Make, redis: Redis) -> None:
    peer = Peer(redis.url, "lends")
    try:
        peer.hold("n", 6)
        one = engine("reads")
        one.serve(prompt("o", 4, "u", 6))
        until(lambda: held(one, "u") == 4)
        request = prompt("n", 6, "u", 6)
        request.block_hashes = Request("n", 6 * BLOCK).block_hashes  # without the salt
        request.cache_salt = None
        until(lambda: one.scheduler._index.holders(one.scheduler._keys(one.scheduler._track(request))))
        assert one.serve(request) == 6 * BLOCK
        assert held(one, "u") == 6
    finally:
        peer.close()


def test_a_prompt_that_is_handed_over_is_kept_whole(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_node, "KEEP_S", 3600.0)
    one = engine("gives")
    request = prompt("q", 10, "v", 4, do_remote_decode=True)
    one.serve(request)
    node = one.node
    until(lambda: node._keeping and node._kv.store.host.num_pinned == 10)
    [last] = node._keeping
    node._loop.call_soon_threadsafe(node._leased, [last])
    until(lambda: not node._keeping and held(one, "v") == 4)


def test_a_quota_that_is_lifted_limits_nothing(engine: Make) -> None:
    one = engine("lifted")
    one.serve(prompt("r", 10, "w", 4))
    until(lambda: held(one, "w") == 4)
    one.serve(prompt("r2", 10, "w", 0))
    until(lambda: len(one.node._kv.store.host) == 10)
    assert held(one, "w") == 0


def test_blocks_that_cannot_be_kept_displace_none(engine: Make) -> None:
    """A prompt longer than the quota is computed in two steps: the second has nothing to follow on."""
    one = engine("steps")
    request = prompt("s", 20, "x", 5)
    one.begin(request)
    for first in (0, 10):
        request.num_computed_tokens = first * BLOCK
        one._step({request.request_id: 10 * BLOCK})
        one.worker.fence()
    assert held(one, "x") == 5
