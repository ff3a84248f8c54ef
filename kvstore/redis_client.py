"""A Redis client for the index, from a URL."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis, Sentinel
from redis.asyncio.cluster import RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvstore.errors import StoreError

_DEFAULT_SENTINEL_PORT = 26379


def connect(url: str) -> Any:
    """A client for ``redis://``, ``rediss://`` or ``unix://``; ``redis+cluster://host:port`` for a Redis
    Cluster, ``redis+sentinel://host:port,host:port/service`` for a server watched by Sentinel.

    Connects with the first command. Close it with ``await client.aclose()``. It does not retry: the index's
    callers do, and they must know that a connection was lost.
    """
    # redis-py retries three times on its own, with sleeps, unless told not to.
    options: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "socket_connect_timeout": 2.0}
    scheme, _, rest = url.partition("://")
    if scheme in ("redis", "rediss", "unix"):
        return Redis.from_url(url, **options)
    if scheme in ("redis+cluster", "rediss+cluster"):
        return RedisCluster.from_url(f"{scheme.removesuffix('+cluster')}://{rest}", **options)
    if scheme == "redis+sentinel":
        return _sentinel(url, options)
    raise StoreError(
        "index.redis_url must start with redis://, rediss://, unix://, redis+cluster:// or "
        f"redis+sentinel://, got {url!r}"
    )


def _sentinel(url: str, options: dict[str, Any]) -> Any:
    parts = urlsplit(url)
    service = parts.path.strip("/")
    if not service:
        raise StoreError(
            f"a redis+sentinel:// URL ends in the service's name, as in host:26379/mymaster: {url!r}"
        )
    hosts = parts.netloc.rpartition("@")[2].split(",")
    addresses = [urlsplit(f"//{host}") for host in hosts]
    sentinels = [(address.hostname or "", address.port or _DEFAULT_SENTINEL_PORT) for address in addresses]
    credentials = urlsplit(urlunsplit(("redis", parts.netloc.split(",")[0], "", "", "")))
    if credentials.password:
        options |= {"username": credentials.username or None, "password": credentials.password}
    sentinel: Any = Sentinel(sentinels, socket_connect_timeout=2.0)  # type: ignore[no-untyped-call]
    return sentinel.master_for(service, **options)
