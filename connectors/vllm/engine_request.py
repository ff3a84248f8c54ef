"""A request as vLLM hands it to the connector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class EngineRequest(Protocol):
    """What is read of vLLM's ``Request``. ``block_hashes``: of its full blocks so far, chained."""

    request_id: str
    num_prompt_tokens: int
    num_computed_tokens: int
    all_token_ids: Sequence[int]
    block_hashes: Sequence[bytes]
    cache_salt: str | None
    lora_request: object | None
    kv_transfer_params: Mapping[str, Any] | None
