"""CurveZMQ: KV events contain the tokens of prompts, so beyond one machine they are encrypted and signed.

Publisher and subscribers have a pair of keys each, derived from the cluster's key. A publisher serves only
subscribers with theirs.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
import zmq.auth.asyncio
from zmq.utils import z85

from moonpool.kvstore.errors import StoreError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.network.sockets import loopback_only
from moonpool.runtime.security.process import Security

PLAIN_EVENTS = "plain_kv_events"
"""In the record of an external engine: the address that its events come from in clear."""
_ON_THIS_MACHINE = ("ipc://", "inproc://")
# Time for the handshake of a connection; 30 s by default.
_HANDSHAKE_MS = 5_000


class EndpointInvalid(StoreError):
    """ZeroMQ cannot use this address, or may not; ``str(error)`` names it."""

    failure = FailureClass.REQUEST


@dataclass(frozen=True, slots=True, repr=False)
class CurveKeys:
    """In Z85, as ZeroMQ's own tools write them: 40 characters each."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def derive(cls, derived_key: Callable[[str], bytes]) -> CurveKeys:
        """``derived_key``: ``Security.derived_key`` or ``RoleKeys.derived``. Raises ``ConfigError``."""
        pairs = []
        for purpose in ("publishing of KV events", "subscription to KV events"):
            secret = z85.encode(derived_key(purpose))
            pairs += [zmq.curve_public(secret), secret]
        return cls(*pairs)


def stays_here(endpoint: str) -> bool:
    """Whether what passes through this address never leaves the machine."""
    if endpoint.startswith(_ON_THIS_MACHINE):
        return True
    host = endpoint.partition("://")[2].rpartition(":")[0].strip("[]")
    return loopback_only(host)


def keys_for(endpoint: str, security: Security, remedy: str) -> CurveKeys | None:
    """The keys to use at this address; None: it needs none.

    Raises:
        EndpointInvalid: the events would pass a network in clear; ``remedy`` says what to do instead.
    """
    if stays_here(endpoint):
        return None
    if security.has_key:
        return CurveKeys.derive(security.derived_key)
    if security.options.insecure:
        return None
    raise EndpointInvalid(
        f"KV events contain prompts, and would pass in clear through {endpoint}: "
        f"set security.cluster_key, or {remedy}"
    )


def serve(socket: zmq.Socket[Any], keys: CurveKeys | None) -> None:
    """Before ``bind``. ``authenticate`` must run in the socket's context where there are keys."""
    socket.set(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    if keys is not None:
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret


def connect(socket: zmq.Socket[Any], keys: CurveKeys | None) -> None:
    """Before ``connect``."""
    if keys is not None:
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey, socket.curve_secretkey = keys.client_public, keys.client_secret


def authenticate(context: zmq.asyncio.Context, keys: CurveKeys) -> zmq.auth.asyncio.AsyncioAuthenticator:
    """Refuse all clients of the context's servers but subscribers of this cluster. ``stop`` it in the end."""
    authenticator = zmq.auth.asyncio.AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback("*", _Subscribers(keys))
    return authenticator


class _Subscribers:
    """A credentials provider as pyzmq wants it."""

    def __init__(self, keys: CurveKeys) -> None:
        self._public = keys.client_public

    def callback(self, domain: str, key: bytes) -> bool:
        """``key``: in Z85."""
        return hmac.compare_digest(key, self._public)
