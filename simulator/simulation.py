"""The life of requests in a simulated cluster: placement, fetch, prefill, hand-over, decode."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moonpool.conductor.admission.rejection import ARRIVAL, DECODE, REJECTIONS
from moonpool.conductor.observing.demand import DemandCounter
from moonpool.conductor.placing.cluster_view import PlaceRequest
from moonpool.conductor.placing.place import place
from moonpool.conductor.placing.placement import Placement, PrefillEstimate, Rejection
from moonpool.conductor.planning.on_demand import NODE_WAIT_S
from moonpool.conductor.requests.life import LOST, Fail, Look, Refuse, Start
from moonpool.kvstore.blocks.tier import Tier
from moonpool.runtime.errors import ConfigError
from moonpool.simulator.cluster.clock import Clock
from moonpool.simulator.cluster.conductor import Conductor
from moonpool.simulator.cluster.coordination import Coordination
from moonpool.simulator.cluster.elastic_fleet import ElasticFleet
from moonpool.simulator.cluster.hot_prefixes import HotPrefixCopies
from moonpool.simulator.cluster.job import Job
from moonpool.simulator.cluster.membership import Cluster
from moonpool.simulator.cluster.memory import PinnedBlocks
from moonpool.simulator.cluster.moves import Moves
from moonpool.simulator.cluster.network import Flow
from moonpool.simulator.cluster.node import Node
from moonpool.simulator.inputs.scenario import ClusterEvent, Scenario
from moonpool.simulator.inputs.trace import TraceRequest
from moonpool.simulator.outcome import Outcome, hot_copies, served

_FOREVER_S = 1e9


@dataclass(slots=True)
class _Placed:
    """The nodes of a job's current attempt. ``decode``: None where the prefill produces its last token."""

    prefill: Node
    decode: Node | None
    hand_over: Flow | None = None


