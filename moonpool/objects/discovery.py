"""``moonpool.connect``: the store nodes of a cluster, found through its API or its Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from urllib.parse import urlsplit

from moonpool.client import Client
from moonpool.kvstore.client import StoreClient, Tenant, open_client
from moonpool.kvstore.client.connections import Directory, IndexDirectory, NodeAddress
from moonpool.kvstore.client.errors import BadUrl
from moonpool.kvstore.errors import StoreError
from moonpool.runtime.config.options import TransferOptions


class ApiDirectory:
    """The store nodes that a conductor lists."""

    def __init__(self, url: str, api_key: str) -> None:
        self._client = Client(url, api_key=api_key)

    async def nodes(self) -> list[NodeAddress]:
        return [
            NodeAddress(
                node["node_id"],
                int(node["epoch"]),
                node["rpc_address"],
                node["state"] == "ready",
                node.get("host_id", ""),
            )
            for node in (await self._client.cluster())["nodes"]
            if node["role"] == "store" and node["state"] in ("ready", "unhealthy")
        ]

    async def aclose(self) -> None:
        await self._client.__aexit__(None, None, None)


@asynccontextmanager
async def connect(
    url: str = "http://127.0.0.1:8000",
    *,
    tenant: str = "",
    salt: str = "",
    api_key: str = "",
    namespace: str = "moonpool",
    deadline_s: float = 30.0,
    transfer: TransferOptions | None = None,
) -> AsyncIterator[StoreClient]:
    """Yield a client of a cluster's store nodes. Connects with the first call.

    Args:
        url: the conductor's API (``http://HOST:PORT``), or the index's Redis (``redis://``, ``unix://``)
            with its ``namespace``.
        tenant, salt: objects are isolated by tenant and salt.
        api_key: for the API where keys are configured, of the role read or admin; empty for that in
            ``MOONPOOL_API_KEY``.
        deadline_s: limit on one call or batch of transfers.
        transfer: needed if the nodes are on other machines.

    Raises:
        BadUrl: ``url`` is neither an API nor a Redis.
        ConfigError: that of an API has no host, or an impossible port.
    """
    async with (
        aclosing(_directory(url, namespace, api_key)) as directory,
        open_client(
            directory,
            url,
            tenant=Tenant(tenant, salt),
            deadline_s=deadline_s,
            transfer=transfer or TransferOptions(),
        ) as client,
    ):
        yield client


def _directory(url: str, namespace: str, api_key: str) -> Directory:
    if urlsplit(url).scheme in ("http", "https"):
        return ApiDirectory(url, api_key)
    try:
        return IndexDirectory(url, namespace)
    except (StoreError, ValueError) as error:
        raise BadUrl(url) from error
