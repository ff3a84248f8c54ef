"""``moonpool.connect``: the store nodes of a cluster, found through its API or its Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from urllib.parse import urlsplit

from moonpool.client import Client
from moonpool.kvstore.client import StoreClient, Tenant, open_client
from moonpool.kvstore.client.discovery import Directory, IndexDirectory, NodeAddress
from moonpool.kvstore.client.errors import BadUrl
from moonpool.kvstore.errors import StoreError
from moonpool.runtime.config.options import TransferOptions


class ApiDirectory:
    """Asks a conductor."""

    def __init__(self, url: str) -> None:
        self._client = Client(url)

    async def nodes(self) -> list[NodeAddress]:
        return [
            NodeAddress(node["node_id"], int(node["epoch"]), node["rpc_address"], node["state"] == "ready")
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
    namespace: str = "moonpool",
    deadline_s: float = 30.0,
    transfer: TransferOptions | None = None,
) -> AsyncIterator[StoreClient]:
    """A client of the store nodes of a cluster, around the block.

    ``url``: the conductor's API (``http://HOST:PORT``), or the index's Redis (``redis://``, ``unix://``) with
    its ``namespace``. ``tenant`` and ``salt``: objects are found only by those who give the same two.
    ``deadline_s``: longest that one call or batch of transfers may take. ``transfer``: needed where the nodes
    have a ``transfer.secret``, or are on other machines.

    Raises:
        BadUrl: neither an API nor a Redis. Whether anybody answers there shows with the first call.
    """
    async with (
        aclosing(_directory(url, namespace)) as directory,
        open_client(
            directory,
            url,
            tenant=Tenant(tenant, salt),
            deadline_s=deadline_s,
            transfer=transfer or TransferOptions(),
        ) as client,
    ):
        yield client


def _directory(url: str, namespace: str) -> Directory:
    if urlsplit(url).scheme in ("http", "https"):
        return ApiDirectory(url)
    try:
        return IndexDirectory(url, namespace)
    except (StoreError, ValueError) as error:
        raise BadUrl(url) from error
