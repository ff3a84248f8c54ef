"""The devices of this host that bytes can leave by, as the kernel shows them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_RDMA = Path("/sys/class/infiniband")
_NET = Path("/sys/class/net")


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """rate: as the driver words it. numa_node: -1 where there is but one, or the kernel does not say."""

    name: str
    active: bool
    rate: str
    numa_node: int

    def __str__(self) -> str:
        near = f"NUMA node {self.numa_node}" if self.numa_node >= 0 else "no NUMA node"
        return f"{self.name} ({self.rate or 'unknown rate'}, {near}{'' if self.active else ', not active'})"


@dataclass(frozen=True, slots=True)
class Interface:
    """mbit_s: 0 where the driver does not say, as for virtual ones."""

    name: str
    up: bool
    mbit_s: int
    numa_node: int

    def __str__(self) -> str:
        speed = f"{self.mbit_s / 1000:g} Gbit/s" if self.mbit_s else "unknown speed"
        near = f", NUMA node {self.numa_node}" if self.numa_node >= 0 else ""
        return f"{self.name} ({speed}{near}{'' if self.up else ', down'})"


def rdma_devices(root: Path = _RDMA) -> list[RdmaDevice]:
    found = []
    for device in sorted(root.glob("*")):
        ports = sorted((device / "ports").glob("*"))
        states = [_text(port / "state") for port in ports]
        rate = next((text for port in ports if (text := _text(port / "rate"))), "")
        active = any("ACTIVE" in state for state in states)
        found.append(RdmaDevice(device.name, active, rate, _number(device / "device" / "numa_node", -1)))
    return found


def interfaces(root: Path = _NET) -> list[Interface]:
    """Those that lead to other hosts: not the loopback."""
    found = []
    for device in sorted(root.glob("*")):
        if device.name == "lo":
            continue
        # A bridge or a virtual device may be "unknown" and carry traffic.
        up = _text(device / "operstate") in ("up", "unknown")
        mbit_s = max(_number(device / "speed", 0), 0)
        found.append(Interface(device.name, up, mbit_s, _number(device / "device" / "numa_node", -1)))
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
