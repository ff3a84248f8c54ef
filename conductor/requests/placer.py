"""Places one request: from its lineage to a started attempt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from moonpool.conductor.accounts.spent import Spent
from moonpool.conductor.admission.rejection import DecodeOutlook
from moonpool.conductor.admission.tenants import may_hold
from moonpool.conductor.admission.turn import Turn
from moonpool.conductor.engines.attempt import EngineAttempt
from moonpool.conductor.errors import NoStructures
from moonpool.conductor.fleet.member import Member
from moonpool.conductor.fleet.node_client import RequestKey
from moonpool.conductor.observing.prefix_outcomes import PrefixOutcome
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import PlaceRequest
from moonpool.conductor.placing.place import place
from moonpool.conductor.placing.placement import Placement, PrefillEstimate, Rejection
from moonpool.conductor.request import GenerateRequest
from moonpool.conductor.requests.attempt import Attempt, AttemptPlan
from moonpool.conductor.requests.deadline import Deadline
from moonpool.conductor.requests.dependencies import RequestDependencies
from moonpool.conductor.requests.life import RequestLife
from moonpool.conductor.requests.lineage import Lineage
from moonpool.conductor.requests.migration import MigrationPlan
from moonpool.protos import node_pb2

# The request's deadline must fire before the call's: a call that times out looks like a dead node.
_CALL_MARGIN_S = 1.0

# On a node, batch requests come after all interactive ones: after those of other tenants by their lag, after
# those of their own by priority.
_BATCH_PRIORITY = 1 << 30
_BATCH_LAG_S = 1e6
# Batch requests start only while the next prefill would begin at once and a step is well within its SLO, so
# that interactive requests are not slowed down.
_IDLE_QUEUE_S = 0.05
_IDLE_PART = 0.8


class RequestPlacer:
    """Places one request, each time with the tokens streamed so far."""

    def __init__(
        self,
        request: GenerateRequest,
        deps: RequestDependencies,
        life: RequestLife,
        lineage: Lineage,
        *,
        limit: int,
        deadline: Deadline,
    ) -> None:
        """``limit``: most output tokens. All times of ``deadline``: by ``deps.clock``."""
        self.first_attempt = 0  # number of the first one in messages to nodes
        self._prefixes: Mapping[str, int] = {}  # leading blocks on each node at the latest decision
        self.prefix = PrefixOutcome()  # what came of it at the first attempt
        self.spent = Spent()  # by the nodes, of all attempts
        self.queued: dict[str, Any] = {}  # before the latest attempt on its prefill node
        self.hash_s = 0.0  # spent on block keys by the latest decision
        self.place_s = 0.0  # spent on look-up and placement
        self._request = request
        self._life = life
        self._deps = deps
        self._lineage = lineage
        self._limit = limit
        self._deadline = deadline
        self._slo = request.slo(deps.slo)
        self._turn = Turn(
            request.client, request.adapter_name, deps.fair_share, deps.adapter_shares, deps.usage
        )
        # Drawn once, so that sampling does not depend on placements.
        seed = request.sampling.seed
        seed = deps.rng.getrandbits(64) if seed is None else seed % 2**64
        self._sampling = request.sampling.to_proto(seed)

    def decide(self) -> Placement | Rejection:
        """Choose nodes for the request as it is now. Starts nothing."""
        deps, lineage = self._deps, self._lineage
        chain = deps.registry.chain(self._request.tenant, self._request.adapter_key)
        if chain is None:
            return Rejection("no node has joined yet", role="prefill")
        began_s = deps.clock()
        keys = lineage.hash_blocks(chain)
        hashed_s = deps.clock()
        remaining = self._limit - len(lineage.output_ids)
        request = PlaceRequest(
            num_tokens=lineage.num_tokens,
            remaining_tokens=remaining,
            expected_tokens=self.expected_tokens(),
            deadline_s=math.inf if self._life.begun else self._deadline.run_s(began_s),
            reads_cache=not self._wants_prompt_logprobs,
            fairness_delay_s=self._fairness_delay_s(began_s),
            adapter=self._request.adapter.digest if self._request.adapter else "",
            origin=(self._request.origin or deps.region) if deps.cost_model.links.regions else "",
        )
        lacking = self._lacking()
        view = deps.registry.view(
            keys, self._life.avoid | lacking, self._request.only, self._request.client.regions
        )
        self._prefixes = view.prefix_blocks
        outcome = place(request, view, self._life.slo(self._slo), deps.policy)
        if lacking and isinstance(outcome, Placement):
            decode = outcome.decode
            for node_id in (outcome.prefill.node_id, *([decode.node_id] if decode is not None else [])):
                if node_id in lacking:
                    raise NoStructures(node_id)
        self.hash_s, self.place_s = hashed_s - began_s, deps.clock() - hashed_s
        return outcome

    def rejected(self, placement: Placement) -> Rejection | None:
        """The rejection of a request that has not begun; None: accepted."""
        deps, decode = self._deps, placement.decode
        outlook = self._outlook(deps.registry.members[decode.node_id]) if decode else None
        return deps.rejection.at_arrival(placement, outlook, self._slo, deps.clock())

    def rejected_before_decode(self, attempt: Attempt) -> Rejection | None:
        """The rejection after the prefill, with nothing streamed; None: accepted."""
        deps, plan = self._deps, attempt.plan
        if plan.decode is None:
            return None
        return deps.rejection.before_decode(self._outlook(plan.decode, plan.key), self._slo, deps.clock())

    def is_idle_enough(self, placement: Placement) -> bool:
        """Whether a batch request would use only idle capacity."""
        decode = placement.decode
        return placement.prefill.queue_s <= _IDLE_QUEUE_S and (
            decode is None or (decode.wait_s == 0 and decode.step_s <= _IDLE_PART * self._deps.slo.tbt_s)
        )

    def knows(self, placement: Placement) -> bool:
        """False: a node of the placement has left, or its name is that of one elsewhere by now."""
        members, regions = self._deps.registry.members, self._request.client.regions
        names = [placement.prefill.node_id, *([placement.decode.node_id] if placement.decode else [])]
        return all(name in members and may_hold(regions, members[name].record.region) for name in names)

    def start(self, placement: Placement) -> Attempt:
        """Start an attempt on the nodes of ``placement``, which must be known. ``note`` what was started once
        its calls have left."""
        deps, number = self._deps, self.first_attempt + self._life.num_attempts
        self._life.started()
        if self._life.num_attempts == 1:
            self._charge(placement)
        members = deps.registry.members
        estimate = placement.prefill
        source = members.get(estimate.fetch_from) if estimate.fetched_tokens else None
        if source is not None and not may_hold(self._request.client.regions, source.record.region):
            source = None  # another node of the same name by now
        fetch_from = source.kv_address if source else None  # else it computes what it would have fetched
        num_blocks = estimate.prefix_tokens // deps.model.block_size
        prefill = members[estimate.node_id]
        decode = members[placement.decode.node_id] if placement.decode else None
        work = self._work(number, placement.patience_s, prefill, decode)
        plan = AttemptPlan(
            key=(self._request.request_id, number),
            placement=placement,
            prefill=prefill,
            decode=decode,
            prefill_request=node_pb2.PrefillRequest(
                work=work,
                fetch_from=fetch_from,
                num_fetch_blocks=num_blocks if fetch_from else 0,
                num_hit_blocks=estimate.local_tokens // deps.model.block_size,
                prompt_logprobs=self._wants_prompt_logprobs,
                followed=decode is not None,
            ),
            decode_request=node_pb2.DecodeRequest(
                work=work, conductor_id=deps.conductor_id, prefill_address=prefill.record.rpc_address
            ),
            expected_tokens=self.expected_tokens(),
            num_blocks=self.num_blocks,
            timeout_s=self._deadline.run_s(deps.clock()) + _CALL_MARGIN_S,
            spent=self.spent,
        )
        if self._request.adapter is not None:
            for member in filter(None, (plan.prefill, plan.decode)):
                # Until its next heartbeat tells: others with this adapter follow.
                member.view.resident_adapters |= {self._request.adapter.digest}
        attempt = self._attempt(plan)
        self.queued = prefill.load.queued()
        attempt.start()
        return attempt

    def note(self, placement: Placement) -> None:
        """Tell links, prefixes and copies of the attempt that was started last."""
        deps, client, estimate = self._deps, self._request.client, placement.prefill
        self._begin_fetch(estimate)
        if self._life.num_attempts == 1:
            deps.activity.reuse.use(self._lineage.keys)
            token_ids = self._lineage.token_ids()
            self.prefix = deps.prefixes.note(
                client.name,
                self._lineage.root_key,
                token_ids,
                self._lineage.keys,
                held=self._prefixes,
                num_used_tokens=estimate.prefix_tokens,
                reads_cache=not self._wants_prompt_logprobs,
                elsewhere=lambda after: deps.registry.in_other_layout(self._request.tenant, token_ids, after),
            )
            self.spent.known_tokens = self.prefix.known_tokens
            num_used = estimate.prefix_tokens // deps.model.block_size
            deps.replicator.count(self._lineage.keys, num_used, client)
        digests = self._request.digests
        deps.replicator.note(self._lineage.keys, self._prefixes, estimate.compute_s, client, digests)

    def _attempt(self, plan: AttemptPlan) -> Attempt:
        deps, request = self._deps, self._request
        if plan.prefill.engine is None:
            return Attempt(plan)
        salt = deps.registry.salt(request.tenant)
        return EngineAttempt(plan, deps.cost_model, deps.clock, salt, request.cache_hint)

    def migration(self, attempt: Attempt, target: Member, cause: str) -> MigrationPlan:
        """Plan to have ``target`` go on with a running attempt, under the next attempt's number."""
        deps, number, source = self._deps, self.first_attempt + self._life.num_attempts, attempt.plan.decode
        chain = deps.registry.chain(self._request.tenant, self._request.adapter_key)
        assert source is not None and chain is not None
        self._life.started()
        self._lineage.hash_blocks(chain)
        return MigrationPlan(
            cause=cause,
            key=(self._request.request_id, number),
            target=target,
            request=node_pb2.DecodeRequest(
                work=self._work(number, 0.0, target),
                conductor_id=deps.conductor_id,
                prefill_address=source.record.rpc_address,
                migrates=True,
                from_attempt=attempt.plan.key[1],
            ),
            expected_tokens=self.expected_tokens(),
            num_blocks=self.num_blocks,
            timeout_s=self._deadline.run_s(deps.clock()) + _CALL_MARGIN_S,
        )

    def settle(self, *, pays: bool) -> None:
        """Charge the tenant for its output as it was, or, with ``pays`` False, for nothing."""
        if self._life.num_attempts:
            num_tokens = len(self._lineage.output_ids) - len(self._request.output_ids)
            self._turn.settle(num_tokens, self._deps.clock(), pays=pays)

    def _charge(self, placement: Placement) -> None:
        available = self._deps.registry.available
        self._turn.charge(
            placement,
            self.expected_tokens(),
            num_prefill=available("prefill"),
            num_decode=available("decode"),
            now_s=self._deps.clock(),
        )

    def _adapter_source(self, nodes: Iterable[Member | None]) -> node_pb2.KvAddress | None:
        """Return the address of a node near by that has the request's adapter in memory, where one of
        ``nodes`` lacks it."""
        adapter = self._request.adapter
        if adapter is not None:
            for lacking in nodes:
                if lacking is not None and adapter.digest not in lacking.view.resident_adapters:
                    for member in self._deps.registry.computing():
                        near = member.record.region == lacking.record.region
                        if near and adapter.digest in member.view.resident_adapters:
                            return member.kv_address
        return None

    def _begin_fetch(self, estimate: PrefillEstimate) -> None:
        """Let the link model count the fetch. The hand-over does not count: it runs chunk by chunk during the
        prefill, with little left at the end.
        """
        deps, layout = self._deps, self._deps.registry.layout
        if layout is not None and estimate.fetched_tokens:
            nbytes = estimate.fetched_tokens // deps.model.block_size * layout.block_nbytes
            links = deps.cost_model.links
            links.begin(estimate.fetch_from, estimate.node_id, nbytes, deps.clock())

    def _work(self, number: int, patience_s: float, *nodes: Member | None) -> node_pb2.Work:
        lineage = self._lineage
        return node_pb2.Work(
            request_id=self._request.request_id,
            token_ids=lineage.token_ids().tobytes(),
            num_prompt_tokens=lineage.num_prompt_tokens,
            root_key=lineage.root_key,
            block_keys=lineage.packed_keys(),
            sampling=self._sampling,
            priority=self.priority,
            tenant=self._request.client.name,
            tenant_cached_nbytes=self._request.client.cached_nbytes,
            left_s=self._deadline.run_s(self._deps.clock()),
            attempt=number,
            patience_s=patience_s,
            tbt_s=0.0 if math.isinf(self._slo.tbt_s) else self._slo.tbt_s,
            adapter=self._request.adapter,
            adapter_source=self._adapter_source(nodes),
        )

    @property
    def num_blocks(self) -> int:
        """Blocks of KV that the request will probably need in the end."""
        num_tokens = self._lineage.num_tokens + self.expected_tokens()
        return -(-num_tokens // self._deps.model.block_size)

    @property
    def priority(self) -> int:
        """Priority among the requests of its tenant on a node: lower runs first, and is preempted last."""
        most = _BATCH_PRIORITY // 2
        asked = max(-most, min(self._request.priority, most))
        return asked + _BATCH_PRIORITY if self._request.batch else asked

    def _fairness_delay_s(self, now_s: float) -> float:
        """Seconds added to its arrival in the queues of nodes; negative: with a shorter SLO than others."""
        if self._request.batch:
            return _BATCH_LAG_S
        return self._turn.delay_s(now_s) + self._slack_s()

    def _slack_s(self) -> float:
        # Only the operator lets requests go before others: a client may ask for a later turn, not an earlier.
        usual = self._deps.slo
        granted = self._request.granted_slo(usual)
        return self._deps.policy.slack_s(Slo(max(granted.ttft_s, self._slo.ttft_s)), usual)

    def _lacking(self) -> set[str]:
        """Nodes that cannot enforce the request's structure."""
        if self._request.sampling.structure is None:
            return set()
        return {name for name, member in self._deps.registry.members.items() if not member.structures}

    def _outlook(self, member: Member, key: RequestKey | None = None) -> DecodeOutlook:
        deps, lineage = self._deps, self._lineage
        return DecodeOutlook(
            member.view,
            member.load.schedule,
            num_tokens=lineage.num_tokens,
            expected_tokens=self.expected_tokens(),
            block_size=deps.model.block_size,
            key=key,
        )

    def expected_tokens(self) -> int:
        """Tokens that it will probably still produce."""
        lineage = self._lineage
        so_far = len(lineage.output_ids)
        return self._deps.cost_model.output_lengths.expected(
            lineage.num_prompt_tokens, so_far, self._limit - so_far
        )

    @property
    def _wants_prompt_logprobs(self) -> bool:
        return self._request.prompt_logprobs and not self._lineage.output_ids
