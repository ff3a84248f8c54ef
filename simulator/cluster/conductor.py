"""What a simulated conductor keeps beside the state of the nodes: tenants' limits and shares."""

from __future__ import annotations

import sys

from moonpool.conductor.admission.adapter_shares import AdapterShares
from moonpool.conductor.admission.fair_share import FairShare
from moonpool.conductor.admission.limits import Limits
from moonpool.conductor.admission.turn import Turn
from moonpool.conductor.admission.usage import Usage
from moonpool.conductor.placing.placement import Rejection
from moonpool.simulator.cluster.clock import Clock
from moonpool.simulator.cluster.job import Job


class Conductor:
    """The objects of ``conductor.admission``. ``conductor.max_requests`` is not simulated."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.limits = Limits(sys.maxsize)
        self._fair_share = FairShare()
        self._adapter_shares = AdapterShares()
        self.usage = Usage(self.limits, self._fair_share, lambda: clock.now_s)

    def enter(self, job: Job) -> Rejection | None:
        """Admit a request and give it its turn; or why not."""
        request, now_s = job.request, self._clock.now_s
        rejection = self.limits.rejection(request.client, now_s)
        if rejection is None:
            self.limits.enter(request.client, request.input_tokens, now_s)
            job.turn = Turn(
                request.client, request.adapter, self._fair_share, self._adapter_shares, self.usage
            )
        return rejection

    def leave(self, job: Job) -> None:
        """The request has ended. It costs its tenant nothing if it was rejected, or not admitted."""
        if job.turn is None:
            return
        now_s, client, pays = self._clock.now_s, job.request.client, not job.rejected
        job.turn.settle(job.num_produced, now_s, pays=pays)
        num_tokens = job.num_produced if pays else -job.request.input_tokens
        self.limits.leave(client, num_tokens, now_s, lasted_s=now_s - job.request.arrival_s)
