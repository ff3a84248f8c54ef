"""Handshake of a rank host with a leader: both check the version and the cluster's key.

rank host            leader
  hello     ──────>           its name and version, a nonce
            <──────  challenge  the leader's, or a refusal
  proof     ──────>           HMAC over both
            <──────  welcome    HMAC over both, and the group's timeout; or a refusal

The rank host authenticates first, so that a stranger learns only the leader's name and version. The caller
sets a time limit.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from moonpool.engine.errors import HostRefused
from moonpool.runtime.config.agreement import own_version
from moonpool.runtime.network.sockets import receive_exactly, send_all
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import NODE

HANDSHAKE_S = 5.0
_HEADER = struct.Struct("<4sH")
_MAGIC = b"MPr1"


@dataclass(frozen=True, slots=True)
class Welcome:
    """leader: its node id; timeout_s: see ``engine.parallel.timeout_s``."""

    leader: str
    timeout_s: float


def rank_host_key(security: Security) -> bytes:
    """``key`` of both sides. Raises ConfigError: it is not the key of a node."""
    return security.handshake_key("rank host", NODE)


async def meet_leader(sock: socket.socket, name: str, key: bytes) -> Welcome:
    """Run the rank host's side on a connected non-blocking socket. Raises HostRefused (by either side),
    OSError."""
    hello = _pack(name=name, version=own_version(), nonce=os.urandom(32).hex())
    await send_all(sock, hello)
    challenge, words = await _receive(sock, "a leader")
    _raise_if_refused(words)
    await send_all(sock, _pack(proof=_mac(key, "rank host", hello, challenge)))
    _, answer = await _receive(sock, "a leader")
    _raise_if_refused(answer)
    if not _is_proof(answer, _mac(key, "leader", hello, challenge)):
        raise HostRefused("it does not know our security.cluster_key: set the same one on both")
    return Welcome(str(words["name"]), float(answer["timeout_s"]))


async def meet_rank_host(
    sock: socket.socket, welcome: Welcome, key: bytes, refuse: Callable[[str], str]
) -> str:
    """Run the leader's side on an accepted non-blocking socket. Return the rank host's name.

    ``refuse(name)``: the reason to refuse a rank host, or "". Raises HostRefused, after sending the reason,
    or OSError.
    """
    hello, words = await _receive(sock, "a rank host")
    name, theirs, ours = str(words.get("name")), words.get("version"), own_version()
    reason = refuse(name)
    if theirs != ours:
        reason = (
            f"rank host {name} has Moonpool {theirs}, node {welcome.leader} has {ours}: "
            "install the same version on both"
        )
    challenge = _pack(name=welcome.leader, version=ours, nonce=os.urandom(32).hex(), refused=reason)
    await send_all(sock, challenge)
    if reason:
        raise HostRefused(reason)
    _, answer = await _receive(sock, "a rank host")
    if not _is_proof(answer, _mac(key, "rank host", hello, challenge)):
        reason = (
            f"rank host {name} does not know the security.cluster_key of node {welcome.leader}: "
            "set the same one on both"
        )
        await send_all(sock, _pack(refused=reason))
        raise HostRefused(reason)
    proof = _mac(key, "leader", hello, challenge)
    await send_all(sock, _pack(proof=proof, timeout_s=welcome.timeout_s))
    return name


def _pack(**words: object) -> bytes:
    message = json.dumps(words).encode()
    return _HEADER.pack(_MAGIC, len(message)) + message


async def _receive(sock: socket.socket, peer: str) -> tuple[bytes, dict[str, Any]]:
    """Return the next message as bytes and parsed."""
    header = await receive_exactly(sock, _HEADER.size)
    magic, nbytes = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise HostRefused(
            f"the other side is not {peer} of this version: the address is wrong, or security.cert "
            "is set on one side only"
        )
    message = await receive_exactly(sock, nbytes)
    try:
        words = json.loads(message)
    except ValueError:
        words = None
    if not isinstance(words, dict):
        raise HostRefused(f"the other side is not {peer} of this version")
    return header + message, words


def _is_proof(words: dict[str, Any], expected: str) -> bool:
    return hmac.compare_digest(str(words.get("proof")).encode(), expected.encode())


def _raise_if_refused(words: dict[str, Any]) -> None:
    if reason := words.get("refused"):
        raise HostRefused(str(reason))


def _mac(key: bytes, side: str, hello: bytes, challenge: bytes) -> str:
    return hmac.digest(key, b"|".join((side.encode(), hello, challenge)), "sha256").hex()
