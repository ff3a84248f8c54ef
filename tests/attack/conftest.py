"""Two clusters under attack: one of a cluster key, one of certificates."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest

from moonpool.local.cluster import LocalCluster
from moonpool.runtime import rpc
from moonpool.runtime.config.options import SecurityOptions
from moonpool.runtime.security import certificates, process
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from tests.cluster.conftest import eventually, small_config
from tests.shared_cluster import running

KEY = "the key of the attacked cluster"
TENANTS = {"acme": "sk-acme-0123456789", "globex": "sk-globex-0123456789"}
WATCH = "sk-watch-0123456789"  # reads figures of the whole cluster
PROMPT = "The secret of the harbour is "


@dataclass
class Target:
    """A running cluster, and what an attacker needs to know of it."""

    cluster: LocalCluster
    authority: Path | None  # of its certificates; None: it has a cluster key

    @property
    def has_tls(self) -> bool:
        return self.authority is not None

    def proof(self, role: str, days: int = 1) -> SecurityOptions:
        """What a process of this role has. days: 0: its certificate has expired."""
        if self.authority is None:
            return SecurityOptions(cluster_key=KEY)
        return replace(issued(self.authority, role, days), cluster_key=KEY)

    def channel(self, address: str, proof: SecurityOptions, role: str) -> grpc.aio.Channel:
        return channel_as(address, proof, role)

    async def rpc_addresses(self) -> dict[str, str]:
        """Every gRPC port: of the nodes, and the conductor's own."""
        found: dict[str, str] = {}

        async def all_are_known() -> bool:
            async with self.http() as http, http.get("/v1/cluster", headers=bearer()) as answer:
                cluster = await answer.json()
            found.update({node["node_id"]: str(node["rpc_address"]) for node in cluster["nodes"]})
            found["conductor"] = cluster["facts"]["peer_address"]
            return len(cluster["nodes"]) == len(self.cluster.nodes)

        # While a busy machine has a node's lease lapse, the conductor does not know it.
        await eventually(all_are_known)
        return found

    def http(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(ssl=self.trust or True)
        return aiohttp.ClientSession(self.cluster.url, trust_env=False, connector=connector)

    @property
    def trust(self) -> ssl.SSLContext | None:
        """What a client of the API trusts; None: it speaks no TLS."""
        return ssl.create_default_context(cafile=self.authority / "ca.pem") if self.authority else None

    async def serves(self) -> None:
        """A completion of each tenant arrives whole, through every node that it needs."""
        async with self.http() as http:
            for tenant in TENANTS:
                body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
                async with http.post("/v1/completions", json=body, headers=bearer(tenant)) as answer:
                    assert answer.status == 200, await answer.text()
                    assert (await answer.json())["usage"]["completion_tokens"] == 4
        assert all(child.returncode is None for child in self.cluster.children.values())

    def lines(self) -> list[dict[str, Any]]:
        """All audit lines of all processes."""
        folder = Path(self.cluster.config.audit.path)
        files = sorted(folder.glob("audit-*.jsonl"))
        # A line is being written perhaps.
        whole = [file.read_text().rpartition("\n")[0] for file in files]
        return [json.loads(line) for text in whole for line in text.splitlines()]

    def has_logged(self, **wanted: str) -> bool:
        """Whether there is an audit line with these texts in its fields."""
        return any(
            all(text in str(line.get(name, "")) for name, text in wanted.items()) for line in self.lines()
        )

    async def logged(self, **wanted: str) -> None:
        """Wait for an audit line with these texts in its fields."""

        async def found() -> bool:
            return self.has_logged(**wanted)

        await eventually(found)


def bearer(tenant: str = "") -> dict[str, str]:
    """The header of a tenant's key; without a tenant that of ``WATCH``."""
    return {"Authorization": f"Bearer {TENANTS.get(tenant, WATCH)}"}


def issued(authority: Path, role: str, days: int = 1) -> SecurityOptions:
    """A certificate of this role, the same each time. days: 0: it has expired."""
    owner = Caller(role, f"{role}-{days}")
    file = certificates.file_of(authority, owner)
    if not file.exists():
        # Its conductor is reached at this address; the others do not mind.
        certificates.issue(authority, owner, days=days, addresses=["127.0.0.1"])
    return SecurityOptions(cert=str(file), key=str(file.with_suffix(".key")), ca=str(authority / "ca.pem"))


def channel_as(address: str, proof: SecurityOptions, role: str) -> grpc.aio.Channel:
    before = process.current()
    process.use(Security(proof, Caller(role, "an attacker"), serves=False))
    try:
        return rpc.channel(address)
    finally:
        process.use(before)


def _cluster(directory: Path, authority: Path | None) -> LocalCluster:
    config = small_config()
    tenants = directory / "tenants.toml"
    tenants.write_text(
        f'read_keys = ["{WATCH}"]\n'
        + "".join(f'[{name}]\nkeys = ["{key}"]\n' for name, key in TENANTS.items())
    )
    nodes: tuple[str, ...] = ()
    proof = SecurityOptions(cluster_key=KEY)
    if authority is not None:
        certificates.init(authority, days=1)
        proof, node = replace(issued(authority, "conductor"), cluster_key=KEY), issued(authority, "node")
        nodes = (f"security.cert={node.cert}", f"security.key={node.key}")
    counts = replace(
        config.cluster,
        prefill=1,
        decode=1,
        store=0 if authority else 1,
        prefill_options=nodes,
        decode_options=nodes,
    )
    config = replace(
        config,
        conductor=replace(config.conductor, tenants_path=str(tenants)),
        cluster=counts,
        security=proof,
        transfer=replace(config.transfer, transports=("shm", "tcp")),
    )
    return LocalCluster(config, directory=directory)


@pytest.fixture(scope="session")
def by_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("attacked")
    with running(lambda: _cluster(directory, None)) as cluster:
        yield Target(cluster, None)


@pytest.fixture(scope="session")
def by_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    directory = tmp_path_factory.mktemp("attacked")
    authority = directory / "certs"
    with running(lambda: _cluster(directory, authority)) as cluster:
        yield Target(cluster, authority)


@pytest.fixture(params=["by_key", "by_certificates"])
def target(request: pytest.FixtureRequest) -> Target:
    found: Target = request.getfixturevalue(request.param)
    return found
