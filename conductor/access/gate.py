"""The gate: who makes an HTTP request, and whether that may be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web

from moonpool.conductor.access.keys import ApiKeys
from moonpool.conductor.access.roles import EVERYBODY, KEYED, NOBODY, OPEN, PERMITTED, Principal
from moonpool.conductor.access.sessions import Sessions
from moonpool.conductor.api.errors import ApiError, forbidden, sign_in_first, unauthorized
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security import process
from moonpool.runtime.security.roles import OPERATOR, Unauthenticated
from moonpool.runtime.security.tls import Reread

COOKIE = "moonpool_session"
PRINCIPAL = web.RequestKey("principal", Principal)
"""The principal that made the request; set before its handler runs."""
_CHANGES_NOTHING = ("GET", "HEAD", "OPTIONS")


class Gate:
    """Admits requests by API key, by session or, for the cluster's own commands, by an operator's token."""

    def __init__(self, keys: Callable[[], ApiKeys], sessions: Sessions) -> None:
        """``keys``: those to use now; asked for each request, and for each event of a stream."""
        self._keys = keys
        self.sessions = sessions

    @property
    def keys(self) -> ApiKeys:
        return self._keys()

    @classmethod
    def open(cls) -> Gate:
        """Everybody may do everything."""
        keys = ApiKeys()
        return cls(lambda: keys, Sessions(b""))

    @classmethod
    def load(cls, path: str) -> Gate:
        """By the file of keys at ``path``, reread when it changes; empty: none. Raises ``ConfigError``."""
        if not path:
            return cls.open()
        me = process.current()
        if me.authenticates and not me.has_key:
            raise ConfigError(
                "conductor.tenants_path needs security.cluster_key beside certificates: from it all "
                "conductors derive the roots of tenants and the sessions of browsers",
                "security.cluster_key",
            )
        # One secret for all that is read: sessions name their keys by it.
        secret = me.derived_key("API keys")
        keys = Reread((Path(path),), lambda: ApiKeys.load(path, secret))
        return cls(keys.now, Sessions(me.derived_key("sessions")))

    def admit(self, http: web.Request) -> None:
        """Set ``http[PRINCIPAL]``. Raises ``ApiError``: why the request is refused."""
        http[PRINCIPAL] = NOBODY if self.keys.are_configured else EVERYBODY
        if not self.keys.are_configured:
            if self.is_administrative(http):
                http[PRINCIPAL] = NOBODY
                self._check_operator(http)
                http[PRINCIPAL] = EVERYBODY
            return
        endpoint = endpoint_of(http)
        # Routes that do not exist need a key too: what exists is not told to those without one.
        access = KEYED if http.match_info.route.resource is None else PERMITTED.get(endpoint)
        if access is OPEN:
            with suppress(ApiError):
                http[PRINCIPAL] = self._prove(http) or NOBODY
            return
        found = self._prove(http)
        if found is None:
            raise sign_in_first() if endpoint == "GET /" else unauthorized()
        http[PRINCIPAL] = found
        if access is None or found.role not in access.roles:
            raise forbidden(f"{endpoint} is not for API keys of the role {found.role}")
        if not access.tenants and found.scope is not None:
            raise forbidden(f"{endpoint} shows the whole cluster: it needs a key that belongs to no tenant")

    def still_admits(self, http: web.Request) -> bool:
        """Whether the key or session of an admitted request that goes on is what it was. An operator's token
        is for the beginning of a request alone."""
        scheme = http.headers.get("Authorization", "").partition(" ")[0].lower()
        if not self.keys.are_configured or scheme == "moonpool":
            return True
        return self._prove(http) == http[PRINCIPAL]

    def is_administrative(self, http: web.Request) -> bool:
        """Whether a request would change the cluster."""
        access = PERMITTED.get(endpoint_of(http))
        return access is not None and access.administers

    def _check_operator(self, http: web.Request) -> None:
        """Where no API keys are configured: only a process with the cluster's key changes the cluster."""
        if {"Origin", "Sec-Fetch-Site"} & http.headers.keys():
            # A browser, of which nothing else is known.
            check_same_origin(http)
        me = process.current()
        if not me.authenticates:
            return  # security.insecure: said at the start and on every page
        if not me.has_key:
            raise forbidden(
                f"{endpoint_of(http)} changes the cluster: configure API keys with an admin key "
                "(conductor.tenants_path), or security.cluster_key beside the certificates"
            )
        scheme, _, token = http.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "moonpool" or self._operator(http, token) is None:
            raise unauthorized(
                f"{endpoint_of(http)} changes the cluster, and without API keys that needs the cluster's key "
                "(MOONPOOL_CLUSTER_KEY)"
            )

    def _prove(self, http: web.Request) -> Principal | None:
        scheme, _, given = http.headers.get("Authorization", "").partition(" ")
        match scheme.lower():
            case "bearer":
                return self.keys.get(self.keys.id_of(given.strip()))
            case "moonpool":
                return self._operator(http, given)
            case _:
                return self._signed_in(http)

    def _signed_in(self, http: web.Request) -> Principal | None:
        """Return the principal that began the session of a browser's cookie; None: there is no session."""
        key_id = self.sessions.key_of(http.cookies.get(COOKIE, ""))
        found = None if key_id is None else self.keys.get(key_id)
        if found is not None and http.method not in _CHANGES_NOTHING:
            check_same_origin(http)
        return found

    def _operator(self, http: web.Request, token: str) -> Principal | None:
        """A command that has the cluster's key, and so may do everything anyway."""
        try:
            caller = process.current().verify(f"{http.method} {http.raw_path}", token)
        except Unauthenticated as error:
            raise unauthorized(str(error)) from None
        return EVERYBODY if caller.role == OPERATOR else None


def endpoint_of(http: web.Request) -> str:
    """Method and route, as in ``PERMITTED``."""
    resource = http.match_info.route.resource
    method = "GET" if http.method == "HEAD" else http.method
    return f"{method} {resource.canonical if resource is not None else 'other'}"


def check_same_origin(http: web.Request) -> None:
    """Refuse what a page of another site sends with this browser's cookies.

    Browsers tell a request's site in ``Sec-Fetch-Site`` or ``Origin``, and pages cannot change these headers.
    """
    site, origin = http.headers.get("Sec-Fetch-Site"), http.headers.get("Origin")
    try:
        same = site == "same-origin" if site is not None else urlsplit(origin or "").netloc == http.host
    except ValueError:  # no browser sends such an origin
        same = False
    if not same:
        raise forbidden("this request came from a page of another site, and would have used your session")
