"""How a rank host and a leader meet: the same version, and the same secret?

rank host            leader
  hello     ──────>           its name and version, a nonce
            <──────  challenge  the leader's, or why not
  proof     ──────>           HMAC over both
            <──────  welcome    HMAC over both, and the group's timeout; or why not

The rank host proves itself first, so that a stranger learns nothing but the leader's name and version. The
caller puts a time limit on the whole.
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

HANDSHAKE_S = 5.0
_HEADER = struct.Struct("<4sH")
_MAGIC = b"MPr1"


@dataclass(frozen=True, slots=True)
class Welcome:
    """leader: its name; timeout_s: see ``engine.parallel.timeout_s``."""

    leader: str
    timeout_s: float


async def meet_leader(sock: socket.socket, name: str, secret: str) -> Welcome:
    """The rank host's side, on a connected non-blocking socket.

    Raises HostRefused (by either side), OSError.
    """
    hello = _pack(name=name, version=own_version(), nonce=os.urandom(32).hex())
    await send_all(sock, hello)
    challenge, words = await _receive(sock, "a leader")
    _raise_if_refused(words)
    await send_all(sock, _pack(proof=_mac(secret, "rank host", hello, challenge)))
    _, told = await _receive(sock, "a leader")
    _raise_if_refused(told)
    if not _is_proof(told, _mac(secret, "leader", hello, challenge)):
        raise HostRefused("it could not prove that it knows our transfer.secret")
    return Welcome(str(words["name"]), float(told["timeout_s"]))


async def meet_rank_host(
    sock: socket.socket, welcome: Welcome, secret: str, refuse: Callable[[str], str]
) -> str:
    """The leader's side, on an accepted non-blocking socket; the rank host's name.

    ``refuse(name)``: why a rank host is not wanted, or nothing. Raises HostRefused, OSError; the other side
    has been told why, as far as it can understand.
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
    _, told = await _receive(sock, "a rank host")
    if not _is_proof(told, _mac(secret, "rank host", hello, challenge)):
        reason = (
            f"rank host {name} does not know the transfer.secret of node {welcome.leader}: "
            "set the same one on both"
        )
        await send_all(sock, _pack(refused=reason))
        raise HostRefused(reason)
    proof = _mac(secret, "leader", hello, challenge)
    await send_all(sock, _pack(proof=proof, timeout_s=welcome.timeout_s))
    return name


def _pack(**words: object) -> bytes:
    message = json.dumps(words).encode()
    return _HEADER.pack(_MAGIC, len(message)) + message


async def _receive(sock: socket.socket, whom: str) -> tuple[bytes, dict[str, Any]]:
    """The next message, as it came and as what it says."""
    header = await receive_exactly(sock, _HEADER.size)
    magic, nbytes = _HEADER.unpack(header)
    if magic != _MAGIC:
        raise HostRefused(
            f"what is there does not speak as {whom} of this version does: the address is another's, or "
            "transfer.tls is set on one side only"
        )
    message = await receive_exactly(sock, nbytes)
    try:
        words = json.loads(message)
    except ValueError:
        words = None
    if not isinstance(words, dict):
        raise HostRefused(f"what is there does not speak as {whom} does")
    return header + message, words


def _is_proof(words: dict[str, Any], expected: str) -> bool:
    return hmac.compare_digest(str(words.get("proof")).encode(), expected.encode())


def _raise_if_refused(words: dict[str, Any]) -> None:
    if reason := words.get("refused"):
        raise HostRefused(str(reason))


def _mac(secret: str, side: str, hello: bytes, challenge: bytes) -> str:
    return hmac.digest(secret.encode(), b"|".join((side.encode(), hello, challenge)), "sha256").hex()
