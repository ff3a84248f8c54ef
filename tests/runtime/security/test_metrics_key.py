"""Pages of metrics: open on one machine, behind a key of the cluster where others reach them."""

from __future__ import annotations

from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.observing.metrics_server import metrics_headers, metrics_key, serve_metrics
from moonpool.runtime.security import process
from moonpool.runtime.security.call_tokens import RoleKeys
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import Caller

OPTIONS = SecurityOptions(cluster_key="0123456789abcdef")
OTHER = SecurityOptions(cluster_key="fedcba9876543210")


@pytest.fixture(autouse=True)
def identity() -> None:
    process.use(Security(OPTIONS, Caller("node", "n")))


def read(port: int, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    try:
        with urlopen(Request(f"http://127.0.0.1:{port}{path}", headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize(("host", "keyed"), [("0.0.0.0", False), ("127.0.0.1", True)])
def test_a_page_that_others_reach_needs_the_key(host: str, keyed: bool) -> None:
    port = serve_metrics(host, 0, keyed=keyed, pages={"/requests": lambda: b"[]"}).port
    own, other = (
        metrics_headers(Security(options, Caller("operator", "o"), serves=False))
        for options in (OPTIONS, OTHER)
    )
    for headers in ({}, other, {"Authorization": "Bearer "}, {"Authorization": OPTIONS.cluster_key}):
        status, text = read(port, **headers)
        assert (status, "moonpool certs metrics" in text) == (401, True)
        assert read(port, "/requests", **headers)[0] == 401
    assert own == {"Authorization": f"Bearer {metrics_key(RoleKeys(OPTIONS.cluster_key).derived)}"}
    status, text = read(port, **own)
    assert status == 200 and "process_cpu_seconds_total" in text
    assert read(port, "/requests", **own) == (200, "[]")
    assert read(port, "/healthz") == (200, "ok\n"), "for probes"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_a_page_at_no_address_of_this_machine_names_the_option(host: str) -> None:
    with pytest.raises(ConfigError, match=rf"{host} is no address of this machine .*: set node\.host to one"):
        serve_metrics(host, 0)


def test_a_page_on_one_machine_is_open() -> None:
    assert read(serve_metrics("127.0.0.1", 0).port)[0] == 200
