"""What is simulated: the cluster, its rules, and what happens to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.conductor.admission.rejection import REJECTIONS
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.policies import POLICIES
from moonpool.kvstore.eviction import POLICIES as EVICTION_POLICIES
from moonpool.runtime.errors import ConfigError
from moonpool.simulator.inputs.hardware import Hardware


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """A node fails (all it holds is lost) or an empty one joins."""

    at_s: float
    kind: str  # fail or join
    role: str  # prefill, decode or both
    number: int = 0  # of the one that fails, within its role

    def __post_init__(self) -> None:
        if self.kind not in ("fail", "join"):
            raise ConfigError(f"a node can fail or join, not {self.kind!r}", key="at")
        if self.role not in ("prefill", "decode", "both"):
            raise ConfigError(f"a node's role is prefill, decode or both, not {self.role!r}", key="at")
        if self.at_s < 0:
            raise ConfigError(f"nothing can happen at {self.at_s:g} s", key="at")


@dataclass(frozen=True, slots=True)
class Scenario:
    """``num_both`` nodes prefill and decode (chunked prefill beside the batch), and then there are no others.

    ``pool_blocks`` and so on are blocks of ``block_tokens`` of one node; None: what the hardware has.
    """

    hardware: Hardware
    num_prefill: int = 8
    num_decode: int = 8
    num_both: int = 0
    decode_hardware: Hardware | None = None  # None: as the prefill nodes'
    policy: str = "goodput"
    rejection: str = "none"
    slo: Slo = field(default_factory=Slo)
    block_tokens: int = 512
    pool_blocks: int | None = None
    host_blocks: int | None = None
    ssd_blocks: int | None = None
    host_policy: str = "prefix"
    ssd_policy: str = "prefix"
    decode_keeps: bool = True  # decode nodes keep and publish the prompts' blocks
    replicate_nbytes_per_s: float = 0.0  # for copies of hot prefixes; 0: none are made
    events: Sequence[ClusterEvent] = ()
    seed: int = 1

    def __post_init__(self) -> None:
        _choose("policy", self.policy, POLICIES)
        _choose("rejection", self.rejection, REJECTIONS)
        _choose("host_policy", self.host_policy, EVICTION_POLICIES)
        _choose("ssd_policy", self.ssd_policy, EVICTION_POLICIES)
        if self.num_both and (self.num_prefill or self.num_decode):
            raise ConfigError("nodes of both roles cannot stand beside prefill or decode nodes", key="both")
        if min(self.num_prefill, self.num_decode, self.num_both) < 0:
            raise ConfigError("a cluster has 0 or more nodes of a role", key="prefill")
        if not self.num_both:
            for role, count in (("prefill", self.num_prefill), ("decode", self.num_decode)):
                if not count:
                    raise ConfigError(
                        f"a cluster without {role} nodes serves nothing: give --{role} 1 or more", key=role
                    )
        for name, value in (("ttft", self.slo.ttft_s), ("tbt", self.slo.tbt_s)):
            if not value > 0:
                raise ConfigError(f"--slo-{name} must be above 0 s, got {value:g}", key=f"slo_{name}")
        if not self.replicate_nbytes_per_s >= 0:
            raise ConfigError(
                f"--replicate must be 0 or more, got {self.replicate_nbytes_per_s:g}", key="replicate"
            )
        roles = {"prefill": self.num_prefill, "decode": self.num_decode, "both": self.num_both}
        for event in self.events:
            if not roles[event.role]:
                raise ConfigError(f"this cluster has no {event.role} nodes that could {event.kind}", key="at")

    def blocks(self, hardware: Hardware) -> tuple[int, int, int]:
        """Capacity of pool, host and SSD of one node, in blocks."""
        size = self.block_tokens
        pool = hardware.pool_tokens // size if self.pool_blocks is None else self.pool_blocks
        host = hardware.host_tokens // size if self.host_blocks is None else self.host_blocks
        ssd = hardware.ssd_tokens // size if self.ssd_blocks is None else self.ssd_blocks
        return max(pool, 1), host, ssd

    @property
    def num_gpus(self) -> int:
        decode = self.decode_hardware or self.hardware
        prefills = self.num_prefill + self.num_both
        return prefills * self.hardware.num_gpus + self.num_decode * decode.num_gpus


def _choose(key: str, name: str, known: object) -> None:
    names = list(known)  # type: ignore[call-overload]
    if name not in names:
        raise ConfigError(f"no {key.replace('_', ' ')} {name!r}; there are {', '.join(names)}", key=key)
