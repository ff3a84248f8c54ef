"""The settings of a cluster's index, asked of a conductor when the engine starts."""

from __future__ import annotations

import http.client
import json
import os
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from moonpool.runtime.config.options import IndexOptions
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.network.sockets import loopback_only
from moonpool.runtime.redaction import HIDDEN
from moonpool.runtime.security.https import client_context
from moonpool.runtime.security.process import of_client

_TIMEOUT_S = 10.0
_PATH = "/v1/about"


def index_of(url: str, api_key: str, security: SecurityOptions, own: IndexOptions) -> IndexOptions:
    """Return ``own`` with Redis, namespace and lease of the conductor at ``url``.

    A conductor tells its options without secrets, so a Redis with a password is not found this way. It is
    asked with ``api_key``, or that in ``MOONPOOL_API_KEY``; without either, one on this machine is asked with
    the cluster's key. Raises ``ConfigError``: no answer, a refusal, or a Redis that this engine cannot use.
    """
    url = url.rstrip("/").removesuffix("/v1")
    told = {row["key"]: row["value"] for row in _ask(url, api_key, security)["options"]}
    redis_url = str(told.get("index.redis_url", ""))
    if HIDDEN in redis_url:
        raise _wrong(
            f"{url} uses a Redis with a password, which no conductor tells: give Redis's own URL instead, "
            "with the user and password of a node (`moonpool index acl`)"
        )
    redis = urlsplit(redis_url)
    if not _is_here(url) and (redis.scheme == "unix" or loopback_only(redis.hostname or "")):
        raise _wrong(
            f"{url} uses a Redis that only its own machine reaches ({redis_url}): start it with --redis"
        )
    return replace(
        own,
        redis_url=redis_url,
        namespace=str(told.get("index.namespace", own.namespace)),
        lease_ttl_s=float(told.get("index.lease_ttl_s", own.lease_ttl_s)),
    )


def _is_here(url: str) -> bool:
    return loopback_only(urlsplit(url).hostname or "")


def _ask(url: str, api_key: str, security: SecurityOptions) -> dict[str, Any]:
    """One request: no proxy and no redirection sees the key."""
    parts = urlsplit(url)
    host, path = parts.hostname or "", f"{parts.path}{_PATH}"
    connection = http.client.HTTPConnection(host, parts.port, timeout=_TIMEOUT_S)
    if parts.scheme == "https":
        tls = client_context(security.ca)
        connection = http.client.HTTPSConnection(host, parts.port, timeout=_TIMEOUT_S, context=tls)
    try:
        connection.request("GET", path, headers=_authorization(url, path, api_key, security))
        reply = connection.getresponse()
        body = reply.read()
    except (OSError, http.client.HTTPException) as error:
        raise _wrong(f"{url} does not answer: {error}") from error
    finally:
        connection.close()
    if reply.status != http.HTTPStatus.OK:
        hint = "; set api_key to one that may read" if reply.status in (401, 403) else ""
        raise _wrong(f"{url}{_PATH} answered {reply.status} {reply.reason}{hint}")
    try:
        answer: dict[str, Any] = json.loads(body)
        if isinstance(answer["options"], list):
            return answer
    except (ValueError, TypeError, KeyError):
        pass
    raise _wrong(f"{url}{_PATH} is not that of a conductor")


def _authorization(url: str, path: str, api_key: str, security: SecurityOptions) -> dict[str, str]:
    if key := api_key or os.environ.get("MOONPOOL_API_KEY", ""):
        return {"Authorization": f"Bearer {key}"}
    # To no other machine: a token is enough to guess weak cluster keys.
    token = of_client(security).token(f"GET {path}") if _is_here(url) else ""
    return {"Authorization": f"Moonpool {token}"} if token else {}


def _wrong(what: str) -> ConfigError:
    return ConfigError(f"kv_connector_extra_config.url: {what}", "url")
