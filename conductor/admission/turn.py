"""The turn of one request among those of all tenants, and what its tenant is charged for it.

Pure, and the same live and simulated.
"""

from __future__ import annotations

from moonpool.conductor.admission.adapter_shares import AdapterShares
from moonpool.conductor.admission.fair_share import FairShare, Work
from moonpool.conductor.admission.tenants import Tenant
from moonpool.conductor.admission.usage import Usage
from moonpool.conductor.placing.placement import Placement


class Turn:
    """Ask ``delay_s`` before the first attempt, then ``charge`` for it, and ``settle`` at the end."""

    __slots__ = (
        "_adapter",
        "_adapter_shares",
        "_charged",
        "_client",
        "_fair_share",
        "_order_s",
        "_token_s",
        "_usage",
    )

    def __init__(
        self, client: Tenant, adapter: str, fair_share: FairShare, adapter_shares: AdapterShares, usage: Usage
    ) -> None:
        """``adapter``: its name; empty: none. ``usage`` has the same ``fair_share``."""
        self._client, self._adapter = client, adapter
        self._fair_share, self._adapter_shares, self._usage = fair_share, adapter_shares, usage
        self._order_s: float | None = None
        self._charged, self._token_s = Work(), 0.0

    def delay_s(self, now_s: float) -> float:
        """Seconds within which prefills of other tenants may overtake it.

        Decided once: a request that is placed again keeps its turn, whatever its tenant was charged since.
        """
        if self._order_s is None:
            name = self._client.name
            delay_s = self._fair_share.delay_s(name, now_s)
            self._order_s = now_s + delay_s + self._adapter_shares.delay_s(name, self._adapter, now_s)
        return max(self._order_s - now_s, 0.0)

    def charge(
        self, placement: Placement, expected_tokens: int, *, num_prefill: int, num_decode: int, now_s: float
    ) -> None:
        """Charge for the first attempt, on so many nodes: those after a failure are not its own doing."""
        if (decode := placement.decode) is not None:
            # Its part of a step, which the sequences of the batch share. The node has measured the step.
            self._token_s = decode.step_s / (decode.num_running + 1) / max(num_decode, 1)
        prefill_s = placement.prefill.compute_s / max(num_prefill, 1)
        self._use(Work(prefill_s, self._token_s * expected_tokens), now_s)

    def settle(self, num_tokens: int, now_s: float, *, pays: bool) -> None:
        """Charge for its output as it was, or, with ``pays`` False, for nothing."""
        self._use(Work(self._charged.prefill_s, self._token_s * num_tokens) if pays else Work(), now_s)

    def _use(self, used: Work, now_s: float) -> None:
        """Change what was charged to ``used``."""
        more = used.minus(self._charged)
        self._adapter_shares.charge(self._client.name, self._adapter, more, now_s)
        if self._client.name:
            self._usage.charge(self._client, more)
        self._charged = used
