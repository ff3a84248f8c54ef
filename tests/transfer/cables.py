"""A network namespace at the other end of real (virtual) cables that can be pulled."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess

_LETTERS = "abcdefghijklmnopqrstuvw"
_NUMBERS = itertools.count()


class Cabled:
    """``name``: of the namespace. ``hosts``: its addresses, one for each of two cables."""

    def __init__(self) -> None:
        # The kernel takes its time to remove the last one's cables, and what goes to their networks meanwhile
        # goes astray: so each has names and networks of its own.
        number = next(_NUMBERS)
        self._prefix = f"mp{os.getpid()}{_LETTERS[number % len(_LETTERS)]}"
        self._network = (os.getpid() + number) % 256
        self.name = f"moonpool-{self._prefix}"
        self.hosts: list[str] = []
        _ip("netns", "add", self.name)
        try:
            self._lay()
        except BaseException:
            self.close()
            raise

    def _lay(self) -> None:
        for cable in range(2):
            near, far = self.ends(cable)
            # Of the networks set aside for benchmarks.
            net = f"198.{18 + cable}.{self._network}"
            _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", self.name)
            _ip("address", "add", f"{net}.1/24", "dev", near)
            _ip("-netns", self.name, "address", "add", f"{net}.2/24", "dev", far)
            _ip("link", "set", near, "up")
            self.plug(cable)
            self.hosts.append(f"{net}.2")

    def pull(self, cable: int) -> None:
        """Neither end is told anything."""
        _ip("-netns", self.name, "link", "set", self.ends(cable)[1], "down")

    def plug(self, cable: int) -> None:
        _ip("-netns", self.name, "link", "set", self.ends(cable)[1], "up")

    def close(self) -> None:
        """Both ends of the cables go with the namespace."""
        _ip("netns", "delete", self.name)

    def ends(self, cable: int) -> tuple[str, str]:
        """The interfaces, here and there."""
        return f"{self._prefix}n{cable}", f"{self._prefix}f{cable}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def obstacle() -> str:
    """Why there can be none here; empty when there can."""
    if shutil.which("ip") is None:
        return "there is no ip (iproute2)"
    if os.geteuid() != 0 or subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        return (
            "network namespaces need root, or unshare --map-root-user --net --mount "
            "sh -c 'mount -t tmpfs none /run && python -m pytest …'"
        )
    return ""
