"""The backend's settings, out of SGLang's ``--hicache-storage-backend-extra-config``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.connectors.errors import Unsupported
from moonpool.kvstore.client import Tenant
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError

# Versions of SGLang that this was run with.
VERSIONS = ("0.5.23",)
_KNOWN = ("url", "tenant", "config", "set")
# Read by SGLang itself.
_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
_REDIS = ("redis://", "rediss://", "unix://")


@dataclass(frozen=True, slots=True)
class Settings:
    """``zero_copy``: SGLang gives the backend places in its memory, not copies of pages."""

    config: Config
    tenant: Tenant
    zero_copy: bool


def read_settings(extra: Mapping[str, Any]) -> Settings:
    """Return the settings of the store's client.

    ``extra``: ``url`` (of Redis), ``tenant``, ``config`` (a TOML file), ``set`` (a list of ``KEY=VALUE``) and
    SGLang's own. The tenant's salt is in the environment, ``MOONPOOL_TENANT_SALT``: command lines are no
    place for secrets. Raises ``ConfigError``.
    """
    for key in sorted(extra.keys() - {*_KNOWN, *_SGLANG}):
        raise _wrong(key, f"is not known; known are {', '.join(_KNOWN)}, and SGLang's {', '.join(_SGLANG)}")
    url, sets = str(extra.get("url", "")), list(extra.get("set", ()))
    if url:
        if not url.startswith(_REDIS):
            raise _wrong("url", f"must be that of Redis ({', '.join(_REDIS)}), not of an API")
        sets.append(f"index.redis_url={url}")
    file = extra.get("config")
    config = load_config(Path(file) if file else None, sets)
    if not config.index.redis_url:
        raise _wrong("url", "is missing: the URL of Redis, such as redis://127.0.0.1:6379")
    tenant = Tenant(str(extra.get("tenant", "")), os.environ.get("MOONPOOL_TENANT_SALT", ""))
    return Settings(config, tenant, bool(extra.get("interface_v1", 0)))


def check_version(version: str) -> None:
    """Raises ``Unsupported``: the backend was not run with this version of SGLang."""
    if version not in VERSIONS:
        raise Unsupported(f"SGLang {version} is not supported; these versions are: {', '.join(VERSIONS)}")


def _wrong(key: str, what: str) -> ConfigError:
    return ConfigError(f"hicache_storage_backend_extra_config.{key} {what}", key)
