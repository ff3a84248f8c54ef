"""Tokens that prove with each call which process made it, without sending the cluster's key.

A token is ``role name session number time_ms mac``: mac is BLAKE2b, keyed with the key of the role, of the
method and of the fields before it. It proves the caller and the method, not the content: on networks where
others can change messages, use certificates. A token is accepted once, and only for a while.
"""

from __future__ import annotations

import hmac
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from urllib.parse import quote, unquote

from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security.roles import ROLES, Caller, Unauthenticated

MAX_AGE_S = 30.0
"""A token is refused when it is older, or as far in the future: clocks of hosts may differ by this."""
# Numbers of a session that are this far behind its newest are refused: calls overtake each other.
_WINDOW = 4096
_MAX_SESSIONS = 65_536
_MAX_TOKEN_CHARS = 512
# Keeps derived keys apart from those of roles.
_DERIVED = b"moonpool purpose"


class RoleKeys:
    """The keys of roles: all of them, derived from the cluster's key, or a single one.

    A cluster key is any text of 16 characters or more. ``ROLE:HEX`` is the key of one role: with it a process
    can make calls as that role, and cannot check tokens of other roles.
    """

    def __init__(self, text: str) -> None:
        """Raises ``ConfigError``."""
        role, colon, digits = text.partition(":")
        if colon and role in ROLES:
            try:
                self._keys = {role: bytes.fromhex(digits)}
            except ValueError:
                raise ConfigError(
                    f"the key of role {role} is not hexadecimal", "security.cluster_key"
                ) from None
            self._root = b""
            return
        if len(text) < 16:
            raise ConfigError(f"16 characters or more, got {len(text)}", "security.cluster_key")
        self._root = blake2b(text.encode()).digest()
        self._keys = {role: blake2b(role.encode(), key=self._root, digest_size=32).digest() for role in ROLES}

    @property
    def only_role(self) -> str:
        """The role that this is the key of; empty: of all."""
        return "" if self._root else next(iter(self._keys))

    def of(self, role: str) -> bytes:
        """Raises ``ConfigError``: this key is another role's."""
        if role not in self._keys:
            raise ConfigError(
                f"a key of role {next(iter(self._keys))} cannot be used as {role}", "security.cluster_key"
            )
        return self._keys[role]

    def text_of(self, role: str) -> str:
        """The key of one role, as ``security.cluster_key`` of a process of that role."""
        return f"{role}:{self.of(role).hex()}"

    def derived(self, purpose: str) -> bytes:
        """32 bytes for one purpose, which tell nothing of other keys. Raises ``ConfigError``: this is the key
        of one role."""
        if not self._root:
            raise ConfigError(
                f"a key of role {next(iter(self._keys))} is not enough for the {purpose}: give this process "
                "the key of the cluster",
                "security.cluster_key",
            )
        return blake2b(purpose.encode(), key=self._root, digest_size=32, person=_DERIVED).digest()


class TokenSigner:
    """Makes the tokens of this process."""

    def __init__(self, keys: RoleKeys, caller: Caller, *, clock: Callable[[], float] = time.time) -> None:
        self._key = keys.of(caller.role)
        self._prefix = f"{caller.role} {quote(caller.name, safe='')} {os.urandom(8).hex()}"
        self._numbers = itertools.count(1)
        self._clock = clock

    def token(self, method: str) -> str:
        fields = f"{self._prefix} {next(self._numbers)} {int(self._clock() * 1000)}"
        return f"{fields} {_mac(self._key, method, fields)}"


@dataclass(slots=True)
class _Session:
    newest: int = 0
    seen: int = 0  # bit i: number ``newest - i`` was used
    last_s: float = 0.0


class TokenVerifier:
    """Checks the tokens of other processes' calls."""

    def __init__(self, keys: RoleKeys, *, clock: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._clock = clock
        self._sessions: dict[str, _Session] = {}

    def verify(self, method: str, token: str) -> Caller:
        """Return who made the call. Raises ``Unauthenticated`` with the reason."""
        if not token:
            raise Unauthenticated(
                "the call has no token: set security.cluster_key to the key of this cluster"
            )
        fields, _, mac = token[:_MAX_TOKEN_CHARS].rpartition(" ")
        try:
            token.encode("ascii")  # texts of other bytes cannot be compared in constant time
            role, name, session, number, time_ms = fields.split(" ")
            key = self._keys.of(role)
            count, age_s = int(number), self._clock() - int(time_ms) / 1000
        except (ValueError, OverflowError, ConfigError):  # no float holds a number of 400 digits
            raise Unauthenticated("the call's token is malformed") from None
        if not hmac.compare_digest(mac.encode(), _mac(key, method, fields).encode()):
            raise Unauthenticated("the call's token was made with another cluster key, or for another method")
        if abs(age_s) > MAX_AGE_S:
            raise Unauthenticated(
                f"the call's token is {age_s:.0f} s old, at most {MAX_AGE_S:.0f} s are accepted: "
                "compare the clocks of the two hosts"
            )
        if not self._use(session, count):
            raise Unauthenticated("the call's token was used before")
        return Caller(role, unquote(name))

    def _use(self, name: str, number: int) -> bool:
        session = self._sessions.get(name)
        if session is None:
            if len(self._sessions) >= _MAX_SESSIONS:
                self._forget_old()
            session = self._sessions[name] = _Session()
        session.last_s = self._clock()
        ahead = number - session.newest
        if ahead > 0:
            session.seen = (session.seen << min(ahead, _WINDOW) | 1) & ((1 << _WINDOW) - 1)
            session.newest = number
            return True
        bit = 1 << -ahead
        if -ahead >= _WINDOW or session.seen & bit:
            return False
        session.seen |= bit
        return True

    def _forget_old(self) -> None:
        """Drop sessions with tokens that are all too old by now. Only holders of the key begin sessions."""
        oldest_s = self._clock() - 2 * MAX_AGE_S
        self._sessions = {
            name: session for name, session in self._sessions.items() if session.last_s >= oldest_s
        }


def _mac(key: bytes, method: str, fields: str) -> str:
    return blake2b(f"{method} {fields}".encode(), key=key, digest_size=16).hexdigest()
