"""What an engine of another project says in its record, so that conductors can send it requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moonpool.kvstore.blocks.vllm_keys import HASH_ALGORITHM, VllmChain
from moonpool.kvstore.index.redis.node_record import NodeRecord, RecordCorrupt

VLLM = "vllm"
# The field of ``NodeRecord.extra``.
_FIELD = "serves"


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """``probe``: the engine's own key of a first block of tokens 0, 1, 2, …, to compare ours with."""

    kind: str  # VLLM
    url: str  # of its OpenAI server
    block_size: int  # tokens
    block_nbytes: int
    fingerprint: str  # of its layout, hex
    max_model_len: int
    vocab_size: int
    hash_algorithm: str  # of its block hashes
    none_hash: str  # hex
    probe: str  # a block key, hex

    def chain(self, salt: str = "") -> VllmChain:
        return VllmChain(bytes.fromhex(self.fingerprint), bytes.fromhex(self.none_hash), salt)

    def keys_differ(self) -> str:
        """Why its block keys cannot be computed here, as a sentence; empty: they can."""
        if self.hash_algorithm != HASH_ALGORITHM:
            return (
                f"it hashes blocks with {self.hash_algorithm}: start it with "
                f"--prefix-caching-hash-algo {HASH_ALGORITHM}"
            )
        [key], _ = self.chain().extend(np.arange(self.block_size, dtype=np.int32), self.block_size, None)
        if key.hex() != self.probe:
            return "its block hashes are not those computed here: its version of vLLM hashes otherwise"
        return ""

    def add_to(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        """``NodeRecord.extra`` with these facts."""
        return {**extra, _FIELD: asdict(self)}


def is_engine(record: NodeRecord) -> bool:
    """Whether it is an engine that takes requests, though its facts may not be usable."""
    return record.extra.get(_FIELD) is not None


def facts_of(record: NodeRecord) -> EngineFacts | None:
    """None: it is no engine that takes requests. Raises ``RecordCorrupt``."""
    found = record.extra.get(_FIELD)
    if found is None:
        return None
    try:
        facts = EngineFacts(**found)
        for name in ("block_size", "block_nbytes", "max_model_len", "vocab_size"):
            if not isinstance(getattr(facts, name), int) or getattr(facts, name) <= 0:
                raise ValueError(f"{name} must be a positive whole number")
        if facts.kind != VLLM or not facts.url.startswith(("http://", "https://")):
            raise ValueError(f"an engine of kind {facts.kind!r} at {facts.url!r}")
        if len(bytes.fromhex(facts.fingerprint)) != 16:
            raise ValueError("the fingerprint must have 16 bytes")
        bytes.fromhex(facts.none_hash)
        return facts
    except (TypeError, ValueError, AttributeError) as error:
        raise RecordCorrupt(f"the record of engine {record.node_id} cannot be used: {error}") from error
