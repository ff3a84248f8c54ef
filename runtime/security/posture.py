"""What an operator must know of this process's security: certificates that end soon, and doors left open."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.runtime.errors import ConfigError
from moonpool.runtime.network.sockets import loopback_only
from moonpool.runtime.security.process import Security


def check_listening(security: Security, host: str, option: str) -> None:
    """Raises ``ConfigError``: sockets at ``host`` (of ``option``) would be open to anyone on the network."""
    if security.authenticates or security.options.insecure or loopback_only(host):
        return
    raise ConfigError(
        f"{option} is {host or 'empty'}, which other machines reach, and no caller would be authenticated"
        ": set security.cluster_key (`moonpool certs key` makes one), or security.cert, key, ca (`moonpool "
        "certs init`), alike in the whole cluster. security.insecure=true leaves it open to all",
        option,
    )


def warnings(security: Security) -> list[str]:
    """Sentences about an open process and about certificates that have expired or will soon."""
    now, found = datetime.now(UTC), []
    if security.options.insecure and not security.authenticates:
        found.append(
            "anyone who reaches this process may use and read it: security.insecure is set, and there is "
            "neither a cluster key nor a certificate"
        )
    if not security.has_key and (security.options.insecure or security.authenticates):
        found.append(
            "security.cluster_key is not set: what this process writes to Redis is taken for forged on other "
            "machines; set the same key in the whole cluster"
        )
    for option, certificate in security.certificates().items():
        if certificate.expires_soon(now):
            when = "expired on" if certificate.expires <= now else "expires on"
            found.append(
                f"the certificate {certificate.file} ({option}) {when} "
                f"{certificate.expires:%Y-%m-%d at %H:%M} UTC: issue another under this name; it is used "
                "without a restart"
            )
    return found


class SecurityCollector(Collector):
    """The same for Prometheus. Its owner registers it."""

    def __init__(self, security: Security) -> None:
        self._security = security

    def collect(self) -> Iterator[Metric]:
        security, now_s = self._security, time.time()
        left = GaugeMetricFamily(
            "moonpool_certificate_expiry_seconds",
            "Seconds until a certificate in use expires, by the option that names it",
            labels=["option"],
        )
        for option, certificate in security.certificates().items():
            left.add_metric([option], certificate.expires.timestamp() - now_s)
        yield left
        yield GaugeMetricFamily(
            "moonpool_insecure",
            "1: this process may listen to other machines without a cluster key and certificates",
            float(security.options.insecure and not security.authenticates),
        )
