"""A cluster's perimeter in each form: none, a cluster key, certificates."""

from __future__ import annotations

import secrets
from pathlib import Path

from moonpool.runtime.config.options import SecurityOptions
from moonpool.runtime.security import certificates
from moonpool.runtime.security.roles import CONDUCTOR, NODE, Caller

NEITHER, KEY, CERTIFICATES = "neither", "cluster key", "certificates"


def security_of(form: str, directory: Path, role: str = NODE) -> SecurityOptions:
    """What a process of ``role`` has. The certificates are made in ``directory`` when first asked for."""
    if form == NEITHER:
        return SecurityOptions(insecure=True)
    if form == KEY:
        file = directory / "cluster_key"
        if not file.exists():
            file.write_text(secrets.token_hex(32))
        return SecurityOptions(cluster_key=file.read_text())
    if not (directory / "ca.pem").exists():
        certificates.init(directory, days=1)
    owner = Caller(role, "bench")
    file = certificates.file_of(directory, owner)
    if not file.exists():
        certificates.issue(directory, owner, days=1, addresses=["127.0.0.1"])
    # Without a key beside them, which ``insecure`` permits.
    return SecurityOptions(
        cert=str(file), key=str(file.with_suffix(".key")), ca=str(directory / "ca.pem"), insecure=True
    )


def cluster_sets(form: str, directory: Path) -> list[str]:
    """The options of a local cluster with this perimeter, as ``key=value``."""
    security, node = (security_of(form, directory, role) for role in (CONDUCTOR, NODE))
    sets = [f"security.{name}={getattr(security, name)}" for name in ("cluster_key", "cert", "key", "ca")]
    sets.append(f"security.insecure={str(security.insecure).lower()}")
    if node.cert:
        of_nodes = f"security.cert={node.cert},security.key={node.key}"
        sets += [f"cluster.prefill_options={of_nodes}", f"cluster.decode_options={of_nodes}"]
    return sets
