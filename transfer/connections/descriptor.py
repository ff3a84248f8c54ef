"""What a peer needs to connect to an agent. It is public: it contains no secret and grants nothing."""

from __future__ import annotations

import functools
import json
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moonpool.transfer.errors import DescriptorError
from moonpool.transfer.memory.lifeline import INCARNATION_NBYTES

FORMAT_VERSION = 1
MAX_PACKED_NBYTES = 4096
MAX_AGENT_ID_NBYTES = 128
_MAX_TRANSPORTS = 16
_MAX_RAILS = 16


@dataclass(frozen=True, slots=True)
class AgentDescriptor:
    """One incarnation of one agent, and its addresses.

    incarnation: 16 random bytes drawn at start; they differ after a restart even if the epoch does not.
    boot_id: equal for processes under one kernel. unix_name: of an abstract Unix socket, or empty.
    tcp_port: 0: it does not listen. tcp_rails: HOST:PORT of further network interfaces.
    """

    agent_id: str
    epoch: int
    incarnation: bytes
    transports: tuple[str, ...]
    boot_id: str
    unix_name: str
    tcp_host: str
    tcp_port: int
    tcp_rails: tuple[str, ...] = ()

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
            fields = json.loads(packed)
        except (ValueError, RecursionError) as error:
            raise DescriptorError(f"not an agent descriptor: {error}") from None
        if not isinstance(fields, dict) or fields.get("version") != FORMAT_VERSION:
            raise DescriptorError(f"not an agent descriptor of version {FORMAT_VERSION}")
        transports = fields.get("transports")
        if not isinstance(transports, list) or len(transports) > _MAX_TRANSPORTS:
            raise DescriptorError("transports must be a short list")
        try:
            incarnation = bytes.fromhex(_text(fields, "incarnation", 2 * INCARNATION_NBYTES))
        except ValueError:
            raise DescriptorError("incarnation must be hexadecimal") from None
        if len(incarnation) != INCARNATION_NBYTES:
            raise DescriptorError(f"incarnation must have {INCARNATION_NBYTES} bytes")
        return cls(
            agent_id=check_agent_id(_text(fields, "agent_id", MAX_AGENT_ID_NBYTES)),
            epoch=_number(fields, "epoch", (1 << 64) - 1),
            incarnation=incarnation,
            transports=tuple(_text({"transport": name}, "transport", 32) for name in transports),
            boot_id=_text(fields, "boot_id", 64),
            unix_name=_text(fields, "unix_name", 100),
            tcp_host=_text(fields, "tcp_host", 255),
            tcp_port=_number(fields, "tcp_port", 65535),
            tcp_rails=_rails(fields.get("tcp_rails", [])),
        )


def check_agent_id(agent_id: str) -> str:
    if not 0 < len(agent_id.encode("utf-8", "replace")) <= MAX_AGENT_ID_NBYTES or not agent_id.isprintable():
        raise DescriptorError(
            f"an agent id has 1 to {MAX_AGENT_ID_NBYTES} printable bytes, not {agent_id[:200]!r}"
        )
    return agent_id


def _rails(values: object) -> tuple[str, ...]:
    if not isinstance(values, list) or len(values) > _MAX_RAILS:
        raise DescriptorError("tcp_rails must be a short list")
    rails = tuple(_text({"tcp_rails": value}, "tcp_rails", 255) for value in values)
    for rail in rails:
        host, _, port = rail.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) <= 65535:
            raise DescriptorError(f"tcp_rails: {rail!r} is not HOST:PORT")
    return rails


def _text(fields: dict[str, Any], name: str, most: int) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or len(value) > most or "\0" in value:
        raise DescriptorError(f"{name} must be a text of at most {most} characters")
    return value


def _number(fields: dict[str, Any], name: str, most: int) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise DescriptorError(f"{name} must be a number from 0 to {most}")
    return value


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
