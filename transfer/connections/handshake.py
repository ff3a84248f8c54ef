"""The handshake of two agents: identity, incarnation and knowledge of the cluster's key.

client               server
  hello     ──────>           kind of connection, the client's role, wanted incarnation, nonce
            <──────  challenge  identity, nonce, whether it has a key, or a reason to refuse
  proof     ──────>           HMAC over both, address of the client's lifeline
            <──────  welcome    HMAC over both, address of the server's lifeline

Both HMACs are made with the key of the client's role. The client proves itself first, so others learn only
the server's public identity. Messages have fixed sizes, except for an agent id of at most 128 bytes. The
caller limits the time.
"""

from __future__ import annotations

import asyncio
import enum
import hmac
import os
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.network.sockets import receive_exactly, send_all
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import CLIENT, NODE, OPERATOR, ROLES
from moonpool.runtime.security.tls import owner_of_socket
from moonpool.transfer.connections.descriptor import MAX_AGENT_ID_NBYTES, AgentDescriptor
from moonpool.transfer.connections.wire import Kind, WireError
from moonpool.transfer.errors import AccessDenied, PeerBusy, StaleEpoch
from moonpool.transfer.memory.lifeline import INCARNATION_NBYTES

VERSION = 4
_HELLO = struct.Struct("<4sHBB16s32sQ16sIH")
_CHALLENGE = struct.Struct("<4sHBB16s32sQH")
_PROOF = struct.Struct("<32sQ")
_WELCOME = struct.Struct("<Bxxx32sQ")
_HELLO_MAGIC, _CHALLENGE_MAGIC = b"MPh1", b"MPc1"
_PURPOSE = "transfer"
_MAY_CONNECT = (NODE, CLIENT, OPERATOR)


class Verdict(enum.IntEnum):
    OK = 0
    STALE = 1
    DENIED = 2
    BUSY = 3
    UNSUPPORTED = 4


@dataclass(frozen=True, slots=True)
class Identity:
    """Public facts of an agent. lifeline: address of its ``Lifeline`` in its process."""

    agent_id: str
    epoch: int
    incarnation: bytes
    lifeline: int


@dataclass(frozen=True, slots=True)
class Authenticated:
    """The other side after the handshake. pid: in our namespace; 0: unknown (TCP, another namespace)."""

    identity: Identity
    kind: Kind
    argument: int
    pid: int


async def handshake_as_client(
    sock: socket.socket,
    target: AgentDescriptor,
    me: Identity,
    security: Security,
    kind: Kind,
    argument: int = 0,
) -> Authenticated:
    """The client's side, on a connected, non-blocking socket.

    Raises StaleEpoch, AccessDenied, PeerBusy, WireError, OSError.
    """
    nonce, name = os.urandom(32), me.agent_id.encode()
    role = security.me.role
    hello = _HELLO.pack(
        _HELLO_MAGIC,
        VERSION,
        kind,
        ROLES.index(role),
        target.incarnation,
        nonce,
        me.epoch,
        me.incarnation,
        argument,
        len(name),
    )
    hello += name
    await send_all(sock, hello)
    challenge = await receive_exactly(sock, _CHALLENGE.size)
    magic, version, verdict, has_key, incarnation, _, epoch, name_nbytes = _CHALLENGE.unpack(challenge)
    if magic != _CHALLENGE_MAGIC or version != VERSION or name_nbytes > MAX_AGENT_ID_NBYTES:
        raise WireError(f"the server is not a transfer agent of version {VERSION}")
    challenge += await receive_exactly(sock, name_nbytes)
    if incarnation != target.incarnation:
        raise StaleEpoch(target.agent_id, target.epoch, epoch)
    _raise_unless_ok(verdict, target.agent_id)
    if not has_key and security.demands_key:
        raise AccessDenied(target.agent_id, "it has no cluster key")
    key = security.handshake_key(_PURPOSE, role) if has_key else b""
    await send_all(sock, _PROOF.pack(_mac(key, b"client", hello, challenge, me.lifeline), me.lifeline))
    verdict, proof, lifeline = _WELCOME.unpack(await receive_exactly(sock, _WELCOME.size))
    _raise_unless_ok(verdict, target.agent_id)
    if not hmac.compare_digest(proof, _mac(key, b"server", hello, challenge, lifeline)):
        raise AccessDenied(target.agent_id, "it could not prove that it knows the cluster's key")
    identity = Identity(target.agent_id, epoch, incarnation, lifeline)
    return Authenticated(identity, kind, argument, peer_pid(sock))


