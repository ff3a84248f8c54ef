"""What is refused because a tenant is confined to regions: counted, and in the audit log."""

from __future__ import annotations

from prometheus_client import Counter

from moonpool.conductor.admission.tenants import Tenant
from moonpool.runtime.observing import audit

refusals = Counter(
    "moonpool_confined_refusals_total",
    "Refused because a tenant is confined to regions: request (nodes are elsewhere only), move (of "
    "a running request to a node elsewhere), conductor (a request came to a conductor elsewhere)",
    ["what"],
)


def refused(client: Tenant, what: str, why: str) -> str:
    """Record that something of ``client`` was refused, and return the reason as a sentence.

    ``what``: as in the metric. ``why``: the rest of the sentence.
    """
    sentence = f"{client.confinement}, and {why}"
    refusals.labels(what).inc()
    audit.refused(f"{what} of tenant {client.name}", sentence, who=client.name, kind="confined")
    return sentence


def is_in(region: str) -> str:
    """Part of a sentence: where a node or conductor is."""
    return f"is in {region}" if region else "has no region (node.region)"
