"""Options of the cluster's perimeter."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.runtime.config.section import Section, option, require


@dataclass(frozen=True, slots=True)
class SecurityOptions(Section, name="security"):
    cluster_key: str = option(
        "",
        "text",
        "key that calls and connections between processes are signed with, the same in the whole cluster; "
        "empty: not signed",
        secret=True,
    )
    cert: str = option("", "path", "this process's certificate (PEM); empty: no TLS between processes")
    key: str = option("", "path", "private key of the certificate (PEM)")
    ca: str = option(
        "",
        "path",
        "the authority that signed the certificates of the cluster (PEM); those in `crl.pem` beside it are "
        "refused",
    )
    insecure: bool = option(
        False,
        "flag",
        "listen to other machines with neither a cluster key nor certificates: anyone may use and read all",
    )

    def _check(self) -> None:
        given = [bool(path) for path in (self.cert, self.key, self.ca)]
        require(all(given) or not any(given), "security", "cert, key and ca together, or none", given)
