"""A network namespace at the other end of real (virtual) cables that can be pulled."""

from __future__ import annotations

import os
import shutil
import subprocess


class Cabled:
    """``name``: of the namespace. ``hosts``: its addresses, one for each cable."""

    def __init__(self, num_cables: int) -> None:
        number = os.getpid()
        self.name = f"moonpool-{number}"
        self.hosts: list[str] = []
        _ip("netns", "add", self.name)
        for cable in range(num_cables):
            near, far = self._ends(cable)
            # Of the networks set aside for benchmarks.
            net = f"198.{18 + cable % 2}.{number % 64 * 4 + cable // 2}"
            _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", self.name)
            _ip("address", "add", f"{net}.1/24", "dev", near)
            _ip("-netns", self.name, "address", "add", f"{net}.2/24", "dev", far)
            _ip("link", "set", near, "up")
            self.plug(cable)
            self.hosts.append(f"{net}.2")

    def pull(self, cable: int) -> None:
        """Neither end is told anything."""
        _ip("-netns", self.name, "link", "set", self._ends(cable)[1], "down")

    def plug(self, cable: int) -> None:
        _ip("-netns", self.name, "link", "set", self._ends(cable)[1], "up")

    def close(self) -> None:
        """Both ends of the cables go with the namespace."""
        _ip("netns", "delete", self.name)

    def _ends(self, cable: int) -> tuple[str, str]:
        number = os.getpid()
        return f"mp{number}a{cable}", f"mp{number}b{cable}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def obstacle() -> str:
    """Why there can be none here; empty when there can."""
    if shutil.which("ip") is None:
        return "there is no ip (iproute2)"
    if os.geteuid() != 0 or subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        return "network namespaces need root"
    return ""
