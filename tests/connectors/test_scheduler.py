"""The scheduler's half: what is loaded from where, what is saved, and when computing is faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import pytest

from moonpool.connectors.vllm.lookup.costs import LoadCosts, Source
from moonpool.connectors.vllm.lookup.prefix_index import Holder
from moonpool.connectors.vllm.parameters.tenant import Tenant, tenant_of
from moonpool.connectors.vllm.plan import StepPlan
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
        self.layouts: list[bytes] = []  # that were asked for

    def holders(self, keys: Sequence[BlockKey]) -> list[Holder]:
        return [Holder(name, min(n, len(keys)), name.encode()) for name, n in self.num_blocks.items() if n]

    def in_other_layout(self, own: bytes, name: Callable[[bytes], BlockKey]) -> str:
        self.layouts.append(own)
        return ""

    def address_of(self, node_id: str) -> bytes:
        return node_id.encode() if node_id in self.num_blocks else b""

    def close(self) -> None:
        pass


class HeldBlocks(FakeIndex):
    """A peer holds these blocks."""

    def __init__(self, *keys: BlockKey) -> None:
        super().__init__(peer=0)
        self.held = set(keys)

    def holders(self, keys: Sequence[BlockKey]) -> list[Holder]:
        held = list(takewhile(self.held.__contains__, keys))
        return [Holder("peer", len(held), b"peer")] if held else []


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


def computed(scheduler: SchedulerSide, request: Request) -> StepPlan:
    """The plan of the step that computes its prompt."""
    count = request.num_prompt_tokens
    return scheduler.plan({request.request_id: count}, lambda _: list(range(9)))


def test_after_a_reset_nothing_is_loaded_that_was_saved_before() -> None:
    index = HeldBlocks()
    scheduler = side(index)
    scheduler.match(Request("a1", 3 * BLOCK + 1), 0)
    [before] = computed(scheduler, Request("a1", 3 * BLOCK + 1)).saves
    index.held.update(before.keys)
    assert scheduler.match(Request("a2", 3 * BLOCK + 1), 0) == 3 * BLOCK
    scheduler.reset_cache()
    # A request from before the reset, which is computed again, and a new one.
    for name in ("a2", "a3"):
        request = Request(name, 3 * BLOCK + 1)
        assert scheduler.match(request, 0) == 0
        [after] = computed(scheduler, request).saves
        assert (len(after.keys), after.parent) == (3, None)
        assert not set(after.keys) & set(before.keys)
    assert set(index.layouts) == {b"f" * 16}, "the layout is the same, so the index has its former name"
    index.held.update(after.keys)
    assert scheduler.match(Request("a4", 3 * BLOCK + 1), 0) == 3 * BLOCK
    scheduler.reset_cache()
    assert scheduler.match(Request("a5", 3 * BLOCK + 1), 0) == 0


def test_a_request_that_a_reset_interrupts_is_saved_again_and_counts_to_its_tenant() -> None:
    scheduler = side(FakeIndex())
    request = Request("a", 3 * BLOCK, kv_transfer_params={"tenant": "t"})
    scheduler.match(request, 0)
    [before] = (first := computed(scheduler, request)).saves
    assert [claim.keys for claim in first.claims] == [before.keys]
    scheduler.reset_cache()
    [after] = (second := computed(scheduler, request)).saves
    assert [claim.keys for claim in second.claims] == [after.keys]
    assert after.blocks == before.blocks and not set(after.keys) & set(before.keys)


@pytest.mark.parametrize("is_reset", ["giver", "taker"])
def test_an_engine_that_was_reset_and_another_hand_over_nothing(is_reset: str) -> None:
    """Keys of full and partial blocks differ, so that the load fails and the prompt is computed."""
    sides = {"giver": side(FakeIndex()), "taker": side(FakeIndex(giver=0))}
    sides[is_reset].reset_cache()
    given = Request("a1", 2 * BLOCK + 5, kv_transfer_params={"do_remote_decode": True})
    sides["giver"].arrived(given)
    [kept] = computed(sides["giver"], given).keeps
    params = {"do_remote_prefill": True, "remote_engine_id": "giver"}
    taken = Request("a2", 2 * BLOCK + 5, kv_transfer_params=params)
    sides["taker"].allocated(taken, [0, 1, 2], sides["taker"].match(taken, 0))
    [load] = sides["taker"].plan({}, lambda _: None).loads
    assert len(load.keys) == len(kept.keys) == 3
    assert not set(load.keys) & set(kept.keys)


def test_a_prompt_that_was_kept_before_a_reset_is_not_handed_over() -> None:
    scheduler = side(FakeIndex(giver=0))
    given = Request("a", 2 * BLOCK, kv_transfer_params={"do_remote_decode": True})
    scheduler.arrived(given)
    assert computed(scheduler, given).keeps
    params = {"do_remote_prefill": True, "remote_engine_id": "giver"}
    taken = Request("b", 2 * BLOCK, kv_transfer_params=params)
    scheduler.arrived(taken)
    scheduler.reset_cache()
    assert scheduler.match(taken, 0) == 0
    assert scheduler.finished("a") is None


def test_a_step_that_is_padded_for_speculation_hands_its_prompt_over() -> None:
    """vLLM adds places for guessed tokens to a first step with one token of the prompt."""
    scheduler = side(FakeIndex())
    params = {"do_remote_decode": True}
    request = Request("a", 2 * BLOCK + 1, num_computed_tokens=2 * BLOCK, kv_transfer_params=params)
    scheduler.arrived(request)
    plan = scheduler.plan({"a": 4}, lambda _: [0, 1, 2])
    [kept], [save] = plan.keeps, plan.saves
    assert save.keys == kept.keys and save.blocks == [0, 1]
    request.num_computed_tokens = 2 * BLOCK + 1
    assert not scheduler.plan({"a": 4}, lambda _: [0, 1, 2]).keeps, "once"


def test_the_partial_block_of_a_prompt_is_handed_over_from_its_place() -> None:
    """Of a request that was interrupted in its answer, and is computed again in one step."""
    scheduler = side(FakeIndex())
    request = Request("a", 2 * BLOCK + 5, kv_transfer_params={"do_remote_decode": True})
    scheduler.arrived(request)
    request.block_hashes += [b"answer 1", b"answer 2"]
    plan = scheduler.plan({"a": 4 * BLOCK + 1}, lambda _: [5, 6, 7, 8, 9])
    [kept], [save] = plan.keeps, plan.saves
    assert save.keys == kept.keys and save.blocks == [5, 6, 7]
    request.num_computed_tokens = 4 * BLOCK + 1
    [save] = scheduler.plan({"a": 1}, lambda _: [5, 6, 7, 8, 9]).saves
    assert (save.blocks, save.parent) == ([7, 8], kept.keys[1])
