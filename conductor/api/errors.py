"""API errors in OpenAI's format, and the one mapping of exceptions to HTTP statuses."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import orjson
from aiohttp import web

from moonpool.conductor.errors import (
    ConductorClosed,
    DeadlineExceeded,
    DuplicateRequest,
    MigrationFailed,
    NoNodes,
    NoStructures,
    OutsideRegions,
    RequestEndsLives,
    RequestFailed,
    RequestInvalid,
    RequestRejected,
)
from moonpool.conductor.fleet.errors import (
    AdapterFailed,
    AdapterInvalid,
    AdapterMissing,
    FleetUnchanged,
    NodeMissing,
    ProviderFailed,
)
from moonpool.conductor.text.chat_template import ChatTemplateError
from moonpool.kvstore.errors import IndexUnavailable
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.structure.grammars import GrammarsBusy, StructureInvalid, StructureUnsupported

log = logging.getLogger(__name__)

# The answer to an error of a class, the first one that fits: status and code.
_ANSWERS: Mapping[type[Exception], tuple[int, str]] = {
    RequestRejected: (429, "rate_limit_exceeded"),
    GrammarsBusy: (429, "rate_limit_exceeded"),
    NoNodes: (503, "no_nodes"),
    OutsideRegions: (503, "outside_regions"),
    ConductorClosed: (503, "draining"),
    NoStructures: (501, "structure_unsupported"),
    StructureUnsupported: (501, "structure_unsupported"),
    StructureInvalid: (400, "invalid_structure"),
    RequestInvalid: (400, "invalid_request"),
    DuplicateRequest: (409, "duplicate_request"),
    MigrationFailed: (409, "not_migrated"),
    DeadlineExceeded: (504, "deadline_exceeded"),
    RequestEndsLives: (400, "request_ends_nodes"),  # not 500: clients would send it again
    RequestFailed: (500, "request_failed"),
    ChatTemplateError: (400, "invalid_value"),
    NodeMissing: (404, "node_not_found"),
    FleetUnchanged: (409, "fleet_unchanged"),
    AdapterInvalid: (400, "invalid_adapter"),
    AdapterMissing: (404, "model_not_found"),
    AdapterFailed: (503, "adapter_failed"),
    ProviderFailed: (503, "provider_failed"),
    IndexUnavailable: (503, "index_unavailable"),
}
# OpenAI's types of errors, where they are not the request's.
_KINDS = {
    429: "rate_limit_error",
    500: "server_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(MoonpoolError):
    """The answer to a request that failed. ``param``: the wrong field; ``kind``: None: by the status."""

    failure = FailureClass.REQUEST

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind or _KINDS.get(status, "invalid_request_error")
        self.error_code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """``{"error": {"message", "type", "param", "code"}}``"""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.error_code}
        return orjson.dumps({"error": error})

    def response(self) -> web.Response:
        return web.Response(
            status=self.status, body=self.body(), headers=self.headers, content_type="application/json"
        )


def bad_request(message: str, param: str | None, code: str | None = "invalid_value") -> ApiError:
    """400: ``param`` is invalid."""
    return ApiError(400, message, param=param, code=code)


def unauthorized(why: str = "the API key is missing or unknown") -> ApiError:
    """401: the caller did not prove who it is."""
    return ApiError(
        401,
        f"{why}: send a key as 'Authorization: Bearer KEY', or sign in at /sign-in",
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def sign_in_first() -> ApiError:
    """303: a browser without a session asked for a page."""
    headers = {"Location": "/sign-in", "Cache-Control": "no-store"}
    return ApiError(303, "no session: sign in at /sign-in", code="no_session", headers=headers)


def forbidden(why: str) -> ApiError:
    """403: what the caller proved does not suffice."""
    return ApiError(403, why, kind="permission_error", code="forbidden")


def draining() -> ApiError:
    """503: this conductor is draining."""
    return unavailable("the conductor is draining: send the request to another one", "draining")


def as_api_error(error: Exception) -> ApiError:
    """The answer to any exception; unexpected ones are logged with their traceback."""
    match error:
        case ApiError():
            return error
        case web.HTTPException():
            return _from_http(error)
        case ConnectionError():
            return ApiError(400, "the connection was closed", code="disconnected")
    for kind, (status, code) in _ANSWERS.items():
        if isinstance(error, kind):
            param = "messages" if kind is ChatTemplateError else None
            wait = _retry_after(getattr(error, "retry_after_s", 1.0)) if status in (429, 503) else None
            return ApiError(status, str(error), param=param, code=code, headers=wait)
    if isinstance(error, MoonpoolError):
        log.error("%s: %s", type(error).__name__, error)
        return ApiError(500, str(error), code="internal_error")
    log.error("unexpected %s", type(error).__name__, exc_info=error)
    message = f"internal error ({type(error).__name__}); the conductor's log has the details"
    return ApiError(500, message, code="internal_error")


def name_of(error: Exception) -> str:
    """The name of an error in records: its code, or its class."""
    return (isinstance(error, ApiError) and error.error_code) or type(error).__name__


def unavailable(message: str, code: str) -> ApiError:
    """503: the same request may succeed later, or elsewhere."""
    return ApiError(503, message, code=code, headers=_retry_after(1.0))


def _retry_after(seconds: float) -> dict[str, str]:
    """Whole seconds; 0 would mean at once."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def _from_http(error: web.HTTPException) -> ApiError:
    """Errors of aiohttp: unknown routes, wrong methods, bodies over the limit."""
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, error.text or "the request body is too large", code="body_too_large")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{error.method} is not allowed here; use {allowed}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})
    if isinstance(error, web.HTTPNotFound):
        return ApiError(404, "this path does not exist; see /openapi.json for all paths", code="not_found")
    return ApiError(error.status, error.text or error.reason, code="http_error")
