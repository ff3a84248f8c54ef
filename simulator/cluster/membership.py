"""The simulated cluster: its nodes, and the view that placement gets."""

from __future__ import annotations

import random
from collections.abc import Sequence

from moonpool.conductor.admission.rejection import DecodeOutlook
from moonpool.conductor.admission.tenants import EVERYWHERE, may_hold
from moonpool.conductor.costs.links import LinkModel
from moonpool.conductor.costs.model import CostModel
from moonpool.conductor.costs.regions import NEAR, RegionLink, RegionLinks
from moonpool.conductor.fleet.eligible_nodes import EligibleByRegions
from moonpool.conductor.placing.cluster_view import ClusterView
from moonpool.conductor.placing.node_table import NodeTable
from moonpool.kvstore.blocks.keys import KEY_NBYTES
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.block_map import BlockMap
from moonpool.kvstore.index.key_table import PlainKeyTable
from moonpool.kvstore.index.redis.node_record import stages_of
from moonpool.simulator.cluster.clock import Clock
from moonpool.simulator.cluster.job import Job
from moonpool.simulator.cluster.network import Network
from moonpool.simulator.cluster.node import Node, OnJob
from moonpool.simulator.cluster.reality import NodeIndex, Reality
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest


class Cluster:
    """``nodes``: by id. A node of both roles is in both tables."""

    def __init__(self, scenario: Scenario, clock: Clock, *, on_prefilled: OnJob, on_decoded: OnJob) -> None:
        hardware = scenario.hardware
        decode_hardware = scenario.decode_hardware or hardware
        rate = min(hardware.network_nbytes_per_s, decode_hardware.network_nbytes_per_s)
        self.network = Network(
            clock, nbytes_per_s=rate, latency_s=hardware.network_latency_s, between=self.between
        )
        self.costs = CostModel()
        self.links = LinkModel(
            latency_s=hardware.network_latency_s,
            nbytes_per_s=rate,
            connect_s=0.0,
            regions=RegionLinks.parse(scenario.region_links, node_price=scenario.node_price),
        )
        self.costs.links = self.links
        num_nodes = {
            "prefill": scenario.num_prefill + scenario.num_both,
            "decode": scenario.num_decode + scenario.num_both,
        }
        self._reality = Reality(scenario.errors, scenario.seed, num_nodes)
        self.block_nbytes = scenario.block_tokens * hardware.kv_token_nbytes
        self.nodes: dict[str, Node] = {}
        self.former: list[Node] = []  # those that failed or left
        self.ordered_s: dict[str, float] = {}  # when each node was asked for
        self.ended_s: dict[str, float] = {}
        self.prefill = NodeTable()
        self.decode = NodeTable()
        self._scenario = scenario
        self._clock = clock
        # Single blocks change here most often, and a dict has no call of a library.
        self._index = BlockMap(PlainKeyTable)
        self._hardware = {"prefill": hardware, "decode": decode_hardware, "both": hardware}
        self._on_prefilled = on_prefilled
        self._on_decoded = on_decoded
        self._eligible = EligibleByRegions()
        self._numbers = {"prefill": 0, "decode": 0, "both": 0}
        self._names: dict[int, bytes] = {}
        self._parents: dict[bytes, bytes] = {}
        self._roles: dict[str, str] = {}  # of nodes
        self._retiring: dict[Node, None] = {}
        self._rng = random.Random(scenario.seed)
        self._turn = 0
        counts = {"prefill": scenario.num_prefill, "decode": scenario.num_decode, "both": scenario.num_both}
        for role, count in counts.items():
            for _ in range(count):
                self.join(role)

    def between(self, source: str, target: str) -> RegionLink:
        """What lies between two nodes."""
        if not self.links.regions:
            return NEAR
        return self.links.regions.between(self.links.region_of(source), self.links.region_of(target))

    def keys_of(self, request: TraceRequest) -> list[bytes]:
        """Return the keys of the prompt's full blocks."""
        names, keys = self._names, list[bytes]()
        for block_id in request.block_ids[: request.input_tokens // self._scenario.block_tokens]:
            key = names.get(block_id)
            if key is None:
                key = names[block_id] = block_id.to_bytes(KEY_NBYTES, "little")
                if keys:
                    self._parents[key] = keys[-1]
            keys.append(key)
        return keys

    # ------------------------------------------------------------------ nodes come and go

    def join(self, role: str, ordered_s: float | None = None) -> None:
        """Add an empty node. ``ordered_s``: when it was asked for; None: now."""
        number = self._numbers[role]
        self._numbers[role] += 1
        name = f"{role}-{number}"
        self.network.factors[name] = self._reality.link_factor()
        node = Node(
            name,
            self._hardware[role],
            self._scenario,
            self._clock,
            NodeIndex(name, self._index, self._clock, self._reality),
            self._parents,
            self.costs,
            self._reality,
            on_prefilled=self._on_prefilled,
            on_decoded=self._on_decoded,
            on_load=self._touch,
        )
        regions = self._scenario.regions
        node.view.region = regions[number % len(regions)] if regions else ""
        self.links.place(name, node.view.region)
        self.nodes[node.node_id] = node
        self._give(node, role)
        self.ordered_s[node.node_id] = self._clock.now_s if ordered_s is None else ordered_s
        tables = self._tables(role)
        # Start at the minimum of its peers, not at zero: otherwise it would get every request.
        node.view.num_placed = min((view.num_placed for view in tables[0]), default=0)
        for table in tables:
            table.add(node.view)
        self._touch(node)

    def switch(self, node: Node, role: str) -> None:
        """Change the role of a node; its blocks stay, and its jobs end there."""
        self._forget(node)
        self._give(node, role)
        for table in self._tables(role):
            table.add(node.view)
        self._touch(node)

    def handing_on(self) -> set[str]:
        """Nodes that should hand on the requests that decode there: they end, or no longer decode."""
        retiring = {node.node_id for node in self._retiring}
        return retiring | {name for name in self.nodes if self.decode.get(name) is None}

    def retire(self, node: Node) -> None:
        """Give a node nothing new, and end it once it has finished its jobs (see ``ends``)."""
        self._retiring[node] = None
        self._forget(node)
        self.ends(node)

    def ends(self, node: Node) -> None:
        """A job of the node has ended: let the node go if it retires and has no other."""
        if node in self._retiring and not node.jobs:
            del self._retiring[node]
            del self.nodes[node.node_id]
            self._gone(node)

    def _forget(self, node: Node) -> None:
        for table in self._tables(self._roles[node.node_id]):
            table.remove(node.view)
        node.stages = ()
        self._eligible.drop(node)

    def _give(self, node: Node, role: str) -> None:
        self._roles[node.node_id] = role
        node.stages, node.view.computes_rest = stages_of(role), role == "decode"

    def _gone(self, node: Node) -> None:
        self.former.append(node)
        self.ended_s[node.node_id] = self._clock.now_s
        node.stop()

    def node_s(self, until_s: float) -> float:
        """Seconds that nodes were paid for, from when they were asked for to when they ended."""
        return sum(self.ended_s.get(name, until_s) - at_s for name, at_s in self.ordered_s.items())

    def fail(self, role: str, number: int) -> Node | None:
        """Remove a node and its blocks; the caller places its jobs again. None: there is no such node."""
        node = self.nodes.pop(f"{role}-{number}", None)
        if node is not None:
            self._gone(node)
            if node in self._retiring:
                del self._retiring[node]
            else:
                self._forget(node)
        return node

    def _tables(self, role: str) -> list[NodeTable]:
        tables = {"prefill": self.prefill, "decode": self.decode}
        return [tables[stage] for stage in stages_of(role)]

    def _touch(self, node: Node) -> None:
        self.prefill.touch(node.view)
        self.decode.touch(node.view)
        if node.stages:
            self._eligible.put(node, self._clock.now_s)

    # ------------------------------------------------------------------ what placement sees

    def available(self, role: str) -> int:
        """Number of nodes of a role that requests may go to now."""
        now_s = self._clock.now_s
        return self._eligible.within(EVERYWHERE, self.nodes.values(), now_s).count(role, now_s)

    def holders(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Return the number of leading blocks that each node holds."""
        return self._index.longest_prefix(keys)

    def view(self, job: Job) -> ClusterView:
        """Return the current view for one decision, with the next turn and random draw."""
        self._turn += 1
        for view in self.decode:
            self.nodes[view.node_id].refresh()
        keys, now_s = job.keys, self._clock.now_s
        eligible = self._eligible.within(job.request.regions, self.nodes.values(), now_s)
        prefixes = self._index.longest_prefix(keys)
        if regions := job.request.regions:
            prefixes = {
                node_id: num_blocks
                for node_id, num_blocks in prefixes.items()
                if may_hold(regions, self.links.region_of(node_id))
            }
        return ClusterView(
            prefill=eligible.of("prefill", now_s),
            decode=eligible.of("decode", now_s),
            prefix_blocks=prefixes,
            slow_blocks=self._slow(keys, prefixes),
            links=self.links,
            block_size=self._scenario.block_tokens,
            block_nbytes=self.block_nbytes,
            now_s=now_s,
            turn=self._turn - 1,
            draw=self._rng.random(),
        )

    def _slow(self, keys: Sequence[bytes], prefixes: dict[str, int]) -> dict[str, tuple[int, int]]:
        """Return the blocks of each node's prefix in host memory and on SSD."""
        slow: dict[str, tuple[int, int]] = {}
        if not any(node.memory.has_lower_tiers for node in self.nodes.values()):
            return slow
        for node_id, count in prefixes.items():
            tiers = self.nodes[node_id].memory.match(keys[:count])
            host, ssd = tiers.count(Tier.HOST), tiers.count(Tier.SSD)
            if host or ssd:
                slow[node_id] = (host, ssd)
        return slow

    def moved(self, source: Node, target: Node, nbytes: float, began_s: float) -> None:
        """Learn from a transfer that has ended."""
        if self._scenario.errors:
            now_s = self._clock.now_s
            self.costs.observe_transfer(
                source.node_id, target.node_id, nbytes=round(nbytes), actual_s=now_s - began_s, now_s=now_s
            )

    def outlook(self, decode: Node | None, job: Job, expected: int) -> DecodeOutlook | None:
        if decode is None:
            return None
        return DecodeOutlook(
            view=decode.refresh(),
            schedule=decode.load.schedule,
            num_tokens=job.num_tokens,
            expected_tokens=expected,
            block_size=self._scenario.block_tokens,
            key=job,
        )
