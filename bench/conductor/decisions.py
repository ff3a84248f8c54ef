"""Decisions per second against the number of nodes and of blocks, in a made-up cluster."""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import thread_time

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import percentiles
from moonpool.conductor.costs.links import LinkModel
from moonpool.conductor.costs.model import CostModel, Profile
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.cluster_view import ClusterView, PlaceRequest
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.conductor.placing.node_view import NodeView
from moonpool.conductor.placing.place import place
from moonpool.conductor.placing.placement import Placement
from moonpool.conductor.placing.policies import POLICIES, Policy
from moonpool.kvstore.blocks.keys import BlockKey, unpack
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.block_map import BlockMap
from moonpool.runtime.reports.report import Curve, Row

CHAIN_BLOCKS = 128
BLOCK_SIZE = 16
BLOCK_NBYTES = 2 << 20
# Copies of a prefix in a cluster: most have one, system prompts many.
_COPIES = (1, 1, 1, 2, 4)
# With more nodes the registry asks for groups instead of names.
_MANY = 64

_PROFILE = Profile(
    prefill_base_s=5e-3,
    prefill_token_s=1e-4,
    prefill_attention_s=1e-9,
    decode_base_s=8e-3,
    decode_sequence_s=1e-4,
    decode_context_s=2e-9,
)


@dataclass(frozen=True, slots=True)
class Request:
    """One request to be placed."""

    keys: Sequence[BlockKey]
    num_tokens: int


