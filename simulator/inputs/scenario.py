"""A scenario: the cluster, its policies, and the events that change it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from moonpool.conductor.admission.rejection import REJECTIONS
from moonpool.conductor.coordination.bookings import SHARE_S
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.policies import POLICIES, Policy
from moonpool.conductor.planning.plan import Rules
from moonpool.kvstore.eviction import POLICIES as EVICTION_POLICIES
from moonpool.runtime.errors import ConfigError
from moonpool.simulator.inputs.errors import Errors
from moonpool.simulator.inputs.hardware import Hardware

Role = Literal["prefill", "decode", "both"]

_KNOWN: Mapping[str, Collection[str]] = {
    "policy": POLICIES,
    "rejection": REJECTIONS,
    "host_policy": EVICTION_POLICIES,
    "ssd_policy": EVICTION_POLICIES,
}


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """A node fails (its blocks are lost) or an empty one joins."""

    at_s: float
    kind: Literal["fail", "join"]
    role: Role
    number: int = 0  # of the node that fails, within its role


@dataclass(frozen=True, slots=True)
class Elastic:
    """The planner, deciding every ``period_s``; nodes join ``join_s`` after they were asked for."""

    rules: Rules
    join_s: float = 60.0
    period_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Scenario:
    """A simulated cluster. ``num_both`` nodes (chunked prefill) exclude prefill and decode nodes."""

    hardware: Hardware
    num_prefill: int = 8
    num_decode: int = 8
    num_both: int = 0
    decode_hardware: Hardware | None = None  # None: the same
    policy: str = "goodput"
    rejection: str = "none"
    slo: Slo = field(default_factory=Slo)
    block_tokens: int = 512
    host_policy: str = "prefix"
    ssd_policy: str = "prefix"
    knows_lengths: bool = False  # a request's max_tokens are its output; otherwise the longest of all
    decode_caches: bool = True  # decode nodes cache and publish the prompts' blocks
    migrate: Collection[str] = ()  # why requests move: conductor.migrate
    replicate_nbytes_per_s: float = 0.0  # for copies of hot prefixes; 0: none
    events: Sequence[ClusterEvent] = ()
    elastic: Elastic | None = None  # None: as many nodes as at first
    regions: Sequence[str] = ()  # of the nodes of each role, in turn; empty: they have none
    region_links: Sequence[str] = ()  # conductor.region_links
    node_price: float = 1.0  # of a second: model.price
    chooser: Policy | None = None  # instead of ``policy``: one that is no option
    errors: Errors = field(default_factory=Errors)  # of what the scheduler believes
    num_conductors: int = 1  # requests go to them in turn
    share_s: float = SHARE_S  # between their reports to each other; 0: before each decision
    seed: int = 1

    def __post_init__(self) -> None:
        for key, known in _KNOWN.items():
            if getattr(self, key) not in known:
                name = key.replace("_", " ")
                raise ConfigError(f"no {name} {getattr(self, key)!r}; there are {', '.join(known)}", key=key)
        if self.num_both and (self.num_prefill or self.num_decode):
            raise ConfigError("nodes of both roles exclude prefill and decode nodes", key="both")
        if self.num_both and self.elastic is not None:
            raise ConfigError(
                "the planner is for prefill and decode nodes, not for nodes of both", key="both"
            )
        counts = {"prefill": self.num_prefill, "decode": self.num_decode, "both": self.num_both}
        for role in ("both",) if self.num_both else ("prefill", "decode"):
            if counts[role] < 1:
                raise ConfigError(f"--{role} must be 1 or more, got {counts[role]}", key=role)
        for name, value in (("ttft", self.slo.ttft_s), ("tbt", self.slo.tbt_s)):
            if not value > 0:
                raise ConfigError(f"--slo-{name} must be above 0 s, got {value:g}", key=f"slo_{name}")
        if not self.replicate_nbytes_per_s >= 0:
            raise ConfigError(
                f"--replicate must be 0 or more, got {self.replicate_nbytes_per_s:g}", key="replicate"
            )
        alone = self.replicate_nbytes_per_s or self.migrate or self.elastic is not None or self.chooser
        if self.num_conductors < 1 or (self.num_conductors > 1 and alone):
            raise ConfigError(
                "--conductors must be 1 or more; with copies (without --replicate 0), moves, a planner or a "
                f"policy of its own it must be 1, got {self.num_conductors}",
                key="conductors",
            )
        for event in self.events:
            if not counts[event.role]:
                raise ConfigError(f"--at: this cluster has no {event.role} nodes to {event.kind}", key="at")
            joined = [one for one in self.events if one.kind == "join" and one.role == event.role]
            count = counts[event.role] + sum(one.at_s <= event.at_s for one in joined)
            if event.kind == "fail" and self.elastic is None and event.number >= count:
                name = f"{event.role}-{event.number}"
                raise ConfigError(
                    f"--at: there is no {name} to fail at {event.at_s:g} s, only 0 to {count - 1}", key="at"
                )

    def blocks(self, hardware: Hardware) -> tuple[int, int, int]:
        """Return the capacities of pool, host and SSD of one node, in blocks."""
        size = self.block_tokens
        return max(hardware.pool_tokens // size, 1), hardware.host_tokens // size, hardware.ssd_tokens // size

    @property
    def placement(self) -> Policy:
        """The placement policy."""
        return self.chooser or POLICIES[self.policy]

    @property
    def num_gpus(self) -> int:
        decode = self.decode_hardware or self.hardware
        prefills = self.num_prefill + self.num_both
        return prefills * self.hardware.num_gpus + self.num_decode * decode.num_gpus
