"""The RDMA devices and network interfaces of this host, from /sys."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moonpool.runtime.machine.processor import own_numa_nodes

_RDMA = Path("/sys/class/infiniband")
_NET = Path("/sys/class/net")
_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """rate: the driver's text. numa_node: -1 if unknown, or if there is only one.

    distance: the kernel's, from the processors this process may run on. 10: the same node, 0: unknown.
    """

    name: str
    active: bool
    rate: str
    numa_node: int
    distance: int = 0

    def __str__(self) -> str:
        near = _near(self.numa_node, self.distance) or "no NUMA node"
        return f"{self.name} ({self.rate or 'unknown rate'}, {near}{'' if self.active else ', not active'})"


@dataclass(frozen=True, slots=True)
class Interface:
    """mbit_s: 0 if unknown, as for virtual interfaces. The rest as for ``RdmaDevice``."""

    name: str
    up: bool
    mbit_s: int
    numa_node: int
    distance: int = 0

    def __str__(self) -> str:
        speed = f"{self.mbit_s / 1000:g} Gbit/s" if self.mbit_s else "unknown speed"
        near = _near(self.numa_node, self.distance)
        return f"{self.name} ({speed}{near and f', {near}'}{'' if self.up else ', down'})"


def _near(numa_node: int, distance: int) -> str:
    if numa_node < 0:
        return ""
    return f"NUMA node {numa_node}" + (f" at distance {distance}" if distance else "")


def rdma_devices(root: Path = _RDMA, nodes: Path = _NODES) -> list[RdmaDevice]:
    """The RDMA devices, nearest first."""
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
    """The number of active devices at the smallest distance: a batch is spread over them."""
    distances = [device.distance for device in devices if device.active]
    return distances.count(min(distances)) if distances else 0


def numa_distance(node: int, nodes: Path = _NODES) -> int:
    """Distance from the nearest node that this process may run on; 0: unknown."""
    row = _text(nodes / f"node{node}" / "distance").split()
    return min((int(row[own]) for own in own_numa_nodes(nodes) if own < len(row)), default=0)


def interfaces(root: Path = _NET, nodes: Path = _NODES) -> list[Interface]:
    """All network interfaces but the loopback."""
    found = []
    for device in sorted(root.glob("*")):
        if device.name == "lo":
            continue
        # A bridge or virtual device that works may report "unknown".
        up = _text(device / "operstate") in ("up", "unknown")
        mbit_s = max(_number(device / "speed", 0), 0)
        node = _number(device / "device" / "numa_node", -1)
        found.append(Interface(device.name, up, mbit_s, node, numa_distance(node, nodes)))
    return found


def _text(file: Path) -> str:
    # Reading the speed of an interface that is down fails with EINVAL.
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


def _number(file: Path, otherwise: int) -> int:
    try:
        return int(_text(file))
    except ValueError:
        return otherwise
