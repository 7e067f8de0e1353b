"""What the OpenAPI document says of each route: its fields, its answers, and every problem that it answers with.

Routes read their requests themselves, so that both ways of sending fields are read alike; nothing of this is
enforced here. A test holds the document against a sidecar that runs.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter

from gc_sidecar.server import answers, requests
from gc_sidecar.server.problems import KINDS, PROBLEM_MEDIA_TYPE

Responses = dict["int | str", dict[str, Any]]

# From the guard and from our own mistakes, whatever the route.
EVERYWHERE = (
    "token_required", "host_not_allowed", "cross_origin", "body_too_large", "internal_error",
    "token_unavailable",
)  # fmt: skip
OF_PARAMETERS = ("invalid_field", "unknown_field")
OF_FIELDS = (
    *OF_PARAMETERS, "bad_json", "body_timeout", "unsupported_media_type", "fields_twice",
)  # fmt: skip
OF_CHANGES = (
    *OF_FIELDS, "operation_running", "operation_id_reused", "owned_by_other", "other_sidecar",
    "sidecar_stopping", "incomplete_coverage", "rpc_desync", "engine_not_seen", "engine_unreachable",
    "board_not_written", "outcome_unknown",
)  # fmt: skip
# With a path that holds an id: one with a slash in it is another path.
OF_IDS = ("not_found",)

TEXT: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
HTML: dict[str, Any] = {"text/html": {"schema": {"type": "string"}}}
LOCATION = {"Location": {"schema": {"type": "string"}, "description": "where to ask for it"}}
RETRY_AFTER = {"Retry-After": {"schema": {"type": "string"}, "description": "in seconds"}}
FORMAT_PARAMETER = {
    "name": requests.FORMAT_FIELD,
    "in": "query",
    "required": False,
    "schema": {"type": "string", "enum": list(requests.FORMATS)},
    "description": "table is for eyes; an error is JSON there too",
}
READS_FORMAT: dict[str, Any] = {"parameters": [FORMAT_PARAMETER]}
REF = "#/components/schemas/{model}"
# What routes answer with, at the top; what is in them follows.
ANSWERS = (
    answers.Status, answers.OperationAnswer, answers.Operations, answers.ChangeAnswer, answers.Pauses,
    answers.WindowAnswer, answers.Windows, answers.Health, answers.Readiness, answers.Version, answers.Index,
)  # fmt: skip


def answer(shape: type, status: int = 200, **more: Any) -> Responses:
    """An answer of this shape, one of ANSWERS.

    Not a response model of FastAPI's: it would make a validator for each at every start, and use none.
    """
    content = {"application/json": {"schema": {"$ref": REF.format(model=shape.__name__)}}}
    return {status: {"description": "Successful Response", "content": content, **more}}


def answer_or_table(shape: type, status: int = 200, **more: Any) -> Responses:
    """The same, which is a table where that was asked for."""
    found = answer(shape, status, **more)
    found[status]["content"] |= TEXT
    return found


def document(app: FastAPI) -> dict[str, Any]:
    """The document of `app`: what FastAPI knows of its routes, and the shapes of their answers."""
    is_made = app.openapi_schema is not None
    made = FastAPI.openapi(app)
    if not is_made:
        _, shapes = TypeAdapter.json_schemas(
            [(each.__name__, "serialization", TypeAdapter(each)) for each in ANSWERS],
            ref_template=REF,
        )
        made.setdefault("components", {}).setdefault("schemas", {}).update(shapes["$defs"])
    return made


def problems(*codes: str) -> Responses:
    """The answers with these problems, and with those that every route has."""
    by_status: dict[int, list[str]] = {}
    for code in dict.fromkeys((*codes, *EVERYWHERE)):
        by_status.setdefault(KINDS[code].status, []).append(code)
    return {status: _problem(status, by_status[status]) for status in sorted(by_status)}


def _problem(status: int, codes: list[str]) -> dict[str, Any]:
    code: dict[str, Any] = {"type": "string", "enum": codes}
    description = ", ".join(codes)
    if status == 502:
        del code["enum"]
        description += ", or the code with which a process refused or the RPC failed"
    schema = {
        "type": "object",
        "title": "Problem",
        "properties": {
            "type": {"type": "string"},
            "title": {"type": "string"},
            "status": {"type": "integer", "const": status},
            "code": code,
            "detail": {"type": "string"},
            "remedy": {"type": "string"},
            **{name: shape for each in codes for name, shape in _MEMBERS.get(each, {}).items()},
        },
        "required": ["type", "title", "status", "code", "detail"],
    }
    return {"description": description, "content": {PROBLEM_MEDIA_TYPE: {"schema": schema}}}


_OPERATION = {"operation": {"$ref": "#/components/schemas/Operation"}}
_ROLLED_BACK = {"rolled_back": {"enum": [True, False, "unknown"]}}
_ERRORS = {
    "errors": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"field": {"type": "string"}, "detail": {"type": "string"}},
            "required": ["field", "detail"],
        },
    }
}
# What a problem of a code tells beyond what all of them do.
_MEMBERS: Mapping[str, Mapping[str, Any]] = {
    "invalid_field": _ERRORS,
    "unknown_field": _ERRORS,
    "operation_running": {"operation_id": {"type": "string"}},
    "owned_by_other": {"owner": {"type": "string"}},
    "pause_too_long": {
        "expected_pause_s": {"type": "number"},
        "max_maintain_pause_s": {"type": "number"},
    },
    "incomplete_coverage": {**_OPERATION, **_ROLLED_BACK},
    "engine_not_seen": _OPERATION,
    "outcome_unknown": {**_OPERATION, **_ROLLED_BACK},
    "not_ready": {
        "ready": {"type": "boolean", "const": False},
        "reasons": {"type": "array", "items": {"$ref": "#/components/schemas/Reason"}},
    },
}


@functools.lru_cache
def described_fields(fields: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI of a route's fields, which may come in either way."""
    return {
        "requestBody": {
            "required": False,
            "description": "the fields, unless they are query parameters",
            "content": {"application/json": {"schema": fields.model_json_schema()}},
        },
        "parameters": query_parameters(fields),
    }


def query_parameters(fields: type[BaseModel], has_format: bool = True) -> list[dict[str, Any]]:
    """The fields as query parameters. Those that must be given may be in the body instead."""
    schema = fields.model_json_schema()
    required = set(schema.get("required", ()))
    parameters = [
        {
            "name": name,
            "in": "query",
            "required": False,
            "schema": _without_null(shape),
            "description": ": ".join(
                filter(None, ("required" if name in required else "", shape.get("description")))
            ),
        }
        for name, shape in schema["properties"].items()
    ]
    return [*parameters, FORMAT_PARAMETER] if has_format else parameters


def _without_null(shape: Mapping[str, Any]) -> dict[str, Any]:
    """The same without null, which a query cannot say."""
    others = [each for each in shape.get("anyOf", ()) if each != {"type": "null"}]
    own = {name: value for name, value in shape.items() if name not in ("anyOf", "description")}
    if own.get("default", ...) is None:
        del own["default"]
    return {**own, **(others[0] if len(others) == 1 else {"anyOf": others} if others else {})}
