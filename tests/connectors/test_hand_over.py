"""Prompts that one engine computes and another decodes: what is kept, loaded and let go."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.connectors.vllm import engine_node
from moonpool.connectors.vllm.parameters.hand_over import hand_over_of
from moonpool.connectors.vllm.plan import Outcome
from tests.connectors.conftest import Make, Redis
from tests.connectors.small_engine import BLOCK, Peer, Request, SmallEngine, until
from tests.processes import stop

GIVE = {"do_remote_decode": True}


@pytest.fixture(scope="module")
def giver(redis: Redis) -> Iterator[Peer]:
    made = Peer(redis.url, "giver")
    yield made
    made.close()


def knows(engine: SmallEngine, peer: Peer) -> None:
    until(lambda: engine.scheduler._index.address_of(peer.name))


@pytest.mark.parametrize("num_tokens", [2, BLOCK, BLOCK + 1, BLOCK + 2, 3 * BLOCK, 3 * BLOCK + 7])
def test_all_tokens_but_the_last_are_loaded(engine: Make, giver: Peer, num_tokens: int) -> None:
    one = engine("one")
    knows(one, giver)
    name = chr(ord("a") + num_tokens % 26)
    params = giver.give(name, num_tokens)
    assert one.serve(Request("r", num_tokens, name, kv_transfer_params=params)) == num_tokens - 1
    report = one.reports()[0]
    assert (report["source"], report["loaded_tokens"]) == ("giver", num_tokens - 1)
    assert len(one.node._kv.store.host) == num_tokens // BLOCK, "partial blocks are not kept"
    one.node._kv.store.check_integrity()


def test_a_prompt_is_kept_until_it_is_read(
    engine: Make, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that computed it lets its own blocks go at once."""
    monkeypatch.setattr(engine_node, "KEEP_S", 3600.0)
    reader = Peer(redis.url, "reader")
    try:
        one = engine("one")
        one.serve(Request("k", 3 * BLOCK + 5, kv_transfer_params=GIVE))
        assert one.answer == {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "one"}
        store = one.node._kv.store
        until(lambda: store.host.num_pinned == 4)
        reader.take("k", 3 * BLOCK + 5, one.answer)
        until(lambda: not store.host.num_pinned and not one.node._keeping)
        until(lambda: len(store.host) == 3)
        store.check_integrity()
    finally:
        reader.close()


