"""Hints of requests: which are understood, and what they do to the blocks in the store."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from moonpool.connectors.vllm.parameters.hints import NO_HINTS, Hints, hints_of
from moonpool.kvstore.blocks.keys import BlockKey
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.blocks.vllm_keys import key_of
from tests.connectors.conftest import Make, Redis
from tests.connectors.small_engine import BLOCK, Peer, Request, SmallEngine, until


def hinted(request_id: str, num_blocks: int, name: str = "", **hint: Any) -> Request:
    return Request(request_id, num_blocks * BLOCK + 1, name, kv_transfer_params={"cache_hint": hint})


def count(action: str, end: str) -> float:
    labels = {"action": action, "end": end}
    return REGISTRY.get_sample_value("moonpool_connector_hints_total", labels) or 0.0


def held(engine: SmallEngine) -> int:
    return len(engine.node._kv.store.host)


def keys_of(engine: SmallEngine, name: str, num_blocks: int) -> list[BlockKey]:
    fingerprint = engine.scheduler._fingerprint
    return [key_of(fingerprint, each) for each in Request(name, num_blocks * BLOCK).block_hashes]


def until_known(engine: SmallEngine, keys: list[BlockKey]) -> None:
    until(lambda: [one.num_blocks for one in engine.scheduler._index.holders(keys)] == [len(keys)])


def envelope(*actions: tuple[str, str, dict[str, Any]]) -> Any:
    """As vLLM's ``KvHintsEnvelope``."""
    made = [
        SimpleNamespace(action_id="1", action_type=kind, action_version=version, payload=payload)
        for kind, version, payload in actions
    ]
    return SimpleNamespace(protocol_version="1.0", message_id="m", actions=made)


def test_both_forms_are_read() -> None:
    ignored: list[str] = []
    assert hints_of(hinted("z", 1, drop_after=True), ignored.append) == Hints(drop_after=True)
    by_http = hinted("a", 1, pin_s=5, prefetch=True, drop_from=32)
    actions = (
        ("kv.pin", "1.0", {"ttl_s": 5}),
        ("kv.prefetch", "1.2", {}),
        ("kv.drop", "1", {"from_token": 32}),
    )
    by_envelope = Request("b", BLOCK, kv_hints=envelope(*actions))
    expected = Hints(pin_s=5, prefetch=True, drop_from=32)
    assert hints_of(by_http, ignored.append) == hints_of(by_envelope, ignored.append) == expected
    whole = Request("c", BLOCK, kv_hints=envelope(("kv.drop", "1.0", {})))
    assert hints_of(whole, ignored.append) == Hints(drop_from=0)
    assert hints_of(Request("d", BLOCK), ignored.append) is NO_HINTS
    assert not ignored


@pytest.mark.parametrize(
    "hint",
    [
        "pin",
        {"pin": 3},
        {"pin_s": -1.0},
        {"pin_s": True},
        {"pin_s": float("nan")},
        {"pin_s": "3"},
        {"prefetch": 1},
        {"drop_after": 1},
        {"drop_from": 1.5},
        {"drop_from": -1},
        {"drop_from": None},
    ],
)
def test_what_cannot_be_read_is_ignored_and_told(hint: Any) -> None:
    ignored: list[str] = []
    request = Request("a", BLOCK, kv_transfer_params={"cache_hint": hint})
    assert hints_of(request, ignored.append) is NO_HINTS
    assert len(ignored) == 1


@pytest.mark.parametrize(
    "action",
    [("kv.pin", "2.0", {"ttl_s": 1}), ("kv.pin", "1.0", {}), ("kv.fetch", "1.0", {}), ("x" * 9999, "1", {})],
)
def test_actions_of_other_versions_are_ignored(action: tuple[str, str, dict[str, Any]]) -> None:
    ignored: list[str] = []
    assert hints_of(Request("a", BLOCK, kv_hints=envelope(action)), ignored.append) is NO_HINTS
    assert len(ignored) == 1 and len(ignored[0]) < 200


def test_a_pinned_prompt_outlives_others(engine: Make) -> None:
    """Host memory has room for 128 blocks."""
    one = engine("pins", "store.lease_ttl_s=3600")
    before = count("pin", "done")
    one.serve(hinted("p", 20, pin_s=3600))
    until(lambda: count("pin", "done") == before + 1)
    store = one.node._kv.store
    assert store.host.num_pinned == 20
    for number in range(8):
        one.serve(Request(f"{chr(ord('a') + number)}-other", 40 * BLOCK + 1))
    assert len(store.match(keys_of(one, "p", 20))) == 20
    # The next turn's pin takes the place of this one.
    one.serve(hinted("p-2", 30, pin_s=3600))
    until(lambda: count("pin", "done") == before + 2)
    assert (store.host.num_pinned, len(store.grants)) == (30, 1)
    refused = count("pin", "refused")
    one.serve(hinted("q", 50, pin_s=3600))
    until(lambda: count("pin", "refused") == refused + 1)
    assert store.host.num_pinned == 30, "hints pin half of host memory at most"