class Simulation:
    """One run: ``Simulation(scenario, requests).run()``. Equal arguments give equal outcomes.

    The product's own code: placement and its estimates, rejection, output lengths, the index's map, cache and
    eviction. Modelled: steps take the time of the node's profile, flows share links evenly, the index is
    always up to date, and messages take no time.
    """

    def __init__(self, scenario: Scenario, requests: Sequence[TraceRequest]) -> None:
        if scenario.replicate_nbytes_per_s and any(request.regions for request in requests):
            raise ConfigError("copies of confined requests' prefixes are not simulated", key="replicate")
        if scenario.migrate and any(request.adapter for request in requests):
            raise ConfigError("moves of requests with adapters are not simulated", key="migrate")
        self.scenario = scenario
        self.clock = Clock()
        self.cluster = Cluster(scenario, self.clock, on_prefilled=self._prefilled, on_decoded=self._finish)
        self.nodes = self.cluster.nodes
        self.jobs = [
            Job(i, request, self.cluster.keys_of(request), i % scenario.num_conductors)
            for i, request in enumerate(requests)
        ]
        self.copies = HotPrefixCopies(
            self.cluster,
            self.clock,
            nbytes_per_s=scenario.replicate_nbytes_per_s,
            block_tokens=scenario.block_tokens,
            has_open_requests=lambda: self._num_open > 0,
        )
        self.coordination = Coordination(
            self.cluster.conductors,
            self.clock,
            share_s=scenario.share_s,
            has_open_requests=lambda: self._num_open > 0,
        )
        self._placed: dict[Job, _Placed] = {}
        self._num_open = len(self.jobs)
        self._num_late = 0  # without a first token within the SLO
        self._most_late: int | None = None
        self.demand = DemandCounter()
        self.fleet: ElasticFleet | None = None
        if scenario.elastic is not None:
            self.fleet = ElasticFleet(
                scenario.elastic,
                scenario.slo,
                self.cluster,
                self.clock,
                self.demand,
                has_open_requests=lambda: self._num_open > 0,
            )
        self._longest = max((request.output_tokens for request in requests), default=1)
        self.moves = Moves(
            self.cluster,
            self.clock,
            self.cluster.costs.output_lengths,
            causes=scenario.migrate,
            tbt_s=scenario.slo.tbt_s,
            block_tokens=scenario.block_tokens,
            longest=self._longest,
            has_open_requests=lambda: self._num_open > 0,
            on_replaced=self._place_again,
            on_moved=self._moved,
        )

    def run(self) -> Outcome:
        self._run()
        return self._outcome()

    def run_while(self, attained: float) -> Outcome | None:
        """As ``run``; None as soon as fewer than this fraction of the requests can be within the SLO."""
        self._most_late = int((1 - attained) * len(self.jobs) + 1e-9)
        self._run()
        return self._outcome() if self._num_late <= self._most_late else None

    def _run(self) -> None:
        for event in self.scenario.events:
            self.clock.at(event.at_s, self._apply_event, event)
        for job in self.jobs:
            self.clock.at(job.request.arrival_s, self._enter, job)
        self.clock.run()

    def _count_late(self) -> None:
        self._num_late += 1
        if self._most_late is not None and self._num_late > self._most_late:
            self.clock.stop()

    def _conductor(self, job: Job) -> Conductor:
        return self.cluster.conductors[job.conductor]

    # ------------------------------------------------------------------ nodes join and fail

    def _apply_event(self, event: ClusterEvent) -> None:
        if event.kind == "join":
            self.cluster.join(event.role)
        elif (node := self.cluster.fail(event.role, event.number)) is not None:
            for job in list(node.jobs):
                self._place_again(job, LOST, node.node_id)

    def _place_again(self, job: Job, cause: str, *nodes: str) -> None:
        """Place a job again, with its output so far: its attempt failed on ``nodes``."""
        if job.ended:
            return
        if not job.remaining:
            self._finish(job)  # its last step ended as its node did
            return
        job.attempt += 1
        self._leave(job)
        step = job.life.failed(cause, nodes, job.num_produced)
        if isinstance(step, Fail):
            self._reject(job, "failed")
        else:
            self._look_again(job, step)

    def _look_again(self, job: Job, step: Look) -> None:
        attempt = job.attempt

        def look() -> None:
            if job.attempt == attempt:
                self._arrive(job)

        if step.after_s:
            self.clock.at(self.clock.now_s + step.after_s, look)
        else:
            look()

    def _moved(self, job: Job, node: Node) -> None:
        self._placed[job].decode = node

    def _leave(self, job: Job) -> None:
        """Remove a job from its nodes and release its blocks. Idempotent."""
        placed = self._placed.pop(job, None)
        if placed is None:
            return
        if placed.hand_over is not None:
            self.cluster.network.cancel(placed.hand_over)
        placed.prefill.forget(job, job.hold)
        if placed.decode is not None:
            placed.decode.forget(job, job.decode_hold)
        job.hold, job.decode_hold = PinnedBlocks(), None
        for node in (placed.prefill, placed.decode):
            if node is not None:
                self.cluster.ends(node)

    # ------------------------------------------------------------------ placement

    def _enter(self, job: Job) -> None:
        if rejection := self._conductor(job).enter(job):
            self._reject(job, rejection.stage)
        else:
            self._arrive(job)

    def _arrive(self, job: Job) -> None:
        assert job.turn is not None
        now_s, slo, conductor = self.clock.now_s, job.slo(self.scenario.slo), self._conductor(job)
        job.attempt += job.attempt == 0
        self.coordination.decides()
        view = self.cluster.view(job)
        expected = self._expected(job)
        request = PlaceRequest(
            num_tokens=job.num_tokens,
            remaining_tokens=self._limit(job),
            expected_tokens=expected,
            deadline_s=_FOREVER_S,
            fairness_delay_s=job.turn.delay_s(now_s)
            + self.scenario.placement.slack_s(slo, self.scenario.slo),
            origin=job.request.origin,
            adapter=job.request.adapter,
        )
        outcome = place(request, view, job.life.slo(slo), self.scenario.placement)

        def rejects() -> Rejection | None:
            assert isinstance(outcome, Placement)
            decode = self.nodes[outcome.decode.node_id] if outcome.decode else None
            outlook = self.cluster.outlook(decode, job, expected)
            return REJECTIONS[self.scenario.rejection].at_arrival(outcome, outlook, slo, now_s)

        if isinstance(outcome, Placement):
            if not job.life.num_attempts:
                self._count_demand(job, outcome.prefill)
            if outcome.decode is not None and not self.nodes[outcome.decode.node_id].fits(job):
                # Placement needs room for the prompt and one token; the simulator reserves the whole output.
                self._reject(job, "too large")
                return
        match job.life.decided(outcome, rejects):
            case Refuse(rejection):
                self._reject(job, "too large" if rejection.capacity_tokens else rejection.stage or ARRIVAL)
            case Look() as step:
                self._wait_for_node(job, step)
            case Start(placement):
                job.absent_s = -1.0
                num_blocks = -(-(job.num_tokens + expected) // self.scenario.block_tokens)
                self._start(job, self.coordination.book(conductor, placement, num_blocks), expected)

    def _limit(self, job: Job) -> int:
        """Tokens that it may still produce, as its conductor knows."""
        limit = job.request.output_tokens if self.scenario.knows_lengths else self._longest
        return limit - job.num_produced

    def _expected(self, job: Job) -> int:
        """Tokens that it will probably still produce, as its conductor expects."""
        lengths = self._conductor(job).lengths
        return lengths.expected(job.request.input_tokens, job.num_produced, self._limit(job))

    def _count_demand(self, job: Job, estimate: PrefillEstimate) -> None:
        if self.fleet is not None and estimate.local_tokens:
            self.fleet.used(estimate.node_id, estimate.local_tokens)
        self.demand.arrived(estimate.compute_s, job.num_tokens, estimate.prefix_tokens)

    def _wait_for_node(self, job: Job, step: Look) -> None:
        now_s = self.clock.now_s
        if job.absent_s < 0:
            job.absent_s = now_s
        if now_s - job.absent_s >= NODE_WAIT_S:
            self._reject(job, "no node")
        else:
            self._look_again(job, step)

    def _start(self, job: Job, placement: Placement, expected: int) -> None:
        now_s, estimate = self.clock.now_s, placement.prefill
        prefill = self.nodes[estimate.node_id]
        decode = self.nodes[placement.decode.node_id] if placement.decode else None
        order_s = now_s + placement.patience_s
        job.life.started()
        if job.life.num_attempts == 1 and job.turn is not None:
            eligible = self._conductor(job).eligible()
            job.turn.charge(
                placement,
                expected,
                num_prefill=eligible.count("prefill", now_s),
                num_decode=eligible.count("decode", now_s),
                now_s=now_s,
            )
        self.copies.note(job.keys, placement)
        job.computing = True
        prefill.jobs[job] = None
        prefill.of(job).load.begin_prefill(
            job, estimate.compute_s, placement.patience_s, starts_in_s=estimate.starts_in_s
        )
        if decode is not None and job.remaining > 1:
            decode.jobs[job] = None
            decode.add_incoming(job, estimate.ttft_s, expected)
        else:
            decode = None
        job.decodes_in_place = decode is prefill
        self._placed[job] = _Placed(prefill, decode)
        self._bring(job, prefill, placement, order_s)

    # ------------------------------------------------------------------ prefill

    def _bring(self, job: Job, node: Node, placement: Placement, order_s: float) -> None:
        """Load blocks from slow tiers, fetch blocks from another node, then queue the prefill."""
        estimate, size = placement.prefill, self.scenario.block_tokens
        usable = job.keys[: (job.num_tokens - 1) // size]
        tiers = node.memory.match(usable)
        node.memory.pin(job.hold, usable[: len(tiers)])
        job.slow = (tiers.count(Tier.HOST), tiers.count(Tier.SSD))
        wanted = min((estimate.local_tokens + estimate.fetched_tokens) // size, len(usable))
        attempt, job.fetched_blocks = job.attempt, 0

        def loaded() -> None:
            if job.attempt != attempt or not node.alive:
                return
            node.memory.bring(job.hold, usable[: len(tiers)])
            source = self.nodes.get(estimate.fetch_from)
            if wanted > len(tiers) and source is not None and source.alive:
                self._fetch(job, node, source, usable[:wanted], len(tiers), order_s)
            else:
                node.queue_prefill(job, order_s)

        def load() -> None:
            if job.attempt == attempt and node.alive:
                load_s = node.load_s(*job.slow)
                if load_s:
                    self.clock.at(self.clock.now_s + load_s, loaded)
                else:
                    loaded()

        node.adapters.bring(job, load)

    def _fetch(
        self, job: Job, node: Node, source: Node, keys: list[bytes], num_local: int, order_s: float
    ) -> None:
        """Fetch ``keys[num_local:]``, as far as ``source`` still has them, then queue the prefill."""
        keys = keys[: len(source.memory.match(keys))]
        count = len(keys) - num_local
        if count <= 0:
            node.queue_prefill(job, order_s)
            return
        held, attempt, began_s = PinnedBlocks(), job.attempt, self.clock.now_s
        source.memory.pin(held, keys)
        source.memory.use(keys)

        def fetched() -> None:
            if not source.failed:
                self.cluster.moved(job, source, node, nbytes, began_s)
            if source.alive:
                source.memory.release(held)
                source.on_blocks_released()
            if job.attempt != attempt or not node.alive:
                return
            if not source.failed:
                before = len(job.hold.pinned)
                job.fetched_blocks = node.memory.bring(job.hold, keys) - before
            node.queue_prefill(job, order_s)

        nbytes = count * self.cluster.block_nbytes
        self._conductor(job).links.begin(source.node_id, node.node_id, nbytes, self.clock.now_s)
        self.cluster.network.start(source.node_id, node.node_id, nbytes, fetched)

    def _prefilled(self, job: Job) -> None:
        """Count the prefill's token and start decoding."""
        now_s = self.clock.now_s
        placed = self._placed[job]
        node, decode = placed.prefill, placed.decode
        node.of(job).load.end_prefill(job)
        job.computing = False
        if job.first_token_s < 0:
            job.first_token_s = job.since_s = now_s
            job.num_produced = 1
            job.rtt_s = self.cluster.links.regions.between(job.request.origin, node.view.region).rtt_s
            in_time = now_s + job.rtt_s - job.request.arrival_s <= job.slo(self.scenario.slo).ttft_s
            self.demand.first_token(in_time)
            if not in_time:
                self._count_late()
        else:
            job.add_tokens(np.array([now_s - job.since_s]))
        if job.remaining == 0:
            self._finish(job)
            return
        assert decode is not None

        def rejects() -> Rejection | None:
            outlook = self.cluster.outlook(decode, job, self._expected(job))
            assert outlook is not None
            policy = REJECTIONS[self.scenario.rejection]
            return policy.before_decode(outlook, job.slo(self.scenario.slo), now_s)

        if job.life.prefilled(job.num_produced - 1, rejects) is not None:
            self._reject(job, DECODE)
            return
        decode.of(job).load.decoding(job)
        if decode is node:
            decode.decode(job)
        else:
            attempt = job.attempt

            def has_adapter() -> None:
                if job.attempt == attempt and decode.alive:
                    decode.when_blocks_free(job, self._hand_over)

            decode.adapters.bring(job, has_adapter)

    # ------------------------------------------------------------------ decode

    def _hand_over(self, job: Job) -> None:
        """Move the blocks that the decode node lacks into the blocks it has reserved."""
        placed = self._placed[job]
        node, decode, hold = placed.prefill, placed.decode, job.decode_hold
        assert decode is not None
        assert hold is not None
        hardware = node.hardware
        token_nbytes = hardware.kv_token_nbytes
        missing = max(job.num_tokens - 1 - len(hold.pinned) * self.scenario.block_tokens, 0)
        nbytes: float = missing * token_nbytes
        if job.since_s == self.clock.now_s:
            # There was room during the prefill: each chunk was sent while the next was computed. Left are the
            # last chunk, and bytes beyond the link's bandwidth.
            rate = self.cluster.network.rate_of(node.node_id, decode.node_id)
            sent = (self.clock.now_s - job.computing_s) * rate
            last = min(missing, hardware.chunk_tokens) * token_nbytes
            left = max(nbytes - sent, last)
            self.cluster.network.sent(node.node_id, decode.node_id, nbytes - left)
            nbytes = left
        attempt, began_s = job.attempt, self.clock.now_s

        def moved() -> None:
            self.cluster.moved(job, node, decode, nbytes, began_s)
            if job.attempt != attempt:
                return
            placed.hand_over = None
            if self.scenario.decode_caches:
                decode.memory.commit(hold, job.keys[len(hold.pinned) :])
            node.forget(job, job.hold)
            job.hold = PinnedBlocks()
            self.cluster.ends(node)
            decode.decode(job)

        self._conductor(job).links.begin(node.node_id, decode.node_id, round(nbytes), self.clock.now_s)
        placed.hand_over = self.cluster.network.start(node.node_id, decode.node_id, nbytes, moved)

    def _finish(self, job: Job) -> None:
        self._conductor(job).lengths.observe(job.request.input_tokens, job.request.output_tokens)
        gap_s = (job.since_s - job.first_token_s) / max(job.request.output_tokens - 1, 1)
        self.demand.ended(job.request.output_tokens, gap_s <= job.slo(self.scenario.slo).tbt_s)
        self._end(job)

    def _reject(self, job: Job, stage: str) -> None:
        self.demand.rejected()
        if job.first_token_s < 0:
            self._count_late()
        job.rejected = stage
        self._end(job)

    def _end(self, job: Job) -> None:
        job.done_s = self.clock.now_s
        self._num_open -= 1
        self._leave(job)
        self._conductor(job).leave(job)

    def _outcome(self) -> Outcome:
        jobs = self.jobs
        assert all(job.ended for job in jobs), "a request was lost"
        first_s, last_s = min(job.request.arrival_s for job in jobs), max(job.done_s for job in jobs)
        paid_s = self.cluster.paid_s(last_s, since_s=first_s)
        nodes = [*self.nodes.values(), *self.cluster.former]
        hit_tokens = Counter[str]()
        for job in jobs:
            hit_tokens.update(job.use)
        return Outcome(
            served=[served(job) for job in jobs],
            slo=self.scenario.slo,
            window_s=max(job.request.arrival_s for job in jobs) - first_s,
            span_s=last_s - first_s,
            hit_tokens=hit_tokens,
            block_tokens=self.scenario.block_tokens,
            moved_nbytes=self.cluster.network.moved_nbytes,
            egress=self.cluster.network.egress,
            prefill_busy_s=sum(node.engine.prefill_busy_s * node.hardware.num_gpus for node in nodes),
            decode_busy_s=sum(node.engine.decode_busy_s * node.hardware.num_gpus for node in nodes),
            gpu_s=sum(paid_s.get(node.node_id, 0.0) * node.hardware.num_gpus for node in nodes),
            node_s=sum(self.cluster.paid_s(last_s).values()),
            hot_copies=hot_copies(jobs, (node.memory for node in self.nodes.values())),
            num_copies=self.copies.num_made,
            num_released=self.copies.num_released,
        )
