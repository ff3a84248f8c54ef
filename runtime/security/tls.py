"""Mutual TLS between processes of a cluster: both ends have certificates of one authority.

The files may change while the process runs: connections made from then on use the new ones. A certificate
named in the list of revoked ones, ``crl.pem`` beside ``security.ca``, is refused by all that have the list.
"""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.network.sockets import tls_retried
from moonpool.runtime.security.roles import REVOKED_NAME, SERVER_NAME, Caller, Unauthenticated, owner_of

if TYPE_CHECKING:
    from moonpool.runtime.security.certificates import Certificate

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOK_AGAIN_S = 1.0


class Reread(Generic[T]):
    """What ``load`` makes of ``files``, made again once they have changed; looked at once a second.

    Raises what ``load`` raises when it is made. Later the last result stays in use, and the log says why.
    """

    def __init__(self, files: Sequence[Path], load: Callable[[], T]) -> None:
        self._files = files
        self._load = load
        self._looked_s = time.monotonic()
        self._state = self._look()
        self._value = load()

    def now(self) -> T:
        if time.monotonic() - self._looked_s >= LOOK_AGAIN_S:
            self._looked_s = time.monotonic()
            # Looked at before it is read: what changes meanwhile is read again.
            state = self._look()
            if state != self._state:
                self._state = state
                self._read_again()
        return self._value

    def _read_again(self) -> None:
        names = ", ".join(map(str, self._files))
        try:
            self._value = self._load()
        except ConfigError as error:
            log.warning("the former content of %s stays in use: %s", names, error)
        else:
            log.info("changed files are in use: %s", names)

    def _look(self) -> list[tuple[int, int, int] | None]:
        state: list[tuple[int, int, int] | None] = []
        for file in self._files:
            try:
                found = file.stat()
                state.append((found.st_mtime_ns, found.st_ino, found.st_size))
            except OSError:
                state.append(None)
        return state


@dataclass(frozen=True, slots=True, eq=False)
class PeerTls:
    """``ca``, ``cert``, ``key``: PEM. ``client``, ``server``: contexts of our ends of connections.

    ``revoked``: reasons by serial number. ``ours``, ``authority``: the certificates, as read.
    """

    ca: bytes
    cert: bytes
    key: bytes = field(repr=False)
    client: ssl.SSLContext
    server: ssl.SSLContext
    revoked: Mapping[int, str]
    ours: Certificate
    authority: Certificate

    def check_revoked(self, serial: int, owner: Caller) -> None:
        """Raises ``Unauthenticated`` if the certificate of ``owner`` with this number has been revoked."""
        if (reason := self.revoked.get(serial)) is not None:
            raise Unauthenticated(
                f"the certificate of {owner.role} {owner.name} (serial {serial:x}) was revoked: {reason}"
            )


def peer_tls(options: SecurityOptions) -> Reread[PeerTls]:
    """The files of ``options``, which names some. Raises ``ConfigError``: one is missing or not valid."""
    ca = Path(options.ca)
    files = [ca, Path(options.cert), Path(options.key), ca.with_name(REVOKED_NAME)]
    return Reread(files, lambda: _load(options))


def _load(options: SecurityOptions) -> PeerTls:
    ca, cert, key = Path(options.ca), Path(options.cert), Path(options.key)
    # cryptography takes a moment to import; processes without certificates do not need it.
    from moonpool.runtime.security import certificates, revocation

    try:
        ca_pem, cert_pem, key_pem = ca.read_bytes(), cert.read_bytes(), key.read_bytes()
        client, server = _context(options, client=True), _context(options, client=False)
    except ssl.SSLError as error:
        raise ConfigError(f"cannot use {cert}, {key}, {ca}: {error}", "security.cert") from error
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}", "security.cert") from error
    try:
        ours, authority = certificates.describe(cert), certificates.describe(ca)
        revoked = revocation.revoked_beside(ca)
    except certificates.CertificateError as error:
        raise ConfigError(str(error), "security.cert") from error
    return PeerTls(ca_pem, cert_pem, key_pem, client, server, revoked, ours, authority)


def _context(options: SecurityOptions, *, client: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if client else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(options.ca)
    context.load_cert_chain(options.cert, options.key)
    return context


async def secure(sock: socket.socket, tls: PeerTls, *, server: bool) -> ssl.SSLSocket:
    """Start TLS on a connected, non-blocking ``sock``, which is taken over, and closed on any error.

    Raises OSError when the other side has no valid certificate of the same authority, or does not speak TLS.
    """
    # Nodes change their addresses: their certificates are valid for one name.
    context, name = (tls.server, None) if server else (tls.client, SERVER_NAME)
    secured = context.wrap_socket(
        sock, server_side=server, do_handshake_on_connect=False, server_hostname=name
    )
    try:
        await tls_retried(secured, secured.do_handshake)
        owner = owner_of_socket(secured)
        serial = int(str((secured.getpeercert() or {})["serialNumber"]), 16)
        tls.check_revoked(serial, owner)
    except (ssl.SSLError, Unauthenticated) as error:
        secured.close()
        raise ConnectionAbortedError(
            f"the TLS handshake failed ({error}); security.ca must be the same on all nodes"
        ) from error
    except BaseException:
        secured.close()
        raise
    return secured


def owner_of_socket(sock: ssl.SSLSocket) -> Caller:
    """The other side, as its certificate names it. Raises ``Unauthenticated``: it names no role."""
    # getpeercert's stub does not know the shape of its values.
    names: Sequence[tuple[str, str]] = (sock.getpeercert() or {}).get("subjectAltName", ())  # type: ignore[assignment]
    return owner_of([value for kind, value in names if kind == "URI"])
