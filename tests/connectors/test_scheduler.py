"""The scheduler's half: what is loaded from where, what is saved, and when computing is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from moonpool.connectors.vllm.lookup.costs import LoadCosts, Source
from moonpool.connectors.vllm.lookup.prefix_index import Holder
from moonpool.connectors.vllm.parameters.tenant import Tenant, tenant_of
from moonpool.connectors.vllm.scheduler import SchedulerSide
from moonpool.kvstore.blocks.keys import BlockKey

BLOCK = 16


@dataclass
class Request:
    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    cache_salt: str | None = None
    lora_request: object | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.all_token_ids = [ord(self.request_id[0])] * self.num_prompt_tokens
        name = f"{self.request_id[0]}{self.cache_salt or ''}"
        self.block_hashes = [f"{name}{i}".encode() for i in range(self.num_prompt_tokens // BLOCK)]


@dataclass(frozen=True)
class Adapter:
    lora_name: str


class FakeIndex:
    """Every node holds that many blocks of every chain."""

    def __init__(self, **num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def holders(self, keys: Sequence[BlockKey]) -> list[Holder]:
        return [Holder(name, min(n, len(keys)), name.encode()) for name, n in self.num_blocks.items() if n]

    def in_other_layout(self, own: bytes, name: Callable[[bytes], BlockKey]) -> str:
        return ""

    def address_of(self, node_id: str) -> bytes:
        return node_id.encode() if node_id in self.num_blocks else b""

    def close(self) -> None:
        pass


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def side(index: FakeIndex, clock: Clock | None = None, fingerprint: bytes = b"f" * 16) -> SchedulerSide:
    return SchedulerSide("own", fingerprint, BLOCK, index, clock or Clock())


def test_the_longest_prefix_is_loaded_and_one_token_is_left() -> None:
    scheduler = side(FakeIndex(own=2, peer=9))
    request = Request("a", 4 * BLOCK)
    assert scheduler.match(request, 0) == 3 * BLOCK
    scheduler.allocated(request, [7, 8, 9, 10], 3 * BLOCK)
    [load] = scheduler.plan({}, lambda _: None).loads
    assert (load.source, load.blocks, len(load.keys)) == (b"peer", [7, 8, 9], 3)


def test_blocks_the_engine_has_are_not_loaded() -> None:
    scheduler = side(FakeIndex(own=3))
    request = Request("a", 5 * BLOCK)
    assert scheduler.match(request, 3 * BLOCK) == 0
    assert scheduler.match(request, 2 * BLOCK) == BLOCK
    scheduler.allocated(request, [4, 5, 6, 7, 8], BLOCK)
    [load] = scheduler.plan({}, lambda _: None).loads
    assert (load.source, load.blocks, len(load.keys)) == (b"", [6], 3)


def test_of_equal_prefixes_the_own_memory_is_read() -> None:
    scheduler = side(FakeIndex(peer=2, own=2))
    request = Request("a", 3 * BLOCK)
    scheduler.match(request, 0)
    scheduler.allocated(request, [0, 1, 2], 2 * BLOCK)
    assert scheduler.plan({}, lambda _: None).loads[0].source == b""


def test_a_load_that_fails_twice_is_computed() -> None:
    scheduler = side(FakeIndex(peer=9))
    request = Request("a", 4 * BLOCK)
    for _ in range(2):
        assert scheduler.match(request, 0) == 3 * BLOCK
        scheduler.allocated(request, [0, 1, 2, 3], 3 * BLOCK)
        scheduler.plan({}, lambda _: None)
        scheduler.ended({"a"}, {"a"})
    assert scheduler.match(request, 0) == 0


def test_a_slow_source_loses_against_computing() -> None:
    clock = Clock()
    scheduler = side(FakeIndex(peer=9), clock)
    for name in ("a", "z"):
        request = Request(name, 4 * BLOCK)
        assert scheduler.match(request, 0) == 3 * BLOCK
        scheduler.allocated(request, [0, 1, 2, 3], 3 * BLOCK)
        scheduler.plan({}, lambda _: None)
        clock.now_s += 3.0  # a second a block
        scheduler.ended({name}, set())
    assert scheduler.match(Request("b", 4 * BLOCK), 0) == 3 * BLOCK, "what computing costs is not known yet"
    scheduler.plan({"a": 64}, lambda _: [0, 1, 2, 3])
    clock.now_s += 0.64  # 10 ms a token
    scheduler.plan({"a": 1}, lambda _: [0, 1, 2, 3])
    assert scheduler.match(Request("c", 4 * BLOCK), 0) == 0
    clock.now_s += 61.0
    assert scheduler.match(Request("d", 4 * BLOCK), 0) == 3 * BLOCK, "what was slow once is tried again"


def test_memory_and_disk_of_a_node_have_costs_of_their_own() -> None:
    clock = Clock()
    costs = LoadCosts(clock)
    costs.computed(100, 1.0)
    for _ in range(2):
        costs.loaded(Source("peer", True), 1, 5.0)
    assert not costs.is_worth(Source("peer", True), 1, 16)
    assert costs.is_worth(Source("peer", False), 1, 16)


@pytest.mark.parametrize("at", [0, 1, 4])
def test_one_load_that_stalled_does_not_make_its_source_slow(at: int) -> None:
    costs, peer = LoadCosts(Clock()), Source("peer", False)
    costs.computed(100, 1.0)
    for number in range(5):
        costs.loaded(peer, 1, 5.0 if number == at else 0.01)
        assert costs.is_worth(peer, 1, 16)


def test_a_miss_is_reported_with_its_reason() -> None:
    clock = Clock()
    scheduler = side(FakeIndex(), clock)

    def reason(request: Request) -> str:
        scheduler.match(request, 0)
        [report] = scheduler.plan({request.request_id: 2 * BLOCK}, lambda _: [0, 1]).reports
        scheduler.finished(request.request_id)
        return report.reason

    clock.now_s += 1.0
    assert reason(Request("a1", 2 * BLOCK)) == "new"
    assert reason(Request("a2", 2 * BLOCK)) == "pending"
    clock.now_s += 6.0
    assert reason(Request("a3", 2 * BLOCK)) == "evicted"
    assert reason(Request("a4", 2 * BLOCK, cache_salt="x")) == "salted"
    assert reason(Request("b5", 2 * BLOCK, lora_request=Adapter("one"))) == "new"
    assert reason(Request("b6", BLOCK)) == "", "no whole block but the one with the last token"


def test_full_blocks_are_saved_once() -> None:
    scheduler = side(FakeIndex())
    request = Request("a", 2 * BLOCK + 5)
    scheduler.match(request, 0)
    first = scheduler.plan({"a": BLOCK + 3}, lambda _: [5, 6, 7])
    assert [(save.blocks, save.parent) for save in first.saves] == [([5], None)]
    request.num_computed_tokens = BLOCK + 3
    [second] = scheduler.plan({"a": BLOCK + 2}, lambda _: [5, 6, 7]).saves
    assert (second.blocks, second.parent) == ([6], first.saves[0].keys[0])
    request.num_computed_tokens = 2 * BLOCK + 5
    assert not scheduler.plan({"a": 1}, lambda _: [5, 6, 7]).saves
    scheduler.finished("a")
    assert not scheduler.plan({"a": 40}, lambda _: [5, 6, 7]).saves


def test_a_prefix_is_fetched_ahead_only_while_its_request_waits() -> None:
    scheduler = side(FakeIndex(peer=9, own=2))
    request = Request("a", 4 * BLOCK, kv_transfer_params={"cache_hint": {"prefetch": True}})
    scheduler.arrived(request)
    [hint] = scheduler.plan({}, lambda _: None).hints
    assert (hint.action, hint.source, len(hint.keys)) == ("prefetch", b"peer", 4)
    scheduler.arrived(request)
    scheduler.match(request, 0)
    scheduler.allocated(request, [0, 1, 2, 3], 3 * BLOCK)
    plan = scheduler.plan({}, lambda _: None)
    assert plan.loads and not plan.hints


def test_what_is_in_the_own_memory_is_not_fetched_ahead() -> None:
    scheduler = side(FakeIndex(peer=2, own=2))
    scheduler.arrived(Request("a", 4 * BLOCK, kv_transfer_params={"cache_hint": {"prefetch": True}}))
    assert not scheduler.plan({}, lambda _: None).hints


def test_what_is_dropped_is_not_saved() -> None:
    scheduler = side(FakeIndex())
    params = {"cache_hint": {"drop_from": BLOCK + 1}}
    scheduler.arrived(Request("a", 5 * BLOCK, kv_transfer_params=params))
    [save] = scheduler.plan({"a": 5 * BLOCK}, lambda _: [0, 1, 2, 3, 4]).saves
    assert (len(save.keys), save.blocks) == (2, [0, 1])
    scheduler.finished("a")
    [hint] = scheduler.plan({}, lambda _: None).hints
    assert (hint.action, hint.first, hint.keys[:2]) == ("drop", 2, save.keys)


def test_blocks_of_a_prompt_that_is_handed_over_are_not_dropped() -> None:
    scheduler = side(FakeIndex())
    params = {"do_remote_decode": True, "cache_hint": {"drop_from": 0}}
    scheduler.arrived(Request("a", 2 * BLOCK, kv_transfer_params=params))
    [save] = scheduler.plan({"a": 2 * BLOCK}, lambda _: [0, 1]).saves
    assert len(save.keys) == 2
    scheduler.finished("a")
    assert not scheduler.plan({}, lambda _: None).hints


@pytest.mark.parametrize("params", [{}, {"do_remote_decode": True}])
def test_what_is_let_go_is_saved_first(params: dict[str, Any]) -> None:
    scheduler = side(FakeIndex())
    scheduler.arrived(
        Request("a", 3 * BLOCK + 1, kv_transfer_params=params | {"cache_hint": {"drop_after": True}})
    )
    [save] = scheduler.plan({"a": 2 * BLOCK}, lambda _: [0, 1, 2, 3]).saves
    scheduler.finished("a")
    [hint] = scheduler.plan({}, lambda _: None).hints
    assert (hint.action, hint.keys) == ("let_go", save.keys), "only what was saved"


def test_a_tenants_prompt_counts_from_the_beginning() -> None:
    scheduler = side(FakeIndex(peer=1))
    params = {"tenant": "t", "tenant_cached_nbytes": 100}
    request = Request("a", 2 * BLOCK + 1, kv_transfer_params=params)
    scheduler.match(request, 0)
    scheduler.allocated(request, [0, 1, 2], BLOCK)
    plan = scheduler.plan({}, lambda _: None)
    [claim], [load] = plan.claims, plan.loads
    assert (claim.tenant, len(claim.keys), load.tenant) == (Tenant("t", 100), 2, "t")
    plan = scheduler.plan({"a": 2 * BLOCK + 1}, lambda _: [0, 1, 2])
    assert [save.tenant for save in plan.saves] == ["t"] and not plan.claims


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"tenant": ""},
        {"tenant": 3},
        {"tenant": "x" * 300},
        {"tenant": "t", "tenant_cached_nbytes": -1},
        {"tenant": "t", "tenant_cached_nbytes": True},
        {"tenant": "t", "tenant_cached_nbytes": "1GiB"},
    ],
)
def test_what_names_no_tenant(params: dict[str, Any]) -> None:
    assert tenant_of(Request("a", BLOCK, kv_transfer_params=params)) is None


def test_engines_whose_bytes_differ_share_no_key() -> None:
    saved = []
    for fingerprint in (b"f" * 16, b"g" * 16):
        scheduler = side(FakeIndex(), fingerprint=fingerprint)
        scheduler.match(Request("a", 2 * BLOCK), 0)
        [save] = scheduler.plan({"a": 2 * BLOCK}, lambda _: [0, 1]).saves
        saved.append(set(save.keys))
    assert not saved[0] & saved[1]
