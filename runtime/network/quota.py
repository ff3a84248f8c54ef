"""Connections by the address they come from, so that one stranger cannot take the place of others."""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Any


def origin(peername: Any) -> str:
    """The address that a connection counts for. IPv6: the network of 64 bits, which one host may own.

    peername: of a TCP socket; for others all count for one address.
    """
    if not isinstance(peername, tuple) or not peername:
        return "local"
    host = str(peername[0])
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if address.version == 6:
        return str(address.ipv4_mapped or ipaddress.ip_network((int(address) >> 64 << 64, 64)))
    return host


class ConnectionQuota:
    """At most ``most`` connections, and at most half of them from one address. For one thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()

    def enter(self, address: str) -> str:
        """Count a connection. Returns why there is no room; "": there is, and ``leave`` must follow."""
        if self._open[address] >= max(self._most // 2, 1):
            return f"{address} has {self._open[address]} connections open, the most for one address"
        if self._open.total() >= self._most:
            return f"{self._most} connections are open, the most of this process"
        self._open[address] += 1
        return ""

    def leave(self, address: str) -> None:
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def __len__(self) -> int:
        return self._open.total()
