"""The devices of this host that bytes can leave by, as the kernel shows them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_RDMA = Path("/sys/class/infiniband")
_NET = Path("/sys/class/net")
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """rate: as the driver words it. numa_node: -1 where there is but one, or the kernel does not say.
    distance: from the processors this process may run on, as the kernel counts it; 10: same node, 0: unknown.
    """

    name: str
    active: bool
    rate: str
    numa_node: int
    distance: int = 0

    def __str__(self) -> str:
        near = f"NUMA node {self.numa_node}" if self.numa_node >= 0 else "no NUMA node"
        near += f" at distance {self.distance}" if self.distance else ""
        return f"{self.name} ({self.rate or 'unknown rate'}, {near}{'' if self.active else ', not active'})"


@dataclass(frozen=True, slots=True)
class Interface:
    """mbit_s: 0 where the driver does not say, as for virtual ones. The rest as of an ``RdmaDevice``."""

    name: str
    up: bool
    mbit_s: int
    numa_node: int
    distance: int = 0

    def __str__(self) -> str:
        speed = f"{self.mbit_s / 1000:g} Gbit/s" if self.mbit_s else "unknown speed"
        near = f", NUMA node {self.numa_node}" if self.numa_node >= 0 else ""
        near += f" at distance {self.distance}" if self.distance else ""
        return f"{self.name} ({speed}{near}{'' if self.up else ', down'})"


def rdma_devices(root: Path = _RDMA, nodes: Path = _NODES) -> list[RdmaDevice]:
    """The nearest first."""
    found = []
    for device in sorted(root.glob("*")):
        ports = sorted((device / "ports").glob("*"))
        states = [_text(port / "state") for port in ports]
        rate = next((text for port in ports if (text := _text(port / "rate"))), "")
        active = any("ACTIVE" in state for state in states)
        node = _number(device / "device" / "numa_node", -1)
        found.append(RdmaDevice(device.name, active, rate, node, numa_distance(node, nodes)))
    return sorted(found, key=lambda device: device.distance)


def num_rdma_rails(devices: list[RdmaDevice]) -> int:
    """How many of them a batch is spread over: the active ones that are nearest."""
    distances = [device.distance for device in devices if device.active]
    return distances.count(min(distances)) if distances else 0


def numa_distance(node: int, nodes: Path = _NODES) -> int:
    """From the nearest of the nodes that this process may run on; 0 where it cannot be told."""
    cpus = os.sched_getaffinity(0)
    ours = [
        int(folder.name.removeprefix("node"))
        for folder in nodes.glob("node[0-9]*")
        if cpus.intersection(_cpus(_text(folder / "cpulist")))
    ]
    row = _text(nodes / f"node{node}" / "distance").split()
    return min((int(row[own]) for own in ours if own < len(row)), default=0)


def _cpus(ranges: str) -> set[int]:
    """Of the kernel's way to write them, such as 0-3,8."""
    found: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def interfaces(root: Path = _NET, nodes: Path = _NODES) -> list[Interface]:
    """Those that lead to other hosts: not the loopback."""
    found = []
    for device in sorted(root.glob("*")):
        if device.name == "lo":
            continue
        # A bridge or a virtual device may be "unknown" and carry traffic.
        up = _text(device / "operstate") in ("up", "unknown")
        mbit_s = max(_number(device / "speed", 0), 0)
        node = _number(device / "device" / "numa_node", -1)
        found.append(Interface(device.name, up, mbit_s, node, numa_distance(node, nodes)))
    return found


def _text(file: Path) -> str:
    # An interface that is down refuses to tell its speed with EINVAL.
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(file: Path, otherwise: int) -> int:
    try:
        return int(_text(file))
    except ValueError:
        return otherwise
