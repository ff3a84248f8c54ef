"""The identity of this process: what it proves with its calls, and what it demands of others."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, cast

import grpc

from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security.call_tokens import RoleKeys, TokenSigner, TokenVerifier
from moonpool.runtime.security.local_key import local_key, read_local_key
from moonpool.runtime.security.roles import (
    OPERATOR,
    Caller,
    NotPermitted,
    Unauthenticated,
    check_permitted,
    owner_of,
)
from moonpool.runtime.security.tls import PeerTls, peer_tls

if TYPE_CHECKING:
    from moonpool.runtime.security.certificates import Certificate

log = logging.getLogger(__name__)

TOKEN = "moonpool-caller"
caller: ContextVar[Caller | None] = ContextVar("moonpool_caller", default=None)
"""The caller of the call that is being served; None: the server does not authenticate callers."""


class Security:
    """``options``: of this process, which is ``me``. Raises ``ConfigError`` for wrong keys and missing files.

    Without a key and without certificates, calls are neither signed nor checked. ``serves``: whether servers
    of this process check their callers' tokens.
    """

    def __init__(self, options: SecurityOptions, me: Caller, *, serves: bool = True) -> None:
        self.options = options
        self.me = me
        self._serves = serves
        self._watched: dict[str, Callable[[], Certificate]] = {}
        self._keys: RoleKeys | None = None
        self._signer: TokenSigner | None = None
        self._verifier: TokenVerifier | None = None
        if options.cluster_key:
            self._keys = RoleKeys(options.cluster_key)
            self._signer = TokenSigner(self._keys, me)
            self._verifier = TokenVerifier(self._keys) if serves else None
        # A missing file is an error now, not at the first call.
        self._tls = peer_tls(options) if options.cert else None

    @property
    def tls(self) -> PeerTls | None:
        """The certificates to use now: another object once the files have changed. None: no TLS."""
        return None if self._tls is None else self._tls.now()

    def certificates(self) -> dict[str, Certificate]:
        """The certificates in use, by the options that name them."""
        tls = self.tls
        found = {} if tls is None else {"security.cert": tls.ours, "security.ca": tls.authority}
        return found | {option: certificate() for option, certificate in self._watched.items()}

    def watch(self, option: str, certificate: Callable[[], Certificate]) -> None:
        """Count a certificate of a server among those in use."""
        self._watched[option] = certificate

    @property
    def authenticates(self) -> bool:
        """Whether others must prove something to talk to this process."""
        return self.has_key or self._tls is not None

    # ------------------------------------------------------------------ handshakes of connections

    @property
    def has_key(self) -> bool:
        return self._keys is not None

    @property
    def demands_key(self) -> bool:
        """Whether it refuses to talk to a process without the cluster's key."""
        return self.has_key and self._serves

    def handshake_key(self, purpose: str, role: str) -> bytes:
        """The key of the MACs in a handshake that a process of ``role`` begins; empty without a cluster key.

        Raises ``ConfigError``: ours is the key of another role.
        """
        if self._keys is None:
            return b""
        return blake2b(purpose.encode(), key=self._keys.of(role), digest_size=32).digest()

    def derived_key(self, purpose: str) -> bytes:
        """32 secret bytes for one purpose, the same in every process of the cluster; without a cluster key,
        in every process of this user on this machine. Raises ``ConfigError``: the key is only a role's."""
        return (self._keys or RoleKeys(local_key())).derived(purpose)

    # ------------------------------------------------------------------ calls of this process

    def token(self, method: str) -> str:
        """A token for one call of ``method``; empty: this process has no key."""
        return "" if self._signer is None else self._signer.token(method)

    def metadata(self, method: str) -> tuple[tuple[str, str], ...]:
        """The metadata of one call of ``method`` (``Node/Drain``)."""
        return ((TOKEN, token),) if (token := self.token(method)) else ()

    # ------------------------------------------------------------------ calls of others

    def server_credentials(self, used: PeerTls) -> grpc.ServerCredentials:
        """Certificates are demanded of clients. Changed files are used from the next connection on."""

        def configuration(tls: PeerTls) -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([(tls.key, tls.cert)], tls.ca)

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal used
            if (tls := self.tls) is None or tls is used:
                return None
            used = tls
            return configuration(tls)

        # grpc's stubs do not know that fetch may return None: nothing has changed.
        changes = cast(Callable[[], grpc.ServerCertificateConfiguration], fetch)
        return grpc.dynamic_ssl_server_credentials(
            configuration(used), changes, require_client_authentication=True
        )

    def verify(self, method: str, token: str) -> Caller:
        """Return who signed ``token`` for ``method``. Raises ``Unauthenticated``."""
        if self._verifier is None:
            raise Unauthenticated("this process has no cluster key to check tokens with")
        return self._verifier.verify(method, token)

    def admit(
        self, method: str, token: str, auth_context: Callable[[], Mapping[str, Sequence[bytes]]]
    ) -> Caller | None:
        """Return who makes a call of ``method`` and may make it. None: no proof is demanded.

        Raises:
            Unauthenticated, NotPermitted
        """
        proved: Caller | None = None
        if self._verifier is not None:
            proved = self._verifier.verify(method, token)
        if (tls := self.tls) is not None:
            owner = _owner(auth_context(), tls)
            if proved is not None and proved.role != owner.role:
                raise Unauthenticated(f"the token is of role {proved.role}, the certificate of {owner.role}")
            proved = owner
        if proved is not None:
            check_permitted(proved, method)
        return proved


