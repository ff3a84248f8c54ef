"""Nothing listens to other machines with neither a key nor certificates; open doors and ends are told."""

from __future__ import annotations

import asyncio
import subprocess
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from moonpool.runtime import rpc
from moonpool.runtime.config.options import Config, TcpOptions, TransferOptions
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.observing.metrics_server import serve_metrics
from moonpool.runtime.security import certificates, posture, process
from moonpool.runtime.security.posture import SecurityCollector, warnings
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller
from moonpool.transfer import TransferAgent
from tests.forked_command import forked_command

ME = Caller("node", "n")
KEY = SecurityOptions(cluster_key="0123456789abcdef")
EVERYWHERE = "0.0.0.0"


@pytest.fixture(autouse=True)
def identity() -> None:
    process.use(Security(SecurityOptions(), ME))


async def start_agent(*rails: str) -> None:
    tcp = TcpOptions(host="127.0.0.1" if rails else EVERYWHERE, rails=rails)
    agent = await TransferAgent.start(TransferOptions(tcp=tcp), agent_id="n", epoch=1)
    await agent.close()


async def test_every_listener_refuses_to_be_open() -> None:
    with pytest.raises(ConfigError, match=r"node\.host is 0\.0\.0\.0, .* security\.cluster_key"):
        await rpc.serve([], EVERYWHERE, 0)
    with pytest.raises(ConfigError, match=r"node\.host"):
        serve_metrics(EVERYWHERE, 0)
    with pytest.raises(ConfigError, match=r"transfer\.tcp\.host"):
        await start_agent()
    with pytest.raises(ConfigError, match=r"transfer\.tcp\.host"):
        await start_agent(EVERYWHERE)


@pytest.mark.parametrize("options", [KEY, SecurityOptions(insecure=True)])
async def test_with_a_key_or_when_it_is_wanted_it_listens(options: SecurityOptions) -> None:
    process.use(Security(options, ME))
    server, _ = await rpc.serve([], EVERYWHERE, 0)
    await server.stop(None)
    await start_agent()


@pytest.mark.parametrize("module", ["conductor", "node", "kvstore.store_node"])
async def test_a_daemon_says_so_and_exits_before_it_loads(module: str) -> None:
    option = "conductor.host" if module == "conductor" else "node.host"
    command = [*forked_command(f"moonpool.{module}"), "--set", f"{option}={EVERYWHERE}"]
    command += ["--set", "conductor.port=0", "--set", "index.redis_url=unix:///nowhere"]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    assert f"{option} is {EVERYWHERE}" in done.stderr


def issue(directory: Path, days: int) -> SecurityOptions:
    if not (directory / "ca.pem").exists():
        certificates.init(directory, days=3650)
    file = certificates.issue(directory, ME, days=days)
    return replace(KEY, cert=str(file), key=str(file.with_suffix(".key")), ca=str(directory / "ca.pem"))


def page(security: Security) -> str:
    registry = CollectorRegistry()
    registry.register(SecurityCollector(security))
    return generate_latest(registry).decode()


def test_a_certificate_that_ends_soon_is_told(tmp_path: Path) -> None:
    good = Security(issue(tmp_path, days=365), ME)
    assert not warnings(good)
    (line,) = [each for each in page(good).splitlines() if 'option="security.cert"' in each]
    assert 364 * 86_400 < float(line.split()[-1]) <= 365 * 86_400
    assert "moonpool_insecure 0.0" in page(good)
    (late,) = warnings(Security(issue(tmp_path, days=0), ME))
    assert "node-n.pem (security.cert) expired on" in late


def test_how_soon_is_soon_depends_on_its_life(tmp_path: Path) -> None:
    for days, soon_days in ((3650, 30), (365, 30), (90, 22.5), (4, 1)):
        issue(tmp_path, days=days)
        found = certificates.describe(tmp_path / "node-n.pem")
        soon = found.expires - timedelta(days=soon_days, hours=1)
        assert not found.expires_soon(soon)
        assert found.expires_soon(soon + timedelta(hours=2))


def test_an_open_process_is_told() -> None:
    open_one = Security(SecurityOptions(insecure=True), ME)
    opened, unsealed = warnings(open_one)
    assert "security.insecure" in opened
    assert "taken for forged on other machines" in unsealed
    assert "moonpool_insecure 1.0" in page(open_one)
    assert not warnings(Security(SecurityOptions(insecure=True, cluster_key=KEY.cluster_key), ME))


def test_what_is_refused_is_named_once_for_all_hosts() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        posture.check_listening(process.current(), host, "node.host")
    for host in ("", "::", "10.0.0.1", "example.org", "127.example.org"):
        with pytest.raises(ConfigError):
            posture.check_listening(process.current(), host, "node.host")
    assert Config().security == SecurityOptions()
