"""Run by vLLM's Python: the keys of requests that differ in what tokens do not say, and the hints of one, as
one JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope
from vllm.v1.request import Request

from moonpool.connectors.vllm.parameters.hints import hints_of
from moonpool.connectors.vllm.scheduler import SchedulerSide

BLOCK = 16


class NoIndex:
    def holders(self, keys: Any) -> list[Any]:
        return []

    def in_other_layout(self, own: bytes, name: Any) -> str:
        return ""


def image(identifier: str) -> list[MultiModalFeatureSpec]:
    return [MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(0, BLOCK))]


def keys(name: str, **facts: Any) -> list[str]:
    hasher = get_request_block_hasher(BLOCK, get_hash_fn_by_name("sha256"))
    request = Request(
        name, list(range(3 * BLOCK)), SamplingParams(max_tokens=1), None, block_hasher=hasher, **facts
    )
    scheduler = SchedulerSide("engine", bytes(16), BLOCK, NoIndex())
    scheduler.match(request, 0)
    [save] = scheduler.plan({name: 3 * BLOCK}, lambda _: [0, 1, 2]).saves
    return [key.hex() for key in save.keys]


def hints() -> dict[str, Any]:
    """What is read of an envelope as vLLM hands it on."""
    actions = [
        KvHintAction("1", "kv.pin", "1.0", {"ttl_s": 5}),
        KvHintAction("2", "kv.prefetch", "1.0", {}),
        KvHintAction("3", "kv.drop", "1.0", {"from_token": 32}),
    ]
    envelope = KvHintsEnvelope("1.0", "message", actions)
    request = Request("i", [1, 2, 3], SamplingParams(max_tokens=1), None, kv_hints=envelope)
    return asdict(hints_of(request, print))


init_none_hash(get_hash_fn_by_name("sha256"))
print(
    json.dumps(
        {
            "hints": hints(),
            "plain": keys("a"),
            "plain again": keys("b"),
            "salt x": keys("c", cache_salt="x"),
            "salt y": keys("d", cache_salt="y"),
            "adapter 1": keys("e", lora_request=LoRARequest("one", 1, "/one")),
            "adapter 2": keys("f", lora_request=LoRARequest("two", 2, "/two")),
            "image 1": keys("g", mm_features=image("one")),
            "image 2": keys("h", mm_features=image("two")),
        }
    )
)
