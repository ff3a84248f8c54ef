"""The tenant of a request, as the router in front of the engine names it."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.connectors.vllm.engine_request import EngineRequest

_NAME, _CACHED = "tenant", "tenant_cached_nbytes"
_MOST_CHARS = 256
_MOST_NBYTES = 1 << 62


@dataclass(frozen=True, slots=True)
class Tenant:
    name: str
    cached_nbytes: int  # most that this engine's store keeps of its blocks; 0: no limit


def tenant_of(request: EngineRequest) -> Tenant | None:
    """Read ``tenant`` and ``tenant_cached_nbytes`` of its parameters; None: there is none, or they are no
    name and whole number."""
    params = request.kv_transfer_params or {}
    name, cached_nbytes = params.get(_NAME), params.get(_CACHED, 0)
    if not isinstance(name, str) or not 0 < len(name) <= _MOST_CHARS:
        return None
    if type(cached_nbytes) is not int or not 0 <= cached_nbytes <= _MOST_NBYTES:
        return None
    return Tenant(name, cached_nbytes)