def test_two_loads_of_one_prompt_do_not_remove_each_others_partial_block(
    engine: Make, giver: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, num_tokens = engine("one"), 3 * BLOCK + 5
    knows(one, giver)
    params = giver.give("p", num_tokens)
    first, second = (Request(name, num_tokens, "p", kv_transfer_params=params) for name in ("p1", "p2"))
    pages, copying, gate = one.node._pages, threading.Event(), threading.Event()
    copy_in = pages.copy_in

    def held(*args: Any) -> None:
        copying.set()
        gate.wait(60)
        copy_in(*args)

    monkeypatch.setattr(pages, "copy_in", held)
    one.begin(first)
    assert copying.wait(60)
    stop(giver.pid)
    try:
        one.begin(second)  # what it loads is here, which it asks its giver to keep
        until(lambda: one.node._kv._num_writers)
        gate.set()
        assert one.await_load() == Outcome({"p1"})
    finally:
        os.kill(giver.pid, signal.SIGCONT)
    assert one.await_load() == Outcome({"p2"})
    store = one.node._kv.store
    assert len(store.host) == 3 and not store.host.num_pinned, "partial blocks are not kept"
    store.check_integrity()


def test_a_load_of_a_prompt_that_is_kept_leaves_its_partial_block(
    engine: Make, giver: Peer, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_node, "KEEP_S", 3600.0)
    one, num_tokens = engine("one"), 3 * BLOCK + 5
    knows(one, giver)
    store = one.node._kv.store
    one.serve(Request("q1", num_tokens, kv_transfer_params=GIVE))
    until(lambda: store.host.num_pinned == 4)
    answer = one.answer
    reader = Peer(redis.url, "reader-2")
    try:
        params = giver.give("q", num_tokens)
        assert one.serve(Request("q2", num_tokens, kv_transfer_params=params)) == num_tokens - 1
        assert answer is not None
        reader.take("q", num_tokens, answer)
        until(lambda: len(store.host) == 3 and not store.host.num_pinned and not one.node._keeping)
        store.check_integrity()
    finally:
        reader.close()


def test_the_end_of_a_keep_leaves_the_partial_block_of_a_load(
    engine: Make, giver: Peer, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_node, "KEEP_S", 3600.0)
    one, num_tokens = engine("one", "transfer.deadline_s=60"), 3 * BLOCK + 5
    knows(one, giver)
    store = one.node._kv.store
    one.serve(Request("s1", num_tokens, kv_transfer_params=GIVE))
    until(lambda: store.host.num_pinned == 4)
    answer = one.answer
    params = giver.give("s", num_tokens)
    reader = Peer(redis.url, "reader-3")
    try:
        assert answer is not None
        stop(giver.pid)
        one.begin(Request("s2", num_tokens, kv_transfer_params=params))
        until(lambda: one.node._kv._num_writers)  # what it loads is here, which it asks its giver to keep
        reader.take("s", num_tokens, answer)
        until(lambda: not store.host.num_pinned and not one.node._keeping)
        os.kill(giver.pid, signal.SIGCONT)
        assert one.await_load() == Outcome({"s2"})
        until(lambda: len(store.host) == 3 and not store.host.num_pinned)
        store.check_integrity()
    finally:
        os.kill(giver.pid, signal.SIGCONT)
        reader.close()


def test_a_prompt_that_nobody_reads_is_let_go(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_node, "KEEP_S", 0.5)
    one = engine("one")
    one.serve(Request("l", 3 * BLOCK + 5, kv_transfer_params=GIVE))
    store = one.node._kv.store
    until(lambda: len(store.host) == 4)
    until(lambda: len(store.host) == 3 and not store.host.num_pinned and not one.node._keeping)
    store.check_integrity()


def test_without_its_prefill_engine_a_prompt_is_computed(engine: Make, redis: Redis) -> None:
    dies = Peer(redis.url, "dies-2")
    try:
        one = engine("one", "transfer.deadline_s=2")
        knows(one, dies)
        params = dies.give("m", 3 * BLOCK + 5)
        stop(dies.pid)
        request = Request("m", 3 * BLOCK + 5, kv_transfer_params=params)
        assert one.begin(request) == 3 * BLOCK + 4
        dies.kill()
        one.end_load(request)
        assert one.finish(request) == 0
        assert one.reports()[0]["num_failed"] >= 1
        assert not one.node._kv.store.host.num_pinned
    finally:
        dies.close()


def test_a_node_that_is_not_in_the_index_is_not_asked(engine: Make) -> None:
    one = engine("one")
    params = {"do_remote_prefill": True, "remote_engine_id": "nobody"}
    assert one.serve(Request("n", 3 * BLOCK + 5, kv_transfer_params=params)) == 0


def test_names_of_partial_blocks_differ_with_all_that_forms_them() -> None:
    # Without a full block, no hash of vLLM says anything of salt and adapter.
    def tail(
        name: str = "o", num_tokens: int = 5, fingerprint: bytes = b"f" * 16, **facts: Any
    ) -> bytes | None:
        request = Request(name, num_tokens, **facts)
        return hand_over_of(request, [], fingerprint, BLOCK).tail

    adapter = SimpleNamespace(lora_name="x")
    named = [tail(), tail("p"), tail(num_tokens=6), tail(num_tokens=BLOCK + 5), tail(fingerprint=b"g" * 16)]
    named += [tail(cache_salt="s"), tail(lora_request=adapter)]
    assert None not in named and len(set(named)) == len(named)
    assert tail() == tail()