class Population:
    """Half of the nodes prefill, half decode; about ``num_blocks`` different blocks lie on them."""

    def __init__(self, num_nodes: int, num_blocks: int, policy: str, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self._policy: Policy = POLICIES[policy]
        self._links = LinkModel()
        self._map = BlockMap()
        self._turn = 0
        cost_model = CostModel()
        roles = {"p": num_nodes // 2, "d": num_nodes - num_nodes // 2}
        self._names = [f"{role}{i}" for role, count in roles.items() for i in range(count)]
        nodes = {}
        for name in self._names:
            self._map.join(name)
            nodes[name] = self._node(name, cost_model)
        self.prefill = NodeTable(nodes[f"p{i}"] for i in range(roles["p"]))
        self.decode = NodeTable(nodes[f"d{i}"] for i in range(roles["d"]))
        self._prefills: deque[tuple[NodeView, int]] = deque()  # that have not ended, oldest first
        self._chains = self._fill(max(num_blocks // CHAIN_BLOCKS, 1))

    @property
    def num_blocks(self) -> int:
        return self._map.num_blocks

    def request(self) -> Request:
        """A prompt of 128 blocks and a few tokens, the first part of it known to the cluster."""
        known = self._rng.choice(self._chains)
        cut = self._rng.randrange(CHAIN_BLOCKS + 1) * 16
        rest = self._rng.randbytes(CHAIN_BLOCKS * 16 - cut)
        return Request(unpack(known[:cut] + rest), CHAIN_BLOCKS * BLOCK_SIZE + 5)

    def match(self, keys: Sequence[BlockKey]) -> dict[str, int]:
        """The blocks of the chain's prefix on each node."""
        return self._map.longest_prefix(keys)

    def decide(self, request: Request, now_s: float) -> Placement:
        """Place a request as a conductor does: look its blocks up, choose, update the loads."""
        self._turn += 1
        keys = request.keys
        many = len(self._names) > _MANY
        prefixes = self._map.prefix_map(keys) if many else self._map.longest_prefix(keys)
        view = ClusterView(
            prefill=self.prefill,
            decode=self.decode,
            prefix_blocks=prefixes,
            slow_blocks=self._map.slow_blocks(keys, prefixes),
            links=self._links,
            block_size=BLOCK_SIZE,
            block_nbytes=BLOCK_NBYTES,
            now_s=now_s,
            turn=self._turn,
            draw=self._rng.random(),
        )
        wanted = PlaceRequest(request.num_tokens, 1000, 200, deadline_s=300.0)
        placement = place(wanted, view, Slo(30.0, 0.1), self._policy)
        assert isinstance(placement, Placement), placement
        self._update_loads(placement, now_s)
        return placement

    def _update_loads(self, placement: Placement, now_s: float) -> None:
        """Change the nodes' loads, and the tables that decisions are made from."""
        prefill = self.prefill.get(placement.prefill.node_id)
        assert prefill is not None and placement.decode is not None
        prefill.queue.add(
            self._turn,
            order_s=now_s + placement.patience_s,
            compute_s=placement.prefill.compute_s,
            now_s=now_s,
        )
        prefill.num_placed += 1
        self.prefill.touch(prefill)
        # As many end as begin.
        self._prefills.append((prefill, self._turn))
        if len(self._prefills) > len(self.prefill):
            done, turn = self._prefills.popleft()
            done.queue.remove(turn, now_s)
            self.prefill.touch(done)
        decode = self.decode.get(placement.decode.node_id)
        assert decode is not None
        decode.num_running += 1
        decode.num_context_tokens += placement.prefill.local_tokens
        decode.num_placed += 1
        self.decode.touch(decode)
        ended = self.decode[self._rng.randrange(len(self.decode))]
        ended.num_running = max(ended.num_running - 1, 0)
        self.decode.touch(ended)

    def _node(self, name: str, cost_model: CostModel) -> NodeView:
        running = self._rng.randrange(64)
        return NodeView(
            name,
            cost_model.node(_PROFILE),
            num_running=running,
            num_context_tokens=2000 * running,
            num_free_blocks=20_000,
            num_blocks=40_000,
            slot=self._map.slot_of(name),
        )

    def _fill(self, num_chains: int) -> list[bytes]:
        chains = []
        for _ in range(num_chains):
            chain = self._rng.randbytes(CHAIN_BLOCKS * 16)
            chains.append(chain)
            for name in self._rng.sample(self._names, min(self._rng.choice(_COPIES), len(self._names))):
                self._map.store(name, chain, Tier.POOL)
        return chains


_WARM_UP = 200
# (nodes, blocks): 1,024 nodes have the goal; cost grows from 256 to 4,096.
_QUICK = ((16, 10_000), (64, 10_000))
_USUAL = ((16, 100_000), (256, 100_000), (1024, 1_000_000), (4096, 1_000_000))
_FULL = (
    *((16, 10_000), (16, 1_000_000), (64, 1_000_000), (256, 1_000_000), (1024, 1_000_000)),
    *((4096, 1_000_000), (1024, 10_000), (1024, 100_000), (1024, 10_000_000)),
)


@dataclass(frozen=True, slots=True)
class Settings:
    """decisions: for each size. requests: over HTTP."""

    policy: str
    decisions: int
    requests: int
    full: bool


def scale_rows(run: Run, settings: Settings) -> Iterator[Row]:
    """One case a size; the last row compares 4,096 nodes with 256."""
    medians_s: dict[int, float] = {}
    lines: dict[str, list[tuple[float, float]]] = {}
    for num_nodes, num_blocks in _FULL if settings.full else _QUICK if run.quick else _USUAL:
        run.say(f"{num_nodes:,} nodes, {num_blocks:,} blocks")
        seconds = measure(Population(num_nodes, num_blocks, settings.policy), settings.decisions)
        case = f"{settings.policy}, {num_nodes:,} nodes, {num_blocks:,} blocks, prompts of 128 blocks"
        yield Row(case, "decisions", len(seconds) / sum(seconds), "decisions/s")
        cost = percentiles(seconds, 1e6)
        yield Row(case, "CPU of a decision, p99", cost["p99"], "µs", **cost)
        medians_s[num_nodes] = median(seconds)
        for name, value in (("p50", cost["p50"]), ("p99", cost["p99"])):
            lines.setdefault(f"{num_blocks:,} blocks, {name}", []).append((num_nodes, value))
    for name, points in lines.items():
        title = f"{settings.policy}: prompts of 128 blocks"
        run.curves.append(Curve(title, name, "nodes", "CPU µs of a decision", points))
    if {256, 4096} <= medians_s.keys():
        yield Row("growth", "cost at 4,096 nodes over 256", medians_s[4096] / medians_s[256], "×")


def measure(population: Population, decisions: int) -> list[float]:
    """CPU seconds of each decision with the look-up of its blocks, without making the prompt.

    They are the thread's: other work on the machine does not count, as a conductor has a core of its own.
    """
    seconds, now_s = [], 0.0
    gc.collect()
    gc.freeze()  # millions of keys, which a conductor's collector does not go through either
    try:
        for i in range(_WARM_UP + decisions):
            request = population.request()
            now_s += 1e-3
            began_s = thread_time()
            population.decide(request, now_s)
            if i >= _WARM_UP:
                seconds.append(thread_time() - began_s)
    finally:
        gc.unfreeze()
    return seconds
