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


class ApiError(MoonpoolError):
    """The answer to a request that failed. ``param``: the wrong field."""

    failure = FailureClass.REQUEST

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        kind: str = "invalid_request_error",
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.kind = kind
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
        case RequestRejected():
            # Retry-After is in whole seconds; 0 would mean at once.
            wait = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
            return ApiError(
                429, str(error), kind="rate_limit_error", code="rate_limit_exceeded", headers=wait
            )
        case NoNodes():
            return unavailable(str(error), "no_nodes", error.retry_after_s)
        case OutsideRegions():
            return unavailable(str(error), "outside_regions")
        case ConductorClosed():
            return unavailable(str(error), "draining")
        case NoStructures() | StructureUnsupported():
            return ApiError(501, str(error), kind="not_implemented_error", code="structure_unsupported")
        case StructureInvalid():
            return bad_request(str(error), None, "invalid_structure")
        case GrammarsBusy():
            return ApiError(
                429,
                str(error),
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                headers={"Retry-After": "1"},
            )
        case RequestInvalid():
            return bad_request(str(error), None, "invalid_request")
        case DuplicateRequest():
            return ApiError(409, str(error), code="duplicate_request")
        case MigrationFailed():
            return ApiError(409, str(error), code="not_migrated")
        case DeadlineExceeded():
            return ApiError(504, str(error), kind="timeout_error", code="deadline_exceeded")
        case RequestEndsLives():
            # Not 500: clients would send it again.
            return ApiError(400, str(error), code="request_ends_nodes")
        case RequestFailed():
            return ApiError(500, str(error), kind="server_error", code="request_failed")
        case ChatTemplateError():
            return bad_request(str(error), "messages")
        case NodeMissing():
            return ApiError(404, str(error), code="node_not_found")
        case FleetUnchanged():
            return ApiError(409, str(error), code="fleet_unchanged")
        case AdapterInvalid():
            return bad_request(str(error), None, "invalid_adapter")
        case AdapterMissing():
            return ApiError(404, str(error), code="model_not_found")
        case AdapterFailed():
            return unavailable(str(error), "adapter_failed")
        case ProviderFailed():
            return unavailable(str(error), "provider_failed")
        case IndexUnavailable():
            return unavailable(str(error), "index_unavailable")
        case web.HTTPException():
            return _from_http(error)
        case ConnectionError():
            return ApiError(400, "the connection was closed", code="disconnected")
        case MoonpoolError():
            log.error("%s: %s", type(error).__name__, error)
            return ApiError(500, str(error), kind="server_error", code="internal_error")
        case _:
            log.error("unexpected %s", type(error).__name__, exc_info=error)
            message = f"internal error ({type(error).__name__}); the conductor's log has the details"
            return ApiError(500, message, kind="server_error", code="internal_error")


def name_of(error: Exception) -> str:
    """The name of an error in records: its code, or its class."""
    return (isinstance(error, ApiError) and error.error_code) or type(error).__name__


def unavailable(message: str, code: str, retry_after_s: float = 1.0) -> ApiError:
    """503: the same request may succeed later, or elsewhere."""
    wait = {"Retry-After": str(max(1, math.ceil(retry_after_s)))}
    return ApiError(503, message, kind="service_unavailable_error", code=code, headers=wait)


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
