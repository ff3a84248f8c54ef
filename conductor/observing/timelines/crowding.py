"""The tenant with most of the tokens that were queued before a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# A tenant's prompts are a queue's reason from this part of its tokens on.
_MOST = 0.5
OTHER = "another tenant"


def burst_of(queued: Mapping[str, Any]) -> str:
    """The tenant that a queue grew by, as the end of a sentence; empty: by none alone, or it is not known.
    ``queued``: of the event placed, see ``LoadLedger.queued``, or ``seen`` of it."""
    tenant, own, tokens = queued.get("tenant", ""), queued.get("tenant_tokens", 0), queued.get("tokens", 0)
    if not tenant or own < _MOST * tokens:
        return ""
    if tenant == OTHER and not own:
        return f"{OTHER}'s burst"
    of_all = f" of {tokens:,}" if tokens else ""
    return f"tenant {tenant}'s burst: {own:,}{of_all} tokens were queued before it"


def seen(queued: Mapping[str, Any], scope: str | None) -> Mapping[str, Any]:
    """What a viewer may read of it. ``scope``: the only tenant that it sees, see ``Principal``; None: all.

    Others' names and counts are left out: it may learn that another tenant's prompts were before its own.
    """
    if scope is None or not burst_of(queued):
        return queued if scope is None else {}
    if queued["tenant"] == scope:
        return {"tenant": scope, "tenant_tokens": queued["tenant_tokens"]}
    return {"tenant": OTHER}
