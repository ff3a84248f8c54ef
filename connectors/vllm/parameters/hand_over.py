"""A prompt that one engine computes and another decodes: vLLM's parameters for it, and its blocks' names.

The parameters are those of vLLM's own connectors, so routers that serve these can serve ours: the request to
the prefill engine has ``do_remote_decode``, its answer has what the request to the decode engine must have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from moonpool.connectors.vllm.engine_request import EngineRequest
from moonpool.kvstore.blocks.keys import KEY_NBYTES, BlockKey

_GIVE, _TAKE, _SOURCE = "do_remote_decode", "do_remote_prefill", "remote_engine_id"


@dataclass(frozen=True, slots=True)
class HandOver:
    """``keys``: a prompt's blocks, to be kept for its decode engine; ``tail``: the last one, if it is partial
    and serves nothing else."""

    keys: list[BlockKey]
    tail: BlockKey | None


def gives(request: EngineRequest) -> bool:
    """Whether another engine will decode it."""
    return bool((request.kv_transfer_params or {}).get(_GIVE))


def source_of(request: EngineRequest) -> str:
    """The node of the engine that has computed the prompt; empty: none has."""
    params = request.kv_transfer_params or {}
    return str(params.get(_SOURCE) or "") if params.get(_TAKE) else ""


def answer_of(node_id: str) -> dict[str, Any]:
    """What the decode engine must be sent. Addresses and keys are not in it: that engine looks the node up in
    the index and computes the keys, so a client can name no other memory."""
    return {_TAKE: True, _GIVE: False, _SOURCE: node_id}


def hand_over_of(
    request: EngineRequest, full: Sequence[BlockKey], fingerprint: bytes, block_size: int
) -> HandOver:
    """The blocks of all prompt tokens but the last, which the decode engine computes for its logits.

    ``full``: keys of the prompt's full blocks.
    """
    num_tokens = request.num_prompt_tokens
    num_needed = -(-(num_tokens - 1) // block_size)
    num_full = num_tokens // block_size
    keys = list(full[: min(num_needed, num_full)])
    if num_needed <= num_full or _is_more_than_tokens(request):
        return HandOver(keys, None)
    parent = request.block_hashes[num_full - 1].hex() if num_full else ""
    adapter = str(getattr(request.lora_request, "lora_name", ""))
    tokens = list(request.all_token_ids[num_full * block_size : num_tokens])
    named = repr((fingerprint, parent, tokens, request.cache_salt, adapter))
    tail = BlockKey(blake2b(named.encode(), digest_size=KEY_NBYTES, person=b"moonpool-tail").digest())
    return HandOver([*keys, tail], tail)


def _is_more_than_tokens(request: EngineRequest) -> bool:
    """Images and embeddings are not in the token ids, so these would not name a partial block."""
    return bool(getattr(request, "mm_features", None)) or getattr(request, "prompt_embeds", None) is not None
