"""Where a request goes next: from its lineage to a started attempt."""

from __future__ import annotations

import math

from conductor.attempt import Attempt, AttemptPlan
from conductor.cluster_view import PlaceRequest, Slo
from conductor.lineage import Lineage
from conductor.place import place
from conductor.placement import Placement, Rejection
from conductor.request import GenerateRequest
from conductor.services import Services
from protos import node_pb2

# The request's own deadline must be the first to fire: a call that times out looks like a dead node.
_CALL_MARGIN_S = 1.0


class RequestPlacer:
    """Places one request as often as needed, each time from what has been streamed by then."""

    def __init__(
        self,
        request: GenerateRequest,
        services: Services,
        lineage: Lineage,
        *,
        limit: int,
        timeout_s: float,
        started_s: float,
        started_unix_s: float,
    ) -> None:
        """``limit``: tokens the request may produce in all. ``started_s`` is of ``services.clock``."""
        self.avoid: set[str] = set()  # nodes that failed this request
        self.num_attempts = 0
        self.first_attempt = 0  # the number that nodes know the first one by
        self.hash_s = 0.0  # that the latest decision spent on block keys
        self.place_s = 0.0  # and on looking them up and choosing
        self._request = request
        self._services = services
        self._lineage = lineage
        self._limit = limit
        self._timeout_s = timeout_s
        self._ends_s = started_s + timeout_s
        self._ends_unix_s = started_unix_s + timeout_s
        # Drawn once, so that what is sampled does not depend on where or how often it is placed.
        seed = request.sampling.seed
        seed = services.rng.getrandbits(64) if seed is None else seed % 2**64
        self._sampling = request.sampling.to_proto(seed)

    def decide(self) -> Placement | Rejection:
        """Choose nodes by the cluster as it is now. Nothing is started."""
        services, lineage = self._services, self._lineage
        root_key = services.registry.root_key(self._request.tenant)
        if root_key is None:
            return Rejection("no node has come yet", role="prefill")
        began_s = services.clock()
        keys = lineage.hash_blocks(root_key)
        hashed_s = services.clock()
        remaining = self._limit - len(lineage.output_ids)
        # What has begun is brought to its end if that can be done at all.
        begun = self.num_attempts > 0
        request = PlaceRequest(
            num_tokens=lineage.num_tokens,
            remaining_tokens=remaining,
            expected_tokens=services.cost_model.output_lengths.expected(
                lineage.num_prompt_tokens, len(lineage.output_ids), remaining
            ),
            deadline_s=math.inf if begun else self._timeout_s,
            reads_cache=not self._wants_prompt_logprobs,
        )
        view = services.registry.view(keys, self.avoid)
        outcome = place(request, view, Slo() if begun else services.slo, services.policy)
        self.hash_s, self.place_s = hashed_s - began_s, services.clock() - hashed_s
        return outcome

    def start(self, placement: Placement) -> Attempt:
        """Carry out what was decided just now."""
        services, number = self._services, self.first_attempt + self.num_attempts
        self.num_attempts += 1
        members = services.registry.members
        estimate = placement.prefill
        fetch_from = members[estimate.fetch_from].kv_address if estimate.fetched_tokens else None
        num_blocks = estimate.prefix_tokens // services.model.block_size
        attempt = Attempt(
            AttemptPlan(
                key=(self._request.request_id, number),
                work=self._work(number, placement.patience_s),
                placement=placement,
                prefill=members[estimate.node_id],
                decode=members[placement.decode.node_id] if placement.decode else None,
                fetch_from=fetch_from,
                num_fetch_blocks=num_blocks if fetch_from else 0,
                prompt_logprobs=self._wants_prompt_logprobs,
                conductor_id=services.conductor_id,
                timeout_s=max(self._ends_s - services.clock(), 0.0) + _CALL_MARGIN_S,
            )
        )
        attempt.start()
        return attempt

    def _work(self, number: int, patience_s: float) -> node_pb2.Work:
        lineage = self._lineage
        return node_pb2.Work(
            request_id=self._request.request_id,
            token_ids=lineage.token_ids().tobytes(),
            num_prompt_tokens=lineage.num_prompt_tokens,
            root_key=lineage.root_key,
            block_keys=lineage.packed_keys(),
            sampling=self._sampling,
            priority=self._request.priority,
            deadline_unix_s=self._ends_unix_s,
            attempt=number,
            patience_s=patience_s,
        )

    @property
    def _wants_prompt_logprobs(self) -> bool:
        return self._request.prompt_logprobs and not self._lineage.output_ids
