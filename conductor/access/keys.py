"""API keys and tenants, read from a TOML file.

keys = ["sk-1"]                 # send requests of no tenant
read_keys = ["sk-watch"]        # pages and metrics of the whole cluster
admin_keys = ["sk-ops"]         # everything

[acme]
keys = ["sk-acme-1"]            # send requests; or "sha256:…", so that the file holds no secret
read_keys = ["sk-acme-2"]       # the dashboard, with its own requests only
weight = 2.0                    # share of the cluster where tenants compete
max_requests = 64               # in flight
tokens_per_minute = 200000      # prompt and output
cached_nbytes = "2GiB"          # of KV blocks kept on one node
class = "batch"                 # of requests that do not say; otherwise "interactive"
slo_ttft_s = 2.0                # instead of conductor.slo_ttft_s, for its requests
slo_tbt_s = 0.1                 # instead of conductor.slo_tbt_s
regions = ["eu"]                # its prompts and KV are in these only: docs/regions.md
home_region = "eu"              # where its requests come from, without the header X-Moonpool-Region
"""

from __future__ import annotations

import hashlib
import secrets
import tomllib
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from moonpool.conductor.access.roles import ADMIN, EVERYBODY, INFERENCE, READ, Principal
from moonpool.conductor.admission.tenants import ANYONE, INTERACTIVE, LEAST_WEIGHT, Tenant
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.number_checks import COUNT, DURATION_S, NBYTES

_SHA256 = "sha256:"


class ApiKeys:
    """What each API key stands for.

    Keys are kept as digests under a secret of the cluster: neither memory nor the time of a look-up tells
    anything about them.
    """

    def __init__(self, secret: bytes = b"") -> None:
        """No keys: everybody may do everything. ``secret``: 32 bytes, the same at all conductors of the
        cluster; empty: a new one.
        """
        self._secret = secret or secrets.token_bytes(32)
        self._principals: dict[bytes, Principal] = {}

    @property
    def are_configured(self) -> bool:
        return bool(self._principals)

    def id_of(self, key: str) -> bytes:
        """16 bytes that name a key, and that only conductors of this cluster can compute."""
        # Bytes of a header that are no UTF-8 come as surrogates.
        return self._id(hashlib.sha256(key.encode(errors="surrogateescape")).digest())

    def get(self, key_id: bytes) -> Principal | None:
        """Return what a key stands for; None: there is no such key."""
        return self._principals.get(key_id) if self._principals else EVERYBODY

    @classmethod
    def load(cls, path: str, secret: bytes = b"") -> ApiKeys:
        """Read a file; an empty path: no keys. Raises ``ConfigError`` naming the wrong entry, never a key."""
        keys = cls(secret)
        if not path:
            return keys
        file = _read(path)
        for field, role in _ROLES.items():
            scope = ANYONE if role == INFERENCE else None
            keys._add(getattr(file, field), Principal(role, scope), f"{path}: {field}")
        for name, table in file.tenants.items():
            limits = table.model_dump(exclude={"keys", "read_keys", "regions"})
            tenant = Tenant(name, **limits, regions=frozenset(table.regions))
            keys._add(table.keys, Principal(INFERENCE, tenant), f"{path}: {name}.keys")
            keys._add(table.read_keys, Principal(READ, tenant), f"{path}: {name}.read_keys")
        if not keys.are_configured:
            raise ConfigError(f"{path}: no tenant has a key, so every request would be rejected; add keys")
        return keys

    def _add(self, given: list[str], principal: Principal, where: str) -> None:
        for key in given:
            other = self._principals.setdefault(self._id(_digest(key, where)), principal)
            if other is not principal:
                owner = f"tenant {other.scope!r}" if other.scope else "the cluster"
                raise ConfigError(
                    f"{where}: {owner} has one of these keys too, for the role {other.role}: "
                    "keys must be unique"
                )

    def _id(self, digest: bytes) -> bytes:
        return blake2b(digest, key=self._secret, digest_size=16).digest()


_ROLES: Mapping[str, str] = {"keys": INFERENCE, "read_keys": READ, "admin_keys": ADMIN}


def _as_nbytes(value: object) -> int:
    """A number, or a text like "2GiB"."""
    return int(TypeAdapter(ByteSize).validate_python(value))


_Name = Annotated[str, Field(min_length=1)]
_Keys = list[_Name]


class _Table(BaseModel):
    """One tenant's table of the file, as it is written."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    keys: _Keys = []
    read_keys: _Keys = []
    weight: float = Field(default=1.0, ge=LEAST_WEIGHT, le=1e6)
    max_requests: int = Field(default=0, ge=0)
    tokens_per_minute: int = Field(default=0, ge=0, le=COUNT.high)
    cached_nbytes: Annotated[int, BeforeValidator(_as_nbytes)] = Field(default=0, ge=0, le=NBYTES.high)
    service_class: Literal["interactive", "batch"] = Field(default=INTERACTIVE, alias="class")
    slo_ttft_s: float = Field(default=0.0, ge=0, le=DURATION_S.high)
    slo_tbt_s: float = Field(default=0.0, ge=0, le=DURATION_S.high)
    home_region: str = ""
    # An empty list could mean everywhere or nowhere: it is refused.
    regions: list[_Name] = Field(default=[], min_length=1)


class _File(BaseModel):
    """The file: the cluster's own keys; all else are tables of tenants."""

    model_config = ConfigDict(strict=True)

    keys: _Keys = []
    read_keys: _Keys = []
    admin_keys: _Keys = []
    tenants: dict[_Name, _Table]


def _read(path: str) -> _File:
    try:
        given = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        own = {name: given.pop(name) for name in _ROLES if name in given}
        return _File.model_validate(own | {"tenants": given})
    except OSError as error:
        raise ConfigError(f"conductor.tenants_path: {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        names = [str(name) for name in first["loc"] if name != "tenants"]
        where = ".".join(names)
        if first["type"] == "extra_forbidden":
            known = ", ".join(info.alias or name for name, info in _Table.model_fields.items())
            raise ConfigError(f"{path}: {where}: unknown; known are {known}") from None
        # Not the input where a key may stand: errors are logged.
        given_value = "" if _ROLES.keys() & set(names) or len(names) < 2 else f", got {first['input']!r}"
        raise ConfigError(f"{path}: {where}: {first['msg']}{given_value}") from None


def _digest(key: str, where: str) -> bytes:
    if not key.startswith(_SHA256):
        return hashlib.sha256(key.encode()).digest()
    try:
        digest = bytes.fromhex(key.removeprefix(_SHA256))
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ConfigError(f"{where}: after {_SHA256!r} come 64 hexadecimal digits")
    return digest
