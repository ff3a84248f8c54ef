"""Parties in network namespaces of their own behind one router, and ways between them that can be cut."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Sequence

_NUMBERS = itertools.count()


class Network:
    """Every party has an address and one cable to the router. A cut way swallows what is sent: neither end is
    told anything. ``close`` it after its processes have ended."""

    def __init__(self, parties: Sequence[str]) -> None:
        self._prefix = f"mpo{os.getpid()}-{next(_NUMBERS)}-"
        self._places = {party: place for place, party in enumerate(parties)}
        self._router = self._prefix + "router"
        self._spaces = [self._router]
        _ip("netns", "add", self._router)
        try:
            _within(self._router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            for party in parties:
                self._lay_cable(party)
        except BaseException:
            self.close()
            raise

    def _lay_cable(self, party: str) -> None:
        here, place = self._router, self._places[party]
        there = self._prefix + party
        _ip("netns", "add", there)
        self._spaces.append(there)
        cable = f"to{place}"
        _ip("-n", here, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", there)
        _ip("-n", here, "address", "add", f"198.18.{place}.1/24", "dev", cable)
        _ip("-n", here, "link", "set", cable, "up")
        _ip("-n", there, "address", "add", f"{self.address(party)}/24", "dev", "eth0")
        for name in ("lo", "eth0"):
            _ip("-n", there, "link", "set", name, "up")
        _ip("-n", there, "route", "add", "default", "via", f"198.18.{place}.1")

    def address(self, party: str) -> str:
        # Of the networks set aside for benchmarks.
        return f"198.18.{self._places[party]}.2"

    def within(self, party: str) -> list[str]:
        """The words before a command that runs as this party."""
        return ["nsenter", f"--net={self.path(party)}"]

    def path(self, party: str) -> str:
        """The file of its namespace."""
        return f"/run/netns/{self._prefix}{party}"

    def cut(self, sender: str = "", receiver: str = "") -> None:
        """Nothing arrives from one at the other any more, until ``mend``; without a name: from or at all."""
        self._rule("add", sender, receiver)

    def mend(self, sender: str = "", receiver: str = "") -> None:
        self._rule("delete", sender, receiver)

    def _rule(self, change: str, sender: str, receiver: str) -> None:
        ends = [word for end in (("from", sender), ("to", receiver)) for word in self._end(*end)]
        _ip("-n", self._router, "rule", change, *ends, "blackhole")

    def _end(self, word: str, party: str) -> list[str]:
        return [word, self.address(party)] if party else []

    def close(self) -> None:
        for space in self._spaces:
            _ip("netns", "delete", space)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    assert not done.returncode, f"ip {' '.join(arguments)}: {done.stderr}"


def _within(space: str, *command: str) -> None:
    subprocess.run(["nsenter", f"--net=/run/netns/{space}", *command], check=True)
