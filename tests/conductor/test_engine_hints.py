"""Hints of requests that vLLM engines serve: they go with the request, as the connector reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from moonpool.conductor.observing.scheduling_metrics import cache_hints
from moonpool.conductor.request import CacheHint
from moonpool.connectors.vllm.parameters.hints import Hints, hints_of
from tests.conductor.core_nodes import PROMPT, request, running
from tests.conductor.engine_server import KEY, EngineServer, engines, keys_of
from tests.conductor.test_engine_pairs import GIVEN


@dataclass
class Received:
    """vLLM's request, as far as hints are read of it."""

    kv_transfer_params: dict[str, Any] | None


def read(body: dict[str, Any]) -> Hints:
    ignored: list[str] = []
    found = hints_of(Received(body.get("kv_transfer_params")), ignored.append)
    assert not ignored
    return found


def num_sent() -> float:
    return float(cache_hints.labels("sent")._value.get())


@pytest.mark.parametrize(
    ("hint", "received"),
    [
        (CacheHint(pin_s=30.0, prefetch=True), Hints(pin_s=30.0, prefetch=True)),
        (CacheHint(drop_after=True), Hints(drop_after=True)),
    ],
)
async def test_an_engine_reads_the_hint_of_a_request(url: str, hint: CacheHint, received: Hints) -> None:
    async with running(url, namespace=f"hints-{hint.drop_after}", engine_key=KEY) as cluster:
        engine = EngineServer("e0")
        async with engines(cluster, engine):
            before = num_sent()
            await cluster.events(request("r", cache_hint=hint, max_tokens=2))
            await cluster.events(request("s", cache_hint=CacheHint(), max_tokens=2))
            await cluster.until(lambda: num_sent() == before + 1)
            hinted, plain = engine.bodies
            assert read(hinted) == received
            assert "kv_transfer_params" not in plain


async def test_both_engines_of_a_pair_read_it_and_the_answer_is_copied(url: str) -> None:
    async with running(url, namespace="pair-hints", engine_key=KEY, replicate_nbytes_per_s=0) as cluster:
        prefill, decode = EngineServer("p0", role="prefill"), EngineServer("d0", role="decode")
        async with engines(cluster, prefill, decode):
            hint = CacheHint(pin_s=30.0, prefetch=True)
            tokens = await cluster.generate(request(cache_hint=hint, max_tokens=40))
            await cluster.until(lambda: prefill.copied)
            assert read(prefill.bodies[0]) == Hints(pin_s=30.0, prefetch=True)
            [body] = decode.bodies
            assert read(body) == Hints(pin_s=30.0), "it is handed the prompt"
            assert {name: body["kv_transfer_params"][name] for name in GIVEN} == GIVEN
            [copied] = prefill.copied
            assert (copied.source.node_id, copied.surplus) == ("d0", False)
            assert copied.keys == b"".join(keys_of((PROMPT + tokens)[:-1]))
            assert not decode.copied