def test_a_pin_ends_with_the_longest_lease(engine: Make) -> None:
    one = engine("lapses", "store.lease_ttl_s=0.2")
    before = count("pin", "done")
    one.serve(hinted("r", 10, pin_s=1e9))
    until(lambda: count("pin", "done") == before + 1)
    store = one.node._kv.store
    until(lambda: not store.host.num_pinned and not len(store.grants))


def test_a_dropped_prompt_leaves_its_beginning(engine: Make, tmp_path: Path) -> None:
    one = engine(
        "drops",
        f"store.ssd.path={tmp_path}",
        "store.ssd.capacity_nbytes=8MiB",
        "store.write_policy=write-through",
    )
    before = count("drop", "done")
    one.serve(Request("s", 10 * BLOCK + 1))
    one.until_hit("s", 10)
    until(lambda: len(one.node._kv.store.disk) == 10)  # a block that is being written comes back
    one.serve(hinted("s-2", 12, drop_from=3 * BLOCK + 1))
    until(lambda: count("drop", "done") == before + 1)
    store = one.node._kv.store
    assert len(store.match(keys_of(one, "s", 12))) == 4, "the block with token 48 has tokens before it"


def test_what_a_prompt_does_not_share_goes_first(engine: Make) -> None:
    """Host memory has room for 128 blocks."""
    one = engine("lets-go")
    one.until_hit("t", 10)
    before = count("let_go", "done")
    one.serve(hinted("t-2", 30, drop_after=True))
    until(lambda: count("let_go", "done") == before + 1)
    store, keys = one.node._kv.store, keys_of(one, "t", 30)
    store.host.check_integrity()

    def held_of(name: str, num_blocks: int) -> int:
        return len(store.match(keys_of(one, name, num_blocks)))

    for name in ("u", "v"):
        one.serve(Request(name, 45 * BLOCK + 1))
        until(lambda name=name: held_of(name, 45) == 45)
    assert len(store.match(keys)) == 30, "nothing goes while there is room"
    one.serve(hinted("t-3", 30))
    one.serve(hinted("t-4", 32, drop_after=True))
    until(lambda: count("let_go", "done") == before + 2)
    one.serve(Request("w", 20 * BLOCK + 1))
    until(lambda: held_of("w", 20) == 20)
    assert (held_of("u", 45), held_of("v", 45), held_of("t", 32)) == (45, 45, 18), "of the latest prompt"


def test_a_waiting_prompt_is_fetched_from_disk(engine: Make, tmp_path: Path) -> None:
    sets = f"store.ssd.path={tmp_path}", "store.ssd.capacity_nbytes=8MiB", "store.write_policy=write-through"
    one = engine("disk", *sets)
    one.until_hit("w", 10)
    store = one.node._kv.store
    until(lambda: len(store.disk) == 10)
    one.close()
    two = engine("disk", *sets)
    request = hinted("w-2", 10, prefetch=True)
    keys = keys_of(two, "w", 10)
    until_known(two, keys)
    before = count("prefetch", "done")
    two.scheduler.arrived(request)
    two._step({})  # it still waits for its turn
    until(lambda: count("prefetch", "done") == before + 1)
    assert two.node._kv.store.match(keys) == [Tier.HOST] * 10
    assert two.serve(request) == 10 * BLOCK


def test_a_waiting_prompt_is_fetched_from_a_peer(engine: Make, redis: Redis) -> None:
    peer = Peer(redis.url, "has-it")
    try:
        peer.hold("x", 10)
        one = engine("fetches")
        until_known(one, keys_of(one, "x", 10))
        ends = ("done", "missing", "refused", "failed")
        before = count("prefetch", "done")
        for number in itertools.count(2):  # on a busy machine a fetch may fail, as a hint may
            ended = sum(count("prefetch", end) for end in ends)
            one.scheduler.arrived(hinted(f"x-{number}", 10, prefetch=True))
            one._step({})
            until(lambda ended=ended: sum(count("prefetch", end) for end in ends) > ended)
            if count("prefetch", "done") > before:
                break
        assert held(one) == 10
    finally:
        peer.close()