def _owner(auth_context: Mapping[str, Sequence[bytes]], tls: PeerTls) -> Caller:
    owner = owner_of([name.decode() for name in auth_context.get("x509_subject_alternative_name", ())])
    if tls.revoked:
        # gRPC's handshake knows no lists of revoked certificates.
        tls.check_revoked(_serial(auth_context["x509_pem_cert"][0]), owner)
    return owner


@lru_cache(maxsize=4096)
def _serial(pem: bytes) -> int:
    from cryptography import x509

    return x509.load_pem_x509_certificate(pem).serial_number


def require(*roles: str) -> None:
    """Within a call: raise ``NotPermitted`` if its caller proved another role than these."""
    who = caller.get()
    if who is not None and who.role not in roles:
        raise NotPermitted(f"this is not for the role {who.role} ({who.name})", who)


_current: Security | None = None
ENVIRONMENT = ("MOONPOOL_CLUSTER_KEY", "MOONPOOL_CERT", "MOONPOOL_KEY")
"""Variables of commands and programs for security.cluster_key, cert and key; with MOONPOOL_CA for its ca."""
_USER = f"user-{os.getuid()}"


def use(security: Security) -> None:
    """Make this the identity of the process, for all servers and channels made from now on."""
    global _current
    _current = security


def use_as_client(options: SecurityOptions) -> None:
    """Make a command with these options the identity of the process, unless they are the defaults.

    Raises ``ConfigError``.
    """
    if options != SecurityOptions():
        use(of_client(options))


def given() -> Security | None:
    """The identity that the process was given: by ``use``, else by the environment (``ENVIRONMENT``). None:
    by neither. Raises ``ConfigError``: what the environment names is wrong."""
    if _current is not None:
        return _current
    if any(named := tuple(os.environ.get(name, "") for name in ENVIRONMENT)):
        return _of_environment(*named)
    return None


def current() -> Security:
    """The identity of the process: the one that it was given, else the operator of this user's local
    clusters. Raises ``ConfigError``: see ``given``.
    """
    if (found := given()) is not None:
        return found
    options = SecurityOptions(cluster_key=read_local_key())
    return Security(options, Caller(OPERATOR, _USER), serves=False)


@cache
def _of_environment(cluster_key: str, cert: str, key: str) -> Security:
    # MOONPOOL_CA alone is for HTTPS.
    ca = os.environ.get("MOONPOOL_CA", "") if cert or key else ""
    return of_client(SecurityOptions(cluster_key, cert, key, ca))


def of_client(options: SecurityOptions) -> Security:
    """The identity of a command or a program: in the role of its certificate or its key, else an operator."""
    if not options.cert:
        role = (RoleKeys(options.cluster_key).only_role if options.cluster_key else "") or OPERATOR
        return Security(options, Caller(role, _USER))
    owner = peer_tls(options).now().ours.owner
    if owner is None:
        raise ConfigError(f"{options.cert} names no role: `moonpool certs issue` makes one", "security.cert")
    return Security(options, owner)


__all__ = ["TOKEN", "NotPermitted", "Security", "Unauthenticated", "caller", "current", "use"]
