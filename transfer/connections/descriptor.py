"""What a peer needs to connect to an agent. It is public: it contains no secret and grants nothing."""

from __future__ import annotations

import functools
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from moonpool.transfer.errors import DescriptorError
from moonpool.transfer.memory.lifeline import INCARNATION_NBYTES

FORMAT_VERSION = 1
MAX_PACKED_NBYTES = 4096
MAX_AGENT_ID_NBYTES = 128
_NO_NUL = r"^[^\0]*$"
_Transport = Annotated[str, Meta(max_length=32, pattern=_NO_NUL)]
_Rail = Annotated[str, Meta(max_length=255, pattern=r"^[^\0]+:[0-9]{1,5}\Z")]


@dataclass(frozen=True, slots=True)
class AgentDescriptor:
    """One incarnation of one agent, and its addresses.

    incarnation: 16 random bytes drawn at start; they differ after a restart even if the epoch does not.
    boot_id: equal for processes under one kernel. unix_name: of an abstract Unix socket, or empty.
    tcp_port: 0: it does not listen. tcp_rails: HOST:PORT of further network interfaces.
    """

    agent_id: Annotated[str, Meta(max_length=MAX_AGENT_ID_NBYTES, pattern=_NO_NUL)]
    epoch: Annotated[int, Meta(ge=0)]
    incarnation: Annotated[bytes, Meta(min_length=INCARNATION_NBYTES, max_length=INCARNATION_NBYTES)]
    transports: Annotated[tuple[_Transport, ...], Meta(max_length=16)]
    boot_id: Annotated[str, Meta(max_length=64, pattern=_NO_NUL)]
    unix_name: Annotated[str, Meta(max_length=100, pattern=_NO_NUL)]
    tcp_host: Annotated[str, Meta(max_length=255, pattern=_NO_NUL)]
    tcp_port: Annotated[int, Meta(ge=0, le=65535)]
    tcp_rails: Annotated[tuple[_Rail, ...], Meta(max_length=16)] = ()

    @property
    def tcp_addresses(self) -> list[tuple[str, int]]:
        """(host, port) of all interfaces."""
        if not self.tcp_port:
            return []
        further = [rail.rpartition(":") for rail in self.tcp_rails]
        return [(self.tcp_host, self.tcp_port), *((host, int(port)) for host, _, port in further)]

    def pack(self) -> bytes:
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields |= {"version": FORMAT_VERSION, "incarnation": self.incarnation.hex()}
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, packed: bytes) -> AgentDescriptor:
        """Raises DescriptorError unless every field is present, of its type and within its limits."""
        if len(packed) > MAX_PACKED_NBYTES:
            raise DescriptorError(
                f"an agent descriptor has at most {MAX_PACKED_NBYTES} bytes, not {len(packed)}"
            )
        try:
            fields = msgspec.json.decode(packed, type=dict)
            if fields.get("version") != FORMAT_VERSION:
                raise ValueError("another version, or none")
            incarnation = bytes.fromhex(fields.get("incarnation", ""))
            found = msgspec.convert({**fields, "incarnation": incarnation}, cls, builtin_types=(bytes,))
            if found.epoch >> 64:
                raise ValueError("epoch must have 64 bits")
            if not all(0 < int(rail.rpartition(":")[2]) <= 65535 for rail in found.tcp_rails):
                raise ValueError("tcp_rails must have ports up to 65535")
        except (msgspec.MsgspecError, RecursionError, ValueError, TypeError) as error:
            raise DescriptorError(f"no agent descriptor of version {FORMAT_VERSION}: {error}") from None
        check_agent_id(found.agent_id)
        return found


def check_agent_id(agent_id: str) -> str:
    if not 0 < len(agent_id.encode("utf-8", "replace")) <= MAX_AGENT_ID_NBYTES or not agent_id.isprintable():
        raise DescriptorError(
            f"an agent id has 1 to {MAX_AGENT_ID_NBYTES} printable bytes, not {agent_id[:200]!r}"
        )
    return agent_id


@functools.cache
def boot_id() -> str:
    """Identifies one boot of the kernel, for all processes and containers; empty: unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def announced_host(bound: str) -> str:
    """The address to announce for a socket bound to ``bound``; for a wildcard the outgoing one."""
    if bound not in ("", "0.0.0.0", "::"):
        return bound
    family = socket.AF_INET6 if bound == "::" else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting UDP sends nothing, but makes the kernel choose a source address.
            probe.connect(("2001:db8::1" if bound == "::" else "192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if bound == "::" else "127.0.0.1"
