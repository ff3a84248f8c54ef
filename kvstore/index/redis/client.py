"""A Redis client for the index, from a URL."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis, Sentinel
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from moonpool.kvstore.errors import StoreError
from moonpool.runtime.security import process

_DEFAULT_PORT = 6379
_DEFAULT_SENTINEL_PORT = 26379


def connect(url: str) -> Any:
    """Return a client for ``redis://``, ``rediss://`` or ``unix://``; ``redis+cluster://host:port,host:port``
    for a Redis Cluster; ``redis+sentinel://host:port,host:port/service`` for a server watched by Sentinel.
    A password is for the data servers.

    ``rediss…``: over TLS, Sentinels included. The servers' certificates must be of ``security.ca``, and for
    the host in the URL, or the address that Sentinel or Cluster tells; the client shows ``security.cert``.
    Without these options the system's authorities count; options in the URL (``?ssl_ca_certs=``) go first.

    It connects with the first command and does not retry: callers do. Close it with ``await
    client.aclose()``. Raises ``StoreError``.
    """
    # redis-py retries three times on its own, with sleeps, unless told not to.
    options: dict[str, Any] = {"retry": Retry(NoBackoff(), 0), "socket_connect_timeout": 2.0}
    scheme = url.partition("://")[0]
    connectors = {"": _server, "+cluster": _cluster, "+sentinel": _sentinel}
    for ending, connector in connectors.items():
        if scheme in (f"redis{ending}", f"rediss{ending}", *(["unix"] if not ending else [])):
            try:
                return connector(url, options)
            except ValueError as error:
                # Its text may be a part of the password.
                raise StoreError(
                    "index.redis_url is no URL that can be read: write @, / and : in a password as %40, %2F "
                    "and %3A"
                ) from error
    raise StoreError(
        "index.redis_url must start with redis://, rediss://, unix://, redis+cluster:// or "
        f"redis+sentinel://, got {url!r}"
    )


class _FreshTls(SSLConnection):
    """Reads its certificates for each connection: they may have been renewed."""

    def _connection_arguments(self) -> Any:
        self.ssl_context.context = None
        return super()._connection_arguments()


def _server(url: str, options: dict[str, Any]) -> Any:
    has_tls = url.startswith("rediss")
    client = Redis.from_url(url, **options, **(_certificates() if has_tls else {}))
    if has_tls:
        client.connection_pool.connection_class = _FreshTls
    return client


def _cluster(url: str, options: dict[str, Any]) -> Any:
    named = [ClusterNode(host, port or _DEFAULT_PORT) for host, port in _hosts(url)]
    return RedisCluster(startup_nodes=named, **{**options, **_access(url)})


def _sentinel(url: str, options: dict[str, Any]) -> Any:
    service = urlsplit(url).path.strip("/")
    if not service:
        raise StoreError(
            f"a redis+sentinel:// URL must end in the service's name (host:26379/mymaster), got {url!r}"
        )
    sentinels = [(host, port or _DEFAULT_SENTINEL_PORT) for host, port in _hosts(url)]
    access = _access(url)
    tls = {name: value for name, value in access.items() if name.startswith("ssl")}
    sentinel: Any = Sentinel(sentinels, sentinel_kwargs={"socket_connect_timeout": 2.0, **tls})  # type: ignore[no-untyped-call]
    return sentinel.master_for(service, **{**options, **access})


def _certificates() -> dict[str, Any]:
    options = process.current().options
    if not options.cert:
        return {}
    return {"ssl_ca_certs": options.ca, "ssl_certfile": options.cert, "ssl_keyfile": options.key}


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
        access = {"ssl": True, **_certificates(), **access}
    return access
