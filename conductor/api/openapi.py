"""The OpenAPI document of the API, from the schemas of requests."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, Literal

from aiohttp import web
from pydantic.json_schema import models_json_schema

from moonpool.conductor.accounts.ledger import KEEP_DAYS
from moonpool.conductor.api.prompts import MAX_PROMPTS
from moonpool.conductor.api.schemas import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    REFUSED,
    ChatBody,
    CompletionBody,
    GenerationBody,
)
from moonpool.conductor.api.status_routes import MAX_LISTED, TIMELINE_FORMATS
from moonpool.conductor.canary.decision import LEAST_REQUESTS
from moonpool.runtime.machine.description import own_version

Schema = dict[str, Any]

_NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string", "minLength": 1}
_TOKEN_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

# Fields with validators that accept more forms than pydantic's own schema says.
_STOP: Schema = {
    "anyOf": [
        {**_TEXT, "maxLength": MAX_STOP_CHARS},
        {"type": "array", "items": {**_TEXT, "maxLength": MAX_STOP_CHARS}, "maxItems": MAX_STOPS},
    ]
}
_PROMPT: Schema = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ]
}
_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_CONTENT: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, _NULL]}


def _object(description: str = "", /, **properties: Schema) -> Schema:
    """An object with at least ``properties``."""
    schema: Schema = {"type": "object", "required": list(properties), "properties": properties}
    return schema | ({"description": description} if description else {})


def _list_of(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _listed(items: Schema) -> Schema:
    return _object(object={"const": "list"}, data=_list_of(items))


_STRING, _INTEGER, _NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
_ANYTHING: Schema = {"type": "object"}
_REPORT = _object(environment=_ANYTHING, rows=_list_of(_ANYTHING))

_USAGE = _object(
    prompt_tokens=_INTEGER,
    completion_tokens=_INTEGER,
    total_tokens=_INTEGER,
    prompt_tokens_details=_object("Found in the cache and not computed.", cached_tokens=_INTEGER),
)
_ERROR = _object(
    error=_object(
        message=_STRING,
        type=_STRING,
        param={"type": ["string", "null"]},
        code={"type": ["string", "null"]},
    )
)
_MODEL = _object(id=_STRING, object={"const": "model"}, created=_INTEGER, max_model_len=_INTEGER)


def _answer(kind: str, *reasons: str, **choice: Schema) -> Schema:
    finish: Schema = {"type": "string", "enum": ["stop", "length", *reasons]}
    return _object(
        id=_STRING,
        object={"const": kind},
        created=_INTEGER,
        model=_STRING,
        choices=_list_of(_object(index=_INTEGER, finish_reason=finish, **choice)),
        usage=_USAGE,
    )


_ANSWERS = {
    "Completion": _answer("text_completion", text=_STRING),
    "ChatCompletion": _answer(
        "chat.completion",
        "tool_calls",
        message=_object(role={"const": "assistant"}, content={"type": ["string", "null"]}),
    ),
    "Response": _object(id=_STRING, object={"const": "response"}, status=_STRING, output=_list_of(_ANYTHING)),
    "Prefetch": _object(
        id=_STRING, object={"const": "prefetch"}, prompt_tokens=_INTEGER, cached_tokens=_INTEGER
    ),
    "Tokens": _object(count=_INTEGER, max_model_len=_INTEGER, tokens=_list_of(_INTEGER)),
    "Text": _object(prompt=_STRING),
}
_ERRORS = {
    "400": "The request is invalid; `param` names the field, `message` says how to correct it.",
    "401": "No API key, or an unknown one (only where keys are configured).",
    "403": "The key is of another role.",
    "404": "There is no such model, request, node or result.",
    "405": "The method is not allowed.",
    "409": "A request with this id is in flight, a running one did not move, or the fleet cannot be changed "
    "so.",
    "413": "The body is larger than conductor.max_body_nbytes.",
    "429": "Over a limit, or an SLO would be missed: retry after Retry-After seconds.",
    "500": "All attempts failed, or a defect; see the conductor's log.",
    "501": "No node can make an answer match a structure.",
    "503": "No node of a role is available, the conductor is draining, or a provider failed.",
    "504": "The request's deadline passed.",
}


async def openapi(http: web.Request) -> web.Response:
    """``GET /openapi.json``"""
    # The bound of a seed exceeds 64 bits, which orjson cannot write.
    return web.json_response(document())


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    bodies: list[tuple[type[GenerationBody], Literal["validation"]]] = [
        (CompletionBody, "validation"),
        (ChatBody, "validation"),
    ]
    _, definitions = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
    schemas: dict[str, Any] = definitions["$defs"]
    schemas["CompletionBody"]["properties"] |= {"prompt": _PROMPT, "stop": _STOP}
    schemas["CompletionBody"]["required"] = ["prompt"]
    schemas["ChatBody"]["properties"]["stop"] = _STOP
    schemas["Message"]["properties"]["content"] = _CONTENT
    for name in ("CompletionBody", "ChatBody"):
        _describe(schemas[name])
    schemas |= _ANSWERS | {"Error": _ERROR, "Model": _MODEL}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Moonpool",
            "version": own_version(),
            "summary": "OpenAI's API, and the timeline of each request",
        },
        "paths": _paths(),
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Where conductor.tenants_path is set.",
                }
            },
        },
        "security": [{}, {"key": []}],
    }


def _paths() -> dict[str, Any]:
    """Each path with its methods; the names in braces are its parameters."""
    paths: dict[str, dict[str, Any]] = {}
    for method, pages in (("post", _posts()), ("get", _gets())):
        for path, page in pages.items():
            names = re.findall(r"{(\w+)}", path)
            own = [{"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names]
            paths.setdefault(path, {})[method] = page | {"parameters": own + page.get("parameters", [])}
    return paths


def _gets() -> dict[str, Any]:
    limit: Schema = {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": 50}
    about = _object(moonpool=_STRING, options=_list_of(_ANYTHING))
    day = {"type": "string", "format": "date"}
    days = {"type": "integer", "minimum": 1, "maximum": KEEP_DAYS, "default": 1}
    form = {"enum": list(TIMELINE_FORMATS), "default": "json"}
    usage = _object(day=_STRING, model=_STRING, tenant=_STRING, cost=_NUMBER)
    nodes = _object(nodes=_list_of(_ANYTHING))
    return {
        "/v1/models": _page("The served model and its LoRA adapters", _listed(_ref("Model"))),
        "/v1/models/{name}": _page("The model or an adapter by its name", _ref("Model"), 404),
        "/v1/cluster": _page("Nodes, their load and tiers", nodes),
        "/v1/cell": _page("Load and hot prefixes, for routers of cells", _ANYTHING),
        "/v1/cell/prefixes": _page("Hot prefixes, for other cells", _object(prefixes=_list_of(_ANYTHING))),
        "/v1/fleet": _page("Nodes, as the index and their provider know them", nodes),
        "/v1/fleet/rollout": _page("The latest rollout", _ANYTHING),
        "/v1/fleet/canary": _page(
            "The latest canary of each model, its counts and what they say", _listed(_ANYTHING)
        ),
        "/v1/requests": _page("The latest requests, newest first", _listed(_ANYTHING), 400, limit=limit),
        "/v1/requests/{id}/timeline": _page("The timeline of a request", _ANYTHING, 400, 404, format=form),
        "/v1/usage": _page(
            "Tokens, seconds of nodes and cost by tenant, model and day (UTC), and the nodes' whole time",
            *(_listed(usage), 400, 503),
            day=day,
            days=days,
        ),
        "/v1/about": _page("Code, machine and options of this conductor, without secrets", about),
        "/v1/report": _page("The cluster as the record of a run, with figures since the start", _REPORT),
        "/v1/benchmarks": _page("Results of benchmarks, newest first", _listed(_object(name=_STRING))),
        "/v1/benchmarks/{name}": _page("One result, as `moonpool bench … --json` wrote it", _REPORT, 404),
        "/v1/prometheus-targets": _page("The nodes, for Prometheus' service discovery", _list_of(_ANYTHING)),
        "/healthz": _page("The process answers", _object(status={"const": "ok"})),
        "/readyz": _ready(),
    }


def _posts() -> dict[str, Any]:
    changed = _object(role=_STRING, count=_INTEGER, started=_list_of(_STRING), stopped=_list_of(_STRING))
    switched = _object(node_id=_STRING, role=_STRING, former=_STRING, num_requests=_INTEGER)
    moved = _object(node_id=_STRING, model=_STRING, former=_STRING, num_requests=_INTEGER, num_left=_INTEGER)
    migrated = _object(request_id=_STRING, moves=_list_of(_ANYTHING))
    ending = _object(node_id=_STRING, by=_STRING)
    least = {"type": "integer", "minimum": 1, "default": LEAST_REQUESTS}
    return {
        "/v1/fleet/scale/{role}/{count}": _page("Change the number of nodes", changed, 400, 409, 503),
        "/v1/fleet/switch/{node}/{role}": _page("Change the role of a node", switched, 404, 409, 503),
        "/v1/fleet/switch/{node}/model/{name}": _page(
            "Have a node drain, and serve another model", moved, 404, 409, 503
        ),
        "/v1/cell/prefixes": _page("Read hot prefixes of another cell", _object(copied=_INTEGER), 400),
        "/v1/fleet/drain/{node}": _page("Drain and end a node", ending, 404, 503),
        "/v1/fleet/rollout": _page(
            "Replace all nodes by ones with other settings", _ANYTHING, 400, 409, set=_TEXT
        ),
        "/v1/fleet/rollout/abort": _page("Roll back the rollout that runs", _ANYTHING, 409),
        "/v1/fleet/canary/{name}/start/{candidate}/{share}": _page(
            "Send a share (percent) of the requests for a model to another one",
            *(_ANYTHING, 400, 404, 409, 503),
            tenant=_TEXT,
            least=least,
            auto={"enum": ["0", "1"], "default": "0"},
        ),
        "/v1/fleet/canary/{name}/share/{share}": _page(
            "Change the share of a canary that runs; its counts begin anew", _ANYTHING, 400, 404, 409, 503
        ),
        "/v1/fleet/canary/{name}/promote": _page(
            "Have the candidate answer for the model", _ANYTHING, 404, 409, 503
        ),
        "/v1/fleet/canary/{name}/rollback": _page(
            "Have the model before it answer again", _ANYTHING, 404, 409, 503
        ),
        "/v1/load_lora_adapter": _with_body(
            _page("Load a LoRA adapter on all nodes", _STRING, 400, 503),
            ("lora_name", "lora_path"),
            load_inplace={"type": "boolean", "description": "Replace another content of that name."},
        ),
        "/v1/unload_lora_adapter": _with_body(
            _page("Unload a LoRA adapter", _STRING, 400, 404, 503), ("lora_name",)
        ),
        "/v1/completions": _generation("CompletionBody", "Completion", "Continue a prompt"),
        "/v1/chat/completions": _generation("ChatBody", "ChatCompletion", "Answer in a chat"),
        "/v1/responses": _call("Response", "Answer, in OpenAI's Responses API"),
        "/v1/prefetch": _call("Prefetch", "Compute or load the prompt of `messages`"),
        "/tokenize": _call("Tokens", "Token ids of a `prompt`, or of the prompt of `messages`"),
        "/detokenize": _call("Text", "The text of `tokens`"),
        "/v1/embeddings": _call("Error", "Refused: the served model generates text"),
        "/v1/requests/{id}/migrate": _page(
            "Move a running request to another decode node", migrated, 409, target=_TEXT
        ),
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _describe(schema: Schema) -> None:
    """Allow null as absent, and list the refused fields."""
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()):
            schema["properties"][name] = {"anyOf": [field, _NULL]}
    refused = "; ".join(
        f"{name}: {why}" for name, why in sorted(REFUSED.items()) if name not in schema["properties"]
    )
    schema["description"] = f"Other fields are ignored, except these, which are refused: {refused}."


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _errors(*statuses: int) -> dict[str, Any]:
    content = _json(_ref("Error"))
    return {str(status): {"description": _ERRORS[str(status)], "content": content} for status in statuses}


_SLO_HEADERS = [
    {
        "name": name,
        "in": "header",
        "description": f"Wanted {what}, in milliseconds; without it the tenant's or the cluster's SLO.",
        "schema": {"type": "number", "exclusiveMinimum": 0},
    }
    for name, what in (("x-slo-ttft-ms", "time to the first token"), ("x-slo-tpot-ms", "time between tokens"))
]


def _generation(body: str, answer: str, summary: str) -> dict[str, Any]:
    explain = {
        "name": "x-moonpool-explain",
        "in": "header",
        "description": "1: the answer includes placements, their reasons and each prefix's outcome.",
        "schema": {"type": "string", "enum": ["0", "1"]},
    }
    page = _call(answer, summary, _ref(body))
    page["responses"]["200"] = {
        "description": "The answer; as events, ended by `data: [DONE]`, where stream is true.",
        "content": _json(_ref(answer)) | {"text/event-stream": {"schema": _STRING}},
    }
    return page | {"parameters": [explain, *_SLO_HEADERS]}


def _call(answer: str, summary: str, body: Schema = _ANYTHING) -> dict[str, Any]:
    """``body``: _ANYTHING: it is described elsewhere."""
    errors = _errors(400, 401, 403, 404, 405, 409, 413, 429, 500, 501, 503, 504)
    answers = {"200": {"description": summary, "content": _json(_ref(answer))}, **errors}
    return {"summary": summary, "requestBody": _body(body), "responses": answers}


def _body(schema: Schema) -> dict[str, Any]:
    return {"required": True, "content": _json(schema)}


def _page(summary: str, schema: Schema, *errors: int, **query: Schema) -> dict[str, Any]:
    """``query``: the schemas of its parameters."""
    parameters = [{"name": name, "in": "query", "schema": kind} for name, kind in query.items()]
    answers = {"200": {"description": summary, "content": _json(schema)}, **_errors(*errors, 401, 403, 405)}
    return {"summary": summary, "parameters": parameters, "responses": answers}


def _with_body(page: dict[str, Any], texts: tuple[str, ...], **optional: Schema) -> dict[str, Any]:
    """The page of a request with a JSON object, answered with a text."""
    schema = _object(**dict.fromkeys(texts, _TEXT))
    schema["properties"] |= optional
    page["responses"]["200"]["content"] = {"text/plain": {"schema": _STRING}}
    return page | {"requestBody": _body(schema)}


def _ready() -> dict[str, Any]:
    schema = _object(ready={"type": "boolean"}, status=_STRING)
    # Only for those with a key, where keys are configured.
    schema["properties"]["degraded"] = _list_of(_STRING)
    page = _page("Whether requests can be served", schema)
    unavailable = "No request can be served: no node, or draining"
    page["responses"]["503"] = page["responses"]["200"] | {"description": unavailable}
    return page
