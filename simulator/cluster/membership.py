"""The simulated cluster: its nodes, and the view that placement gets."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.conductor.admission.rejection import DecodeOutlook
from moonpool.conductor.admission.tenants import may_hold
from moonpool.conductor.costs.regions import NEAR, RegionLink
from moonpool.conductor.placing.cluster_view import ClusterView
from moonpool.kvstore.blocks.keys import KEY_NBYTES
from moonpool.kvstore.blocks.tier import Tier
from moonpool.kvstore.index.block_map import BlockMap
from moonpool.kvstore.index.key_table import PlainKeyTable
from moonpool.kvstore.index.redis.node_record import stages_of
from moonpool.simulator.cluster.clock import Clock
from moonpool.simulator.cluster.conductor import Conductor
from moonpool.simulator.cluster.job import Job
from moonpool.simulator.cluster.network import Network
from moonpool.simulator.cluster.node import Node, OnJob
from moonpool.simulator.cluster.reality import NodeIndex, Reality
from moonpool.simulator.inputs.scenario import Scenario
from moonpool.simulator.inputs.trace import TraceRequest


class Cluster:
    """``nodes``: by id. ``costs``, ``links``, ``prefill`` and ``decode`` are those of the first conductor."""

    def __init__(self, scenario: Scenario, clock: Clock, *, on_prefilled: OnJob, on_decoded: OnJob) -> None:
        hardware = scenario.hardware
        decode_hardware = scenario.decode_hardware or hardware
        rate = min(hardware.network_nbytes_per_s, decode_hardware.network_nbytes_per_s)
        self.network = Network(
            clock, nbytes_per_s=rate, latency_s=hardware.network_latency_s, between=self.between
        )
        self.conductors = [
            Conductor(number, scenario, clock, nbytes_per_s=rate) for number in range(scenario.num_conductors)
        ]
        first = self.conductors[0]
        self.costs, self.links = first.costs, first.links
        self.prefill, self.decode = first.prefill, first.decode
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
        self._scenario = scenario
        self._clock = clock
        # Single blocks change here most often, and a dict has no call of a library.
        self._index = BlockMap(PlainKeyTable)
        self._hardware = {"prefill": hardware, "decode": decode_hardware, "both": hardware}
        self._on_prefilled = on_prefilled
        self._on_decoded = on_decoded
        self._numbers = {"prefill": 0, "decode": 0, "both": 0}
        self._names: dict[int, bytes] = {}
        self._parents: dict[bytes, bytes] = {}
        self._retiring: dict[Node, None] = {}
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
            [conductor.costs for conductor in self.conductors],
            self._reality,
            on_prefilled=self._on_prefilled,
            on_decoded=self._on_decoded,
            on_load=lambda member: self.conductors[member.conductor].touch(member),
        )
        regions = self._scenario.regions
        self.nodes[node.node_id] = node
        self.ordered_s[node.node_id] = self._clock.now_s if ordered_s is None else ordered_s
        for conductor, member in zip(self.conductors, node.members, strict=True):
            member.view.region = regions[number % len(regions)] if regions else ""
            conductor.links.place(name, member.view.region)
            # Start at the minimum of its peers, not at zero: otherwise it would get every request.
            peers = conductor.prefill if "prefill" in stages_of(role) else conductor.decode
            member.view.num_placed = min((view.num_placed for view in peers), default=0)
        self._give(node, role)

    def switch(self, node: Node, role: str) -> None:
        """Change the role of a node; its blocks stay, and its jobs end there."""
        self._forget(node)
        self._give(node, role)

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
        for conductor, member in zip(self.conductors, node.members, strict=True):
            conductor.drop(member)

    def _give(self, node: Node, role: str) -> None:
        for conductor, member in zip(self.conductors, node.members, strict=True):
            conductor.use(member, role)

    def _gone(self, node: Node) -> None:
        self.former.append(node)
        self.ended_s[node.node_id] = self._clock.now_s
        for conductor in self.conductors:
            del conductor.members[node.node_id]
        node.stop()

    def paid_s(self, until_s: float, since_s: float = 0.0) -> dict[str, float]:
        """Seconds of this time that each node was paid for, from when it was asked for to when it ended."""
        ends_s = {name: min(self.ended_s.get(name, until_s), until_s) for name in self.ordered_s}
        return {name: max(ends_s[name] - max(at_s, since_s), 0.0) for name, at_s in self.ordered_s.items()}

    def fail(self, role: str, number: int) -> Node | None:
        """Remove a node and its blocks; the caller places its jobs again. None: there is no such node."""
        node = self.nodes.pop(f"{role}-{number}", None)
        if node is not None:
            node.failed = True
            self._gone(node)
            self.network.lose(node.node_id)
            if node in self._retiring:
                del self._retiring[node]
            else:
                self._forget(node)
        return node

    # ------------------------------------------------------------------ what placement sees

    def holders(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Return the number of leading blocks that each node holds."""
        return self._index.longest_prefix(keys)

    def view(self, job: Job) -> ClusterView:
        """Return its conductor's view for one decision, with the next turn and random draw."""
        conductor = self.conductors[job.conductor]
        conductor.turn += 1
        for node in conductor.decode:
            self.nodes[node.node_id].refresh(job.conductor)
        keys, now_s = job.keys, self._clock.now_s
        eligible = conductor.eligible(job.request.regions)
        prefixes = self._index.longest_prefix(keys)
        if regions := job.request.regions:
            prefixes = {
                node_id: num_blocks
                for node_id, num_blocks in prefixes.items()
                if may_hold(regions, self.links.region_of(node_id))
            }
        return ClusterView(
            prefill=eligible.of("prefill", now_s, job.life.avoid),
            decode=eligible.of("decode", now_s, job.life.avoid),
            prefix_blocks=prefixes,
            slow_blocks=self._slow(keys, prefixes),
            links=conductor.links,
            block_size=self._scenario.block_tokens,
            block_nbytes=self.block_nbytes,
            now_s=now_s,
            turn=conductor.turn - 1,
            draw=conductor.rng.random(),
            avoid=job.life.avoid,
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

    def moved(self, job: Job, source: Node, target: Node, nbytes: float, began_s: float) -> None:
        """Its conductor learns from a transfer that has ended."""
        if self._scenario.errors:
            now_s = self._clock.now_s
            self.conductors[job.conductor].costs.observe_transfer(
                source.node_id, target.node_id, nbytes=round(nbytes), actual_s=now_s - began_s, now_s=now_s
            )

    def outlook(self, decode: Node | None, job: Job, expected: int) -> DecodeOutlook | None:
        if decode is None:
            return None
        return DecodeOutlook(
            view=decode.refresh(job.conductor),
            schedule=decode.of(job).load.schedule,
            num_tokens=job.num_tokens,
            expected_tokens=expected,
            block_size=self._scenario.block_tokens,
            key=job,
        )
