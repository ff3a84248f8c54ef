"""Options in which the processes of one cluster must agree, and what follows where they do not."""

from __future__ import annotations

from functools import reduce
from importlib.metadata import version
from typing import Any

from moonpool.runtime.config.options import Config

# What goes wrong between two processes that differ, for a person.
OPTIONS = {
    "engine.block_size": "blocks of one are of no use to the other",
    "engine.kv_dtype": "blocks of one are of no use to the other",
    "index.lease_ttl_s": "a dead node with the longer lease is noticed later than the conductors expect",
    "store.lease_ttl_s": "a peer's blocks are let go while the other still reads them",
    "transfer.checksum": "what the one without checksums reads is not verified",
    "transfer.transports": "a pair goes by the best transport that both offer, which may be a slow one",
    "transfer.secret": "they refuse each other: each transfer between them fails, and is computed instead",
    "transfer.tls": "they refuse each other: each transfer between them fails, and is computed instead",
}
# Of these only whether they are set is told.
_ONLY_WHETHER = {"transfer.secret": "transfer.secret", "transfer.tls": "transfer.tls.cert"}


def agreement_of(config: Config) -> dict[str, Any]:
    """Those of ``OPTIONS`` that are not at their defaults: plain JSON types, no secret among them."""
    default = Config()
    return {key: _value(config, key) for key in OPTIONS if _value(config, key) != _value(default, key)}


def default_of(key: str) -> Any:
    """What a process has that does not tell of ``key``."""
    return _value(Config(), key)


def own_version() -> str:
    return version("moonpool")


def _value(config: Config, key: str) -> Any:
    value = reduce(getattr, _ONLY_WHETHER.get(key, key).split("."), config)
    if key in _ONLY_WHETHER:
        return bool(value)
    return list(value) if isinstance(value, tuple) else value