async def handshake_as_server(
    sock: socket.socket, me: Identity, security: Security, *, busy: Callable[[int, bytes], bool]
) -> Authenticated:
    """The server's side, on an accepted, non-blocking socket. busy: refuse a connection of this kind to the
    agent of this incarnation.

    Raises WireError or OSError when the client was refused; it has been told the reason, if possible.
    """
    hello = await receive_exactly(sock, _HELLO.size)
    magic, version, kind, role, wanted, _, epoch, incarnation, argument, name_nbytes = _HELLO.unpack(hello)
    if magic != _HELLO_MAGIC or not 0 < name_nbytes <= MAX_AGENT_ID_NBYTES:
        raise WireError("not a transfer agent")
    name = await receive_exactly(sock, name_nbytes)
    hello += name
    verdict, key, why = Verdict.OK, b"", ""
    if version != VERSION or kind not in Kind.__members__.values():
        verdict = Verdict.UNSUPPORTED
    elif wanted != me.incarnation:
        verdict = Verdict.STALE
    elif busy(kind, incarnation):
        verdict = Verdict.BUSY
    elif is_other_user(sock):
        # Without a key nothing else keeps other users of this host from our memory.
        verdict = Verdict.DENIED
    else:
        try:
            key = _key_for(sock, role, security)
        except (WireError, MoonpoolError) as error:
            verdict, why = Verdict.DENIED, str(error)
    own_name = me.agent_id.encode()
    challenge = _CHALLENGE.pack(
        _CHALLENGE_MAGIC,
        VERSION,
        verdict,
        security.has_key,
        me.incarnation,
        os.urandom(32),
        me.epoch,
        len(own_name),
    )
    challenge += own_name
    await send_all(sock, challenge)
    if verdict is not Verdict.OK:
        raise WireError(f"refused: {why or verdict.name.lower()}")
    proof, lifeline = _PROOF.unpack(await receive_exactly(sock, _PROOF.size))
    if not hmac.compare_digest(proof, _mac(key, b"client", hello, challenge, lifeline)):
        await send_all(sock, _WELCOME.pack(Verdict.DENIED, bytes(32), 0))
        raise WireError("it does not know the cluster's key")
    answer = _mac(key, b"server", hello, challenge, me.lifeline)
    await send_all(sock, _WELCOME.pack(Verdict.OK, answer, me.lifeline))
    agent_id = name.decode("utf-8", "replace")
    assert len(incarnation) == INCARNATION_NBYTES
    return Authenticated(
        Identity(agent_id, epoch, incarnation, lifeline), Kind(kind), argument, peer_pid(sock)
    )


def _key_for(sock: socket.socket, role: int, security: Security) -> bytes:
    """The key of a client of this role. Raises ``WireError``, or an error of the key or the certificate."""
    name = ROLES[role] if role < len(ROLES) else f"number {role}"
    if name not in _MAY_CONNECT:
        raise WireError(f"memory is not for the role {name}")
    if isinstance(sock, ssl.SSLSocket) and (owner := owner_of_socket(sock)).role != name:
        raise WireError(f"it connects as {name}, and its certificate is of {owner.role} {owner.name}")
    return security.handshake_key(_PURPOSE, name)


def _raise_unless_ok(verdict: int, agent_id: str) -> None:
    if verdict == Verdict.DENIED:
        raise AccessDenied(agent_id, "our key, our role or our user may not connect to it")
    if verdict == Verdict.BUSY:
        raise PeerBusy(agent_id)
    if verdict != Verdict.OK:
        raise WireError(f"peer {agent_id} does not speak version {VERSION} of the protocol")


def _mac(key: bytes, side: bytes, hello: bytes, challenge: bytes, lifeline: int) -> bytes:
    transcript = b"|".join((side, hello, challenge, lifeline.to_bytes(8, "little")))
    return hmac.digest(key, transcript, "sha256")


async def receive_descriptor(sock: socket.socket) -> int:
    """Receive the file descriptor after a handshake of kind MEMFD. Raises OSError when there is none."""
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()

    def arrived() -> None:
        loop.remove_reader(sock.fileno())
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(sock.fileno(), arrived)
    try:
        await readable
    finally:
        loop.remove_reader(sock.fileno())
    _, descriptors, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    if not descriptors:
        raise FileNotFoundError("the peer has no such shared memory")
    return descriptors[0]


def peer_pid(sock: socket.socket) -> int:
    """The pid at the other end of a Unix socket, from the kernel; else 0."""
    return _peer_credentials(sock)[0] if sock.family == socket.AF_UNIX else 0


def is_other_user(sock: socket.socket) -> bool:
    """Whether another user, but not root, is at the other end of a Unix socket."""
    return sock.family == socket.AF_UNIX and _peer_credentials(sock)[1] not in (0, os.getuid())


def _peer_credentials(sock: socket.socket) -> tuple[int, int]:
    pid, uid, _ = struct.unpack("iII", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(pid), int(uid)
