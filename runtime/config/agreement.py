"""Options that must be equal in all processes of a cluster."""

from __future__ import annotations

from functools import reduce
from typing import Any

from moonpool.runtime.config.options import Config

_REFUSED = "the processes refuse each other: calls and transfers between them fail"
# Key -> consequence of a difference.
MUST_AGREE = {
    "engine.block_size": "neither process can use the other's blocks",
    "engine.kv_dtype": "neither process can use the other's blocks",
    "engine.weights": "the conductor refuses the node that joins later: its KV is that of another model",
    "index.lease_ttl_s": "conductors notice the death of the node with the longer lease late",
    "transfer.checksum": "the process without checksums does not verify the blocks it reads",
    "transfer.transports": "a pair uses the best transport that both offer, which may be slow",
    "security.cluster_key": _REFUSED,
    "security.cert": _REFUSED,
}
# For these, only whether they are set is published.
_PRESENCE_ONLY = ("security.cluster_key", "security.cert")


def agreement_of(config: Config) -> dict[str, Any]:
    """The options of ``MUST_AGREE`` that differ from their defaults, as JSON types without secrets."""
    default = Config()
    return {key: _value(config, key) for key in MUST_AGREE if _value(config, key) != _value(default, key)}


def default_of(key: str) -> Any:
    """The value of ``key`` in a process that did not publish it."""
    return _value(Config(), key)


def _value(config: Config, key: str) -> Any:
    value = reduce(getattr, key.split("."), config)
    if key in _PRESENCE_ONLY:
        return bool(value)
    return list(value) if isinstance(value, tuple) else value
