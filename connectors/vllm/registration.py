"""The entry in the index by which conductors find the engine's OpenAI server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moonpool.kvstore.blocks.layout import OpaqueLayout
from moonpool.kvstore.blocks.vllm_keys import key_of
from moonpool.kvstore.index.redis.engine_facts import VLLM, EngineFacts
from moonpool.kvstore.index.redis.node_record import ROLES, STAGES, NodeRecord
from moonpool.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Registration:
    """``facts`` without ``block_nbytes``, which is known once vLLM has allocated its memory."""

    role: str
    model: str  # its name
    facts: EngineFacts

    def of(self, record: NodeRecord, layout: OpaqueLayout) -> NodeRecord:
        """The record with what conductors need to know."""
        facts = replace(self.facts, block_nbytes=layout.block_nbytes)
        return replace(
            record,
            role=self.role,
            stages=STAGES,
            model=f"{self.model}@{facts.fingerprint[:12]}",
            layout=facts.fingerprint,
            extra=facts.add_to(record.extra),
        )


def registration_of(
    extra: Mapping[str, Any], vllm_config: Any, fingerprint: bytes, block_size: int
) -> Registration | None:
    """Read ``server`` (the URL of the OpenAI server) and ``role`` of ``kv_connector_extra_config``.

    None: there is no ``server``; conductors then send no requests. Raises ``ConfigError``.
    """
    url, role = str(extra.get("server", "")), str(extra.get("role", "both"))
    if role not in ROLES:
        raise ConfigError(
            f"kv_connector_extra_config.role must be one of {', '.join(ROLES)}, got {role}", "role"
        )
    if not url:
        return None
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"kv_connector_extra_config.server must be an http URL, got {url}", "server")
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import hash_block_tokens, resolve_none_hash_seed

    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    hash_of = get_hash_fn_by_name(algorithm)
    none_hash = hash_of(resolve_none_hash_seed(hash_of))
    probe = hash_block_tokens(hash_of, none_hash, range(block_size), None)
    model = vllm_config.model_config
    facts = EngineFacts(
        VLLM,
        url,
        block_size=block_size,
        block_nbytes=0,
        fingerprint=fingerprint.hex(),
        max_model_len=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        hash_algorithm=algorithm,
        none_hash=none_hash.hex(),
        probe=key_of(fingerprint, probe).hex(),
    )
    return Registration(role, Path(str(model.model)).name, facts)
