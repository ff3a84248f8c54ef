"""Sign-in of browsers, and their sessions."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha256
from html import escape
from pathlib import Path

from aiohttp import web

from moonpool.conductor.access.gate import COOKIE, PRINCIPAL, check_same_origin
from moonpool.conductor.access.roles import PERMITTED
from moonpool.conductor.access.sessions import LASTS_S
from moonpool.conductor.api.context import CONTEXT
from moonpool.conductor.api.status_routes import reply
from moonpool.runtime.observing import audit

_PAGE = (Path(__file__).parent / "sign_in.html").read_text(encoding="utf-8")
_STYLE = _PAGE.partition("<style>")[2].partition("</style>")[0]
# The page loads nothing, runs nothing, is shown in no frame, and sends its form only here.
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; img-src data:; "
        f"style-src 'sha256-{b64encode(sha256(_STYLE.encode()).digest()).decode()}'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
}


async def page(http: web.Request) -> web.Response:
    """``GET /sign-in``: a form for an API key."""
    if not http.app[CONTEXT].gate.keys.are_configured:
        return _to("/")
    return _form()


async def sign_in(http: web.Request) -> web.Response:
    """``POST /sign-in``: exchange an API key for a cookie that scripts cannot read."""
    gate = http.app[CONTEXT].gate
    if not gate.keys.are_configured:
        return _to("/")
    check_same_origin(http)
    key_id = gate.keys.id_of(str((await http.post()).get("key", "")).strip())
    principal = gate.keys.get(key_id)
    if principal is None:
        return _refused(http, 401, "This API key is unknown.")
    if principal.role not in PERMITTED["GET /"].roles:
        told = f"This key is of the role {principal.role}; pages need one of the role read or admin."
        return _refused(http, 403, told)
    audit.administrative("POST /sign-in", "ok", who=str(principal), origin=http.remote or "")
    answer = _to("/")
    answer.set_cookie(
        COOKIE,
        gate.sessions.begin(key_id),
        max_age=LASTS_S,
        path="/",
        secure=http.secure or http.headers.get("X-Forwarded-Proto") == "https",
        httponly=True,
        samesite="Strict",
    )
    return answer


async def sign_out(http: web.Request) -> web.Response:
    """``POST /sign-out``: end the session of this browser."""
    check_same_origin(http)
    answer = _to("/sign-in")
    answer.del_cookie(COOKIE, path="/", httponly=True, samesite="Strict")
    return answer


async def session(http: web.Request) -> web.Response:
    """``GET /v1/session``: the role and tenant of the caller. ``signed_in``: by a cookie."""
    principal, keys = http[PRINCIPAL], http.app[CONTEXT].gate.keys
    signed_in = keys.are_configured and "Authorization" not in http.headers
    return reply({"role": principal.role, "tenant": principal.scope, "signed_in": signed_in})


def _refused(http: web.Request, status: int, why: str) -> web.Response:
    audit.refused("POST /sign-in", why, origin=http.remote or "")
    return _form(f'<p role="alert">{escape(why)}</p>', status)


def _form(problem: str = "<p></p>", status: int = 200) -> web.Response:
    text = _PAGE.replace("<p></p>", problem)
    return web.Response(text=text, status=status, content_type="text/html", headers=_HEADERS)


def _to(path: str) -> web.Response:
    return web.Response(status=303, headers={"Location": path, "Cache-Control": "no-store"})
