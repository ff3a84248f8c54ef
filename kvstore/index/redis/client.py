"""A Redis client for the index, from a URL."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis, Sentinel
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from moonpool.kvstore.errors import StoreError

_DEFAULT_PORT = 6379
_DEFAULT_SENTINEL_PORT = 26379


def connect(url: str) -> Any:
    """Return a client for ``redis://``, ``rediss://`` or ``unix://``; ``redis+cluster://host:port,host:port``
    for a Redis Cluster; ``redis+sentinel://host:port,host:port/service`` for a server watched by Sentinel.
    ``rediss+…``: over TLS. A password is for the data servers.

    It connects with the first command and does not retry: callers do. Close it with ``await
    client.aclose()``.
    """
    # redis-py retries three times on its own, with sleeps, unless told not to.
    options: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "socket_connect_timeout": 2.0}
    scheme = url.partition("://")[0]
    if scheme in ("redis", "rediss", "unix"):
        return Redis.from_url(url, **options)
    if scheme in ("redis+cluster", "rediss+cluster"):
        return _cluster(url, options)
    if scheme in ("redis+sentinel", "rediss+sentinel"):
        return _sentinel(url, options)
    raise StoreError(
        "index.redis_url must start with redis://, rediss://, unix://, redis+cluster:// or "
        f"redis+sentinel://, got {url!r}"
    )


def _cluster(url: str, options: dict[str, Any]) -> Any:
    named = [ClusterNode(host, port or _DEFAULT_PORT) for host, port in _hosts(url)]
    return RedisCluster(startup_nodes=named, **options, **_access(url))


def _sentinel(url: str, options: dict[str, Any]) -> Any:
    service = urlsplit(url).path.strip("/")
    if not service:
        raise StoreError(
            f"a redis+sentinel:// URL must end in the service's name (host:26379/mymaster), got {url!r}"
        )
    sentinels = [(host, port or _DEFAULT_SENTINEL_PORT) for host, port in _hosts(url)]
    sentinel: Any = Sentinel(sentinels, socket_connect_timeout=2.0)  # type: ignore[no-untyped-call]
    return sentinel.master_for(service, **options, **_access(url))


def _hosts(url: str) -> list[tuple[str, int | None]]:
    named = [urlsplit(f"//{host}") for host in urlsplit(url).netloc.rpartition("@")[2].split(",")]
    return [(host.hostname or "", host.port) for host in named]


def _access(url: str) -> dict[str, Any]:
    """Name, password, TLS and options of the query, as redis-py takes them."""
    parts = urlsplit(url)
    scheme = parts.scheme.partition("+")[0]
    # Without hosts and service it is the URL of one server.
    access: dict[str, Any] = dict(
        parse_url(urlunsplit((scheme, parts.netloc.split(",")[0], "", parts.query, "")))
    )
    for name in ("host", "port"):
        access.pop(name, None)
    if access.pop("connection_class", None) is not None:
        access["ssl"] = True
    return access
