"""Which machine this is, as far as a peer can compare it."""

from __future__ import annotations

import functools
import socket
from pathlib import Path


@functools.cache
def boot_id() -> str:
    """Names one boot of one kernel: equal for all processes, and containers, on a host; empty when
    unknown.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def announced_host(bound: str) -> str:
    """The address to announce for a socket bound to ``bound``: itself, or for a wildcard the outgoing one."""
    if bound not in ("", "0.0.0.0", "::"):
        return bound
    family = socket.AF_INET6 if bound == "::" else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # A UDP connect sends nothing; it only makes the kernel choose a source address.
            probe.connect(("2001:db8::1" if bound == "::" else "192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if bound == "::" else "127.0.0.1"
