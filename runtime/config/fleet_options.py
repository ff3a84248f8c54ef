"""Options of the fleet: where nodes come from, and how many there should be."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.runtime.config.section import Section, option, require


@dataclass(frozen=True, slots=True)
class FleetOptions(Section, name="fleet"):
    provider: str = option(
        "none",
        "name",
        "what starts and stops nodes for a conductor: none, local (`moonpool up`), ray or kubernetes",
        choices=("none", "local", "ray", "kubernetes"),
    )
    supervisor: str = option(
        "", "address", "host:port of the process that supplies local nodes; `moonpool up` sets it"
    )
    ray: str = option(
        "auto",
        "address",
        "Ray cluster: auto (of this machine), its HOST:PORT from inside, or ray://HOST:PORT from outside",
    )
    kubeconfig: str = option(
        "", "path", "file with the address and credentials of Kubernetes; empty: those of this pod's account"
    )
    namespace: str = option("moonpool", "name", "Kubernetes namespace of the nodes' workloads")
    selector: str = option(
        "app.kubernetes.io/part-of=moonpool",
        "labels",
        "labels of the workloads to scale and of their pods; app.kubernetes.io/component tells the role",
    )

    def _check(self) -> None:
        given = bool(self.supervisor) == (self.provider == "local")
        require(given, "fleet.supervisor", "set with fleet.provider=local, and only then", self.supervisor)


@dataclass(frozen=True, slots=True)
class PlannerOptions(Section, name="planner"):
    mode: str = option(
        "off",
        "name",
        "whether a conductor plans the number of nodes: off, advise (says what it would do) or act",
        choices=("off", "advise", "act"),
    )
    prefill_least: int = option(1, "nodes", "fewest prefill nodes", least=1)
    prefill_most: int = option(8, "nodes", "most prefill nodes", least=1)
    decode_least: int = option(1, "nodes", "fewest decode nodes", least=1)
    decode_most: int = option(8, "nodes", "most decode nodes", least=1)
    spare: int = option(1, "nodes", "nodes of each role beyond the load, for the loss of one", least=0)
    min_warm: int = option(
        1,
        "nodes",
        "0: the model's first nodes are started by the provider when a request asks for it, and ended after "
        "planner.hold_s without any; 1: they stay",
        least=0,
        most=1,
    )
    attained: float = option(
        0.95, "fraction", "requests that should keep conductor.slo_ttft_s and slo_tbt_s", above=0, most=0.999
    )
    hold_s: float = option(
        300.0, "seconds", "how long a node must not have been needed until it is removed", above=0
    )

    def _check(self) -> None:
        for role in ("prefill", "decode"):
            least, most = getattr(self, f"{role}_least"), getattr(self, f"{role}_most")
            require(least <= most, f"planner.{role}_most", f"at least planner.{role}_least ({least})", most)
