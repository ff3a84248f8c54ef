"""Tenants of a cluster, their API keys, limits and weights, read from a TOML file.

[acme]
keys = ["sk-acme-1"]            # or "sha256:…", so that the file holds no secret
weight = 2.0                    # share of the cluster where tenants compete
max_requests = 64               # in flight
tokens_per_minute = 200000      # prompt and output
cached_nbytes = "2GiB"          # of KV blocks kept on one node
class = "batch"                 # of requests that do not say; otherwise "interactive"
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from moonpool.runtime.errors import ConfigError
from moonpool.runtime.number_checks import COUNT, NBYTES

INTERACTIVE: Literal["interactive"] = "interactive"
BATCH: Literal["batch"] = "batch"

LEAST_WEIGHT = 1e-6
_DIGEST = "sha256:"


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant's limits. The default, without limits, is used where no tenants are configured."""

    name: str = ""
    weight: float = 1.0
    max_requests: int = 0  # 0: any number
    tokens_per_minute: int = 0  # 0: any number
    cached_nbytes: int = 0  # 0: as much as eviction leaves
    service_class: Literal["interactive", "batch"] = INTERACTIVE

    def salt(self, cache_salt: str) -> str:
        """The salt of its block keys: prefixes are shared within one salt only."""
        # With the length, ("a", "b/c") and ("a/b", "c") differ.
        return f"{len(self.name)}:{self.name}/{cache_salt}" if self.name else cache_salt


ANYONE = Tenant()


class Tenants:
    """Tenants by their API keys."""

    def __init__(self, by_digest: Mapping[bytes, Tenant] | None = None) -> None:
        """``by_digest``: SHA-256 of a key -> its tenant; None: no key is required."""
        self._by_digest = by_digest

    @property
    def all(self) -> list[Tenant]:
        """Each tenant once; empty: no key is required."""
        return list({tenant.name: tenant for tenant in (self._by_digest or {}).values()}.values())

    def of(self, authorization: str) -> Tenant | None:
        """Return the tenant that owns the API key of an ``Authorization`` header, or None."""
        if self._by_digest is None:
            return ANYONE
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        # By digest, so that the time of the look-up says nothing about the keys.
        return self._by_digest.get(hashlib.sha256(key.strip().encode()).digest())

    @classmethod
    def load(cls, path: str) -> Tenants:
        """Read a file; an empty path: no key is required. Raises ``ConfigError`` naming the wrong entry."""
        if not path:
            return cls()
        by_digest: dict[bytes, Tenant] = {}
        for name, table in _read(path).items():
            where = f"{path}: {name}.keys"
            tenant = Tenant(name, **table.model_dump(exclude={"keys"}))
            for key in table.keys:
                if (other := by_digest.setdefault(_digest(key, where), tenant)) is not tenant:
                    raise ConfigError(
                        f"{where}: tenant {other.name!r} has one of these keys too; keys must be unique"
                    )
        if not by_digest:
            raise ConfigError(f"{path}: no tenant has a key, so every request would be rejected; add keys")
        return cls(by_digest)


def _as_nbytes(value: object) -> int:
    """A number, or a text like "2GiB"."""
    return int(TypeAdapter(ByteSize).validate_python(value))


class _Table(BaseModel):
    """One table of the file, as it is written."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    keys: list[Annotated[str, Field(min_length=1)]]
    weight: float = Field(default=1.0, ge=LEAST_WEIGHT, le=1e6)
    max_requests: int = Field(default=0, ge=0)
    tokens_per_minute: int = Field(default=0, ge=0, le=COUNT.high)
    cached_nbytes: Annotated[int, BeforeValidator(_as_nbytes)] = Field(default=0, ge=0, le=NBYTES.high)
    service_class: Literal["interactive", "batch"] = Field(default=INTERACTIVE, alias="class")


_FILE = TypeAdapter(dict[str, _Table])


def _read(path: str) -> dict[str, _Table]:
    try:
        return _FILE.validate_python(tomllib.loads(Path(path).read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"conductor.tenants_path: {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            known = ", ".join(info.alias or name for name, info in _Table.model_fields.items())
            raise ConfigError(f"{path}: {where}: unknown; known are {known}") from error
        raise ConfigError(f"{path}: {where}: {first['msg']}, got {first['input']!r}") from error


def _digest(key: str, where: str) -> bytes:
    if not key.startswith(_DIGEST):
        return hashlib.sha256(key.encode()).digest()
    try:
        digest = bytes.fromhex(key.removeprefix(_DIGEST))
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ConfigError(f"{where}: after {_DIGEST!r} come 64 hexadecimal digits")
    return digest
