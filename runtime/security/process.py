"""The identity of this process: what it proves with its calls, and what it demands of others."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import grpc

from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security.call_tokens import RoleKeys, TokenSigner, TokenVerifier
from moonpool.runtime.security.roles import (
    OPERATOR,
    Caller,
    NotPermitted,
    Unauthenticated,
    check_permitted,
)

log = logging.getLogger(__name__)

TOKEN = "moonpool-caller"
caller: ContextVar[Caller | None] = ContextVar("moonpool_caller", default=None)
"""Who made the call that is being served; None: the server demands no proof."""
_LOOK_AGAIN_S = 1.0


class Security:
    """``options``: of this process, which is ``me``. Raises ``ConfigError`` for wrong keys and missing files.

    Without a key and without certificates, calls are neither signed nor checked. ``serves``: whether servers
    of this process check their callers' tokens.
    """

    def __init__(self, options: SecurityOptions, me: Caller, *, serves: bool = True) -> None:
        self._options = options
        self._signer: TokenSigner | None = None
        self._verifier: TokenVerifier | None = None
        self._looked_s = 0.0
        self._state: tuple[int, ...] = ()
        if options.cluster_key:
            keys = RoleKeys(options.cluster_key)
            self._signer = TokenSigner(keys, me)
            self._verifier = TokenVerifier(keys) if serves else None
        if options.cert:
            self._pem()  # a missing file is an error now, not at the first call

    @property
    def has_tls(self) -> bool:
        return bool(self._options.cert)

    # ------------------------------------------------------------------ calls of this process

    def metadata(self, method: str) -> tuple[tuple[str, str], ...]:
        """The metadata of one call of ``method`` (``Node/Drain``)."""
        return () if self._signer is None else ((TOKEN, self._signer.token(method)),)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(*self._pem())

    def state_of_files(self) -> tuple[int, ...]:
        """A value that differs once the certificates have changed; looked at once a second."""
        if self.has_tls and time.monotonic() - self._looked_s >= _LOOK_AGAIN_S:
            self._looked_s = time.monotonic()
            try:
                self._state = tuple(Path(file).stat().st_mtime_ns for file in self._files)
            except OSError as error:
                log.warning("the certificates in use are kept: %s", error)
        return self._state

    # ------------------------------------------------------------------ calls of others

    def server_credentials(self) -> grpc.ServerCredentials:
        """Certificates are demanded of clients. Changed files are used from the next connection on."""
        state = self.state_of_files()

        def configuration() -> grpc.ServerCertificateConfiguration:
            ca, key, cert = self._pem()
            return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal state
            if self.state_of_files() == state:
                return None
            try:
                changed = configuration()
            except ConfigError as error:
                log.warning("the certificates in use are kept: %s", error)
                return None
            state = self.state_of_files()
            log.info("new certificate %s is in use", self._options.cert)
            return changed

        # grpc's stubs do not know that fetch may return None: nothing has changed.
        changes = cast(Callable[[], grpc.ServerCertificateConfiguration], fetch)
        return grpc.dynamic_ssl_server_credentials(
            configuration(), changes, require_client_authentication=True
        )

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
        if self.has_tls:
            owner = _owner(auth_context())
            if proved is not None and proved.role != owner.role:
                raise Unauthenticated(f"the token is of role {proved.role}, the certificate of {owner.role}")
            proved = owner
        if proved is not None:
            check_permitted(proved, method)
        return proved

    @property
    def _files(self) -> tuple[str, str, str]:
        return self._options.ca, self._options.key, self._options.cert

    def _pem(self) -> tuple[bytes, bytes, bytes]:
        """Authority, key, certificate."""
        try:
            ca, key, cert = (Path(file).read_bytes() for file in self._files)
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be read: {error.strerror}", "security") from error
        return ca, key, cert


def _owner(auth_context: Mapping[str, Sequence[Any]]) -> Caller:
    from moonpool.runtime.security.certificates import owner_of

    names = [name.decode() for name in auth_context.get("x509_subject_alternative_name", ())]
    owner = owner_of(names)
    if owner is None:
        raise Unauthenticated(
            "the caller's certificate names no role: `moonpool certs issue` makes one that does"
        )
    return owner


def require(*roles: str) -> None:
    """Within a call: raise ``NotPermitted`` if its caller proved another role than these."""
    who = caller.get()
    if who is not None and who.role not in roles:
        raise NotPermitted(f"this is not for the role {who.role} ({who.name})")


_current: Security | None = None


def use(security: Security) -> None:
    """Make this the identity of the process, for all servers and channels made from now on."""
    global _current
    _current = security


def current() -> Security:
    """The identity of the process. Without ``use``: the operator of this user's local clusters."""
    if _current is not None:
        return _current
    options = SecurityOptions(cluster_key=_read_local_key())
    return Security(options, Caller(OPERATOR, f"user-{os.getuid()}"), serves=False)


def local_key() -> str:
    """The key of the clusters that this user runs on this machine; made when it is first needed.

    It is in a file that only the user can read, so that commands in other terminals have it. Where no file
    can be written, the key is this process's alone.
    """
    if key := _read_local_key():
        return key
    file, key = _key_file(), secrets.token_hex(32)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}-{os.getpid()}")
        partial.touch(mode=0o600)
        partial.write_text(key, encoding="ascii")
        try:
            os.link(partial, file)  # of several at once, one wins
        finally:
            partial.unlink()
    except FileExistsError:
        return _read_local_key()
    except OSError as error:
        log.info("the key of local clusters is not kept: %s", error)
    return key


def _key_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "moonpool" / "cluster_key"


def _read_local_key() -> str:
    try:
        return _key_file().read_text(encoding="ascii").strip()
    except (OSError, RuntimeError):
        return ""  # none yet, or a user without a home


__all__ = ["TOKEN", "NotPermitted", "Security", "Unauthenticated", "caller", "current", "local_key", "use"]
