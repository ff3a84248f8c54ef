"""The roles of API keys, and what each may ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moonpool.conductor.admission.tenants import ANYONE, Tenant

INFERENCE: Final = "inference"
"""Sends requests, and sees those of its tenant."""
READ: Final = "read"
"""Sees pages and figures."""
ADMIN: Final = "admin"
"""Everything, of all tenants."""


@dataclass(frozen=True, slots=True)
class Principal:
    """What an API key, or a session begun with one, stands for."""

    role: str  # empty: no key was given
    tenant: Tenant | None = None  # it sends and sees the tenant's requests; None: it sees all

    @property
    def client(self) -> Tenant:
        """The tenant that its requests belong to."""
        return self.tenant or ANYONE

    @property
    def scope(self) -> str | None:
        """The only tenant with requests that it sees; None: it sees all."""
        return None if self.tenant is None else self.tenant.name

    def __str__(self) -> str:
        """The name in audit lines; empty: not authenticated."""
        return f"{self.role} of {self.scope}" if self.scope else self.role

    def sees(self, tenant: str) -> bool:
        return self.scope is None or self.scope == tenant


NOBODY = Principal("", ANYONE)
EVERYBODY = Principal(ADMIN)
"""Where no keys are configured."""


@dataclass(frozen=True, slots=True)
class Access:
    """``roles``: empty for an endpoint that needs no key. ``tenants`` False: it shows the whole cluster, so
    that keys of a tenant are refused whatever their role. ``administers``: it changes the cluster, so that
    an operator must prove it where no keys are configured, and gets an audit line."""

    roles: frozenset[str] = frozenset()
    tenants: bool = True
    administers: bool = False


OPEN: Final = Access()
KEYED: Final = Access(frozenset({INFERENCE, READ, ADMIN}))
_GENERATION = Access(frozenset({INFERENCE, ADMIN}))
_OVERVIEW = Access(frozenset({READ, ADMIN}))
_CLUSTER = Access(frozenset({READ, ADMIN}), tenants=False)
_ADMIN_ONLY = Access(frozenset({ADMIN}), tenants=False)
_ADMINISTRATION = Access(frozenset({ADMIN}), tenants=False, administers=True)

# By method and route. A route that is missing here is refused to everybody.
PERMITTED: Final = {
    "POST /v1/completions": _GENERATION,
    "POST /v1/chat/completions": _GENERATION,
    "POST /v1/responses": _GENERATION,
    "POST /v1/prefetch": _GENERATION,
    "POST /tokenize": _GENERATION,
    "POST /detokenize": _GENERATION,
    "POST /v1/embeddings": _GENERATION,
    "GET /v1/models": KEYED,
    "GET /v1/models/{name}": KEYED,
    "GET /v1/requests": KEYED,
    "GET /v1/usage": KEYED,
    "GET /v1/requests/{id}/timeline": KEYED,
    "POST /v1/requests/{id}/migrate": _ADMIN_ONLY,
    "GET /v1/session": KEYED,
    "GET /openapi.json": KEYED,
    "GET /": _OVERVIEW,
    "GET /static/{name}": _OVERVIEW,
    "GET /v1/live": _OVERVIEW,
    "GET /v1/about": _OVERVIEW,
    "GET /v1/report": _ADMIN_ONLY,
    "GET /v1/benchmarks": _OVERVIEW,
    "GET /v1/benchmarks/{name}": _OVERVIEW,
    "GET /v1/cluster": _CLUSTER,
    "GET /v1/cell": _CLUSTER,
    "GET /v1/cell/prefixes": _CLUSTER,
    "POST /v1/cell/prefixes": _CLUSTER,  # what is sent has the cluster's seal
    "POST /v1/load_lora_adapter": _ADMINISTRATION,
    "POST /v1/unload_lora_adapter": _ADMINISTRATION,
    "GET /v1/fleet": _CLUSTER,
    "POST /v1/fleet/scale/{role}/{count}": _ADMINISTRATION,
    "POST /v1/fleet/switch/{node}/{role}": _ADMINISTRATION,
    "POST /v1/fleet/switch/{node}/model/{name}": _ADMINISTRATION,
    "POST /v1/fleet/drain/{node}": _ADMINISTRATION,
    "GET /v1/fleet/rollout": _CLUSTER,
    "POST /v1/fleet/rollout": _ADMINISTRATION,
    "POST /v1/fleet/rollout/abort": _ADMINISTRATION,
    "GET /v1/fleet/canary": _CLUSTER,
    "POST /v1/fleet/canary/{name}/start/{candidate}/{share}": _ADMINISTRATION,
    "POST /v1/fleet/canary/{name}/share/{share}": _ADMINISTRATION,
    "POST /v1/fleet/canary/{name}/promote": _ADMINISTRATION,
    "POST /v1/fleet/canary/{name}/rollback": _ADMINISTRATION,
    "GET /v1/prometheus-targets": _CLUSTER,
    "GET /metrics": _CLUSTER,
    "GET /v1/index/{node}": _ADMIN_ONLY,
    "GET /healthz": OPEN,
    "GET /readyz": OPEN,
    "GET /sign-in": OPEN,
    "POST /sign-in": OPEN,
    "POST /sign-out": OPEN,
}
